"""Micro-batches: which of the sequences that decode run in the next step of a pipeline. Plain Python, no tensors.

A pipeline of P stages works on P steps at a time. A sequence is in one of them only, since its next token is known when the last
stage has sampled it; hence the sequences that decode take turns, in P groups of equally many. Nobody is given to a group: each step
takes its share of those that are at hand. Chunks of prompts wait for no token: a prompt is cut so that all stages work on it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

LEAST_TOKENS = 1024
"""Of a part of what there is to run: with fewer tokens a step takes nearly as long, for it reads as many weights."""


def choose_group(decoding: Sequence[int], under_way: Sequence[Collection[int]], stages: int) -> list[int]:
    """Return which sequences run a token in the next step, in the order given.

    As long as the same sequences decode, each runs in one of any P steps in a row, and the sizes of groups differ by one at most.
    With fewer than P of them every step takes one, and its token may still be on its way from the last stage to the first.

    Args:
        decoding: Ids of all sequences that have only their last token to run, known or in flight, the most urgent first.
        under_way: Ids of those that sample in each step whose results are still to come, the oldest step first.
        stages: P.
    """
    if not decoding:
        return []
    groups = min(stages, len(decoding))
    recent = under_way[max(0, len(under_way) - groups + 1) :]
    busy = {seq_id for step in recent for seq_id in step}
    size, larger = divmod(len(decoding), groups)
    if larger > sum(len(step) > size for step in recent):
        size += 1
    return [seq_id for seq_id in decoding if seq_id not in busy][:size]


def tokens_of_step(left: Iterable[int], most: int, stages: int) -> int:
    """Return how many tokens the next step may have: a P-th of what there is to run, lest one stage has all of it and others none.

    Args:
        left: Tokens that each sequence has still to run.
        most: Tokens that a step can have.
        stages: P.
    """
    total = 0
    for tokens in left:
        total += max(0, tokens)
        if total >= most * stages:
            return most
    return min(most, max(LEAST_TOKENS, -(-total // stages)))
