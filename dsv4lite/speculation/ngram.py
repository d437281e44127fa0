"""Prompt lookup: drafts are the tokens that followed an earlier occurrence of the sequence's last n-gram.

An index maps every n-gram, n from ``min_n`` to ``max_n``, to its latest position that was followed by a token. Each call indexes
the new tokens. A backlog (the text of the first call, or more than ``BACKLOG`` new tokens at once) is indexed backwards from its
end, at most ``BACKLOG`` positions per call, which bounds the time of a call. Only the last ``lookback`` positions stay in the
index, which bounds its memory: see ``NGramIndex``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dsv4lite.config import NGram

BACKLOG = 512
"""Most positions of a backlog that one call indexes."""

_TOKEN_BITS = 32


class NGramIndex:
    """The n-grams of one sequence.

    It holds at most ``lookback * (max_n - min_n + 1)`` n-grams of about 250 bytes: 6 MB by default if all are different.
    """

    __slots__ = ("_first", "_last", "_latest", "_lookback", "_max_n", "_min_n")

    def __init__(self, settings: NGram) -> None:
        self._min_n, self._max_n, self._lookback = settings.min_n, settings.max_n, settings.lookback
        self._latest: list[dict[int, int]] = [{} for _ in range(self._min_n, self._max_n + 1)]
        # The index has the n-grams that end before the tokens first, first + 1, ..., last - 1.
        self._first = self._last = -1

    def draft(self, tokens: Sequence[int], k: int) -> list[int]:
        """Return ``k`` tokens that may come next, or none if nothing matches.

        The longest match is used; among equally long ones, the latest. If its continuation reaches the end of the text, drafts
        repeat the text since the match.

        Args:
            tokens: The sequence so far: the tokens of the previous call, and any new ones.
            k: Number of drafts.
        """
        self._index(tokens)
        size = len(tokens)
        source = -1
        for _, key, latest in self._ngrams(tokens, size, size + 1):
            source = latest.get(key, source)  # the shortest comes first, so that the longest decides
        if source < 0:
            return []
        text = list(tokens[source : source + k])
        for place in range(len(text), k):
            text.append(text[place - (size - source)])
        return text

    def _index(self, tokens: Sequence[int]) -> None:
        """Index the new tokens and a part of the backlog; drop positions beyond ``lookback``."""
        size, oldest = len(tokens), max(self._min_n, len(tokens) - self._lookback)
        if self._last < 0 or size - self._last > BACKLOG:
            for latest in self._latest:
                latest.clear()
            self._first = self._last = size
        self._add(tokens, max(self._last, oldest), size)
        for place, key, latest in self._ngrams(tokens, self._first, min(oldest, self._last)):
            if latest.get(key) == place:
                del latest[key]
        self._first, self._last = max(self._first, oldest), size
        begin = max(oldest, self._first - BACKLOG)
        self._add(tokens, begin, self._first)
        self._first = min(self._first, begin)

    def _add(self, tokens: Sequence[int], begin: int, end: int) -> None:
        for place, key, latest in self._ngrams(tokens, begin, end):
            if latest.get(key, -1) < place:
                latest[key] = place

    def _ngrams(self, tokens: Sequence[int], begin: int, end: int) -> Iterator[tuple[int, int, dict[int, int]]]:
        """Yield (position, key, table of its length) of the n-grams that end before each position, the shortest first."""
        if begin >= end:
            return
        first, shortest, longest = max(0, begin - self._max_n), self._min_n, self._max_n
        text, tables = tokens[first:end], self._latest
        for place in range(begin, end):
            key, at = 0, place - first
            for n in range(1, min(longest, place) + 1):
                key = key << _TOKEN_BITS | text[at - n]
                if n >= shortest:
                    yield place, key, tables[n - shortest]


class NGramSpeculator:
    """Keeps an index for every sequence; a ``Speculator``."""

    def __init__(self, settings: NGram) -> None:
        self.k = settings.k
        self._settings = settings
        self._indices: dict[int, NGramIndex] = {}

    def propose(self, sequence_id: int, token_ids: Sequence[int], max_drafts: int) -> list[int]:
        if sequence_id not in self._indices:
            self._indices[sequence_id] = NGramIndex(self._settings)
        return self._indices[sequence_id].draft(token_ids, max_drafts)

    def forget(self, sequence_id: int) -> None:
        self._indices.pop(sequence_id, None)
