"""Sequences that decode take turns in the steps of a pipeline: evenly, and with every stage at work."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dsv4lite.scheduling.scheduler import LEAST_PIPELINE_TOKENS, pipeline_group, pipeline_tokens


@given(stages=st.integers(1, 6), phases=st.lists(st.sets(st.integers(0, 20), max_size=12), min_size=1, max_size=4))
def test_groups_are_even_disjoint_and_leave_none_out(stages: int, phases: list[set[int]]) -> None:
    """The sequences that decode change from phase to phase, with steps of other sizes still under way."""
    under_way: list[list[int]] = []
    for decoding in phases:
        groups, steps = max(1, min(stages, len(decoding))), []
        for _ in range(6 * stages):
            group = pipeline_group(sorted(decoding), under_way, stages)
            others = under_way[len(under_way) - groups + 1 :] if groups > 1 else []
            assert decoding.issuperset(group) and len(set(group)) == len(group) <= -(-len(decoding) // groups)
            assert not any(set(group) & set(other) for other in others)
            if group:
                steps.append(group)
                under_way.append(group)
            assert under_way or not decoding, "stuck"
            if under_way and (not group or len(under_way) > stages):
                under_way.pop(0)
        rounds = steps[-groups:]
        assert sorted(seq_id for group in rounds for seq_id in group) == sorted(decoding)
        assert not decoding or max(map(len, rounds)) - min(map(len, rounds)) <= 1


@given(stages=st.integers(1, 6), most=st.integers(1, 9000), left=st.lists(st.integers(-3, 20_000), max_size=9))
def test_stages_share_the_tokens_that_there_are(stages: int, most: int, left: list[int]) -> None:
    tokens, total = pipeline_tokens(left, most, stages), sum(n for n in left if n > 0)
    assert 0 < tokens <= most
    assert tokens == most or tokens * stages >= total  # P steps are enough, or cannot be
    assert tokens <= LEAST_PIPELINE_TOKENS or (tokens - 1) * stages < total  # none of them is larger than the others
