"""Prompt lookup against a search through the whole text."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4lite.config import NGram
from dsv4lite.speculation.ngram import BACKLOG, NGramIndex


def searched(tokens: Sequence[int], k: int, *, min_n: int, max_n: int, first: int = 0) -> list[int]:
    """What should be drafted: the text is searched from its end for the longest match of its last tokens.

    ``first`` is the first place (of the token that follows a match) that counts.
    """
    for n in range(max_n, min_n - 1, -1):
        for place in range(len(tokens) - 1, max(first, n) - 1, -1):
            if len(tokens) >= n and tokens[place - n : place] == tokens[len(tokens) - n :]:
                text = list(tokens)
                for i in range(k):
                    text.append(text[place + i])
                return text[len(tokens) :]
    return []


texts = st.lists(st.integers(0, 3), max_size=60)


@given(text=texts, more=st.lists(texts, max_size=6), k=st.integers(1, 6), min_n=st.integers(1, 3), extra=st.integers(0, 3))
def test_drafts_follow_the_longest_then_latest_match(
    text: list[int], more: list[list[int]], k: int, min_n: int, extra: int
) -> None:
    index = NGramIndex(NGram(min_n=min_n, max_n=min_n + extra, lookback=10_000))
    for part in ([], *more):
        text = text + part
        assert index.draft(text, k) == searched(text, k, min_n=min_n, max_n=min_n + extra)


@given(text=texts, more=st.lists(st.integers(0, 3), max_size=60), lookback=st.integers(1, 40))
def test_matches_farther_back_than_the_lookback_do_not_count(text: list[int], more: list[int], lookback: int) -> None:
    index = NGramIndex(NGram(lookback=lookback))
    for end in range(len(text), len(text) + len(more) + 1):
        seen = (text + more)[:end]
        assert index.draft(seen, 4) == searched(seen, 4, min_n=2, max_n=4, first=end - lookback)


@given(st.lists(st.integers(0, 2 * BACKLOG), min_size=1, max_size=5), st.integers(0, 2**32))
def test_long_texts_are_indexed_from_their_end_in_pieces(lengths: list[int], seed: int) -> None:
    rng = random.Random(seed)
    index, text, covered, seen = NGramIndex(NGram(min_n=1, max_n=2)), [], 0, -1
    for length in lengths:
        text = text + [rng.randrange(300) for _ in range(length)]
        if seen < 0 or len(text) - seen > BACKLOG:
            covered = len(text)
        covered, seen = max(0, covered - BACKLOG), len(text)
        assert index.draft(text, 3) == searched(text, 3, min_n=1, max_n=2, first=covered)


def test_a_draft_goes_round_in_a_period() -> None:
    assert NGramIndex(NGram()).draft([7, 1, 2, 3, 1, 2, 3, 1, 2], 7) == [3, 1, 2, 3, 1, 2, 3]
    assert NGramIndex(NGram(min_n=1)).draft([5, 5], 4) == [5, 5, 5, 5]


@pytest.mark.parametrize("tokens", [[], [4], [4, 4], [1, 2, 3, 4], [0, 9, 0, 0, 8, 0]])
def test_nothing_is_drafted_without_a_match(tokens: list[int]) -> None:
    assert NGramIndex(NGram()).draft(tokens, 4) == []


def test_token_ids_of_any_size_are_told_apart() -> None:
    big = 2**31 - 1
    assert NGramIndex(NGram()).draft([0, big, 6, big, 0, 5, 0, big], 1) == [6]


def test_memory_stays_within_what_is_said() -> None:
    rng, lookback = random.Random(0), 2048
    text = [rng.randrange(129280) for _ in range(6 * lookback)]
    tracemalloc.start()
    try:
        index = NGramIndex(NGram(lookback=lookback))
        before = tracemalloc.get_traced_memory()[0]
        for end in range(lookback, len(text), 7):
            index.draft(text[:end], 4)
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert used < 250 * 3 * lookback
    assert all(len(latest) <= lookback for latest in index._latest)
