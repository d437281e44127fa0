"""Where drafting starts after a step: found on the device among rows with padding, and by the host's own plan."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4lite.engine.packing import step_batch, step_inputs
from dsv4lite.engine.step_graphs import graph_widths
from dsv4lite.kernels.spans import place_spans
from dsv4lite.models.batch import Batch
from dsv4lite.sampling.samples import HostCopy, Samples
from dsv4lite.scheduling.step_plan import IN_FLIGHT, SequencePlan, StepPlan
from dsv4lite.speculation.draft_state import AcceptedLengths, DraftState

PAGES, SLOTS = 3, 9
MODEL: Any = SimpleNamespace(batch=lambda token_ids_T, paging, **rest: Batch(token_ids_T=token_ids_T, paging=paging, **rest))
NO_ENDS = torch.zeros(3, 8, dtype=torch.int64), torch.zeros(0, 8, dtype=torch.int64)
TOKENS = st.integers(0, 2)  # few, so that drafts are accepted


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[SequencePlan], list[list[int]], int, int]:
    """Return sequences, what is sampled from their rows, and the size and width of a graph that covers them."""
    plans, sampled = [], []
    for i, slot in enumerate(draw(st.permutations(range(SLOTS)))[: draw(st.integers(1, 4))]):
        tokens = draw(st.lists(TOKENS, min_size=1, max_size=5))
        start, pages = draw(st.integers(0, 500)), draw(st.integers(1, PAGES))
        plan = SequencePlan(i, slot, start, tuple(tokens), (0,), start // 64, tuple(range(pages)), True, drafts=len(tokens) - 1)
        plans.append(plan)
        sampled.append(draw(st.lists(TOKENS, min_size=len(tokens), max_size=len(tokens))))
    width = max(len(plan.token_ids) for plan in plans) + draw(st.integers(0, 2))
    return plans, sampled, len(plans) + draw(st.integers(0, 3)), width


@settings(max_examples=60, deadline=None, derandomize=True)
@given(steps())
def test_drafting_starts_at_the_same_tokens_with_and_without_padding(
    step: tuple[list[SequencePlan], list[list[int]], int, int],
) -> None:
    plans, sampled, size, width = step
    tables = torch.zeros(SLOTS + 1, 1, dtype=torch.int32)
    nothing = torch.zeros(SLOTS + 1, dtype=torch.int64)
    inputs = step_inputs(plans, size, width, PAGES, {})
    placed = place_spans(inputs, width, nothing, *NO_ENDS)
    batch = step_batch(inputs, placed, tables, MODEL, max_model_len=512)
    assert placed.places_S.tolist() == [plan.slot for plan in plans] + [SLOTS] * (size - len(plans))
    rows = [i * width + place for i, plan in enumerate(plans) for place in range(1 + plan.drafts)]
    assert batch.paging.positions_T[rows].tolist() == [p for plan in plans for p in range(plan.start, plan.end)]
    assert batch.token_ids_T[rows].tolist() == [token for plan in plans for token in plan.token_ids]
    assert int((batch.paging.positions_T >= 0).sum()) == len(rows)

    generator = torch.Generator().manual_seed(0)
    streams_TND = torch.randn(size * width, 2, 3, generator=generator)
    tokens_T = torch.randint(0, 3, (size * width,), generator=generator)
    tokens_T[rows] = torch.tensor([token for some in sampled for token in some])
    places = DraftState.empty(size + 1, PAGES, streams_TND[0])
    state = places.first(size)
    state.start(batch, streams_TND, tokens_T.view(size, width))

    first_rows = [0, *accumulate(len(plan.token_ids) for plan in plans)][:-1]
    accepted = Samples(tokens_T[None, rows].int(), plans, first_rows).accepted()
    wanted = DraftState.after(plans, first_rows, streams_TND[rows], accepted, most=size)
    count, pages = len(plans), wanted.window_SP.shape[1]
    assert torch.equal(state.streams_SND[:count], wanted.streams_SND)
    assert torch.equal(state.tokens_S[:count], wanted.tokens_S)
    assert torch.equal(state.positions_S[:count], wanted.positions_S)
    assert torch.equal(state.slots_S[:count], wanted.slots_S)
    assert torch.equal(state.window_SP[:count, :pages], wanted.window_SP) and (state.window_SP[:count, pages:] < 0).all()
    assert torch.equal(state.window_first_S[:count], wanted.window_first_S)
    for missing in (*range(count, size), size):
        assert places.positions_S[missing] == places.slots_S[missing] == -1
    before = places.positions_S.clone()
    state.advance(2 * state.streams_SND, state.tokens_S + 1)
    assert places.positions_S.tolist() == [p + 1 if p >= 0 else p for p in before.tolist()]
    assert torch.equal(places.streams_SND[:count], 2 * wanted.streams_SND)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(steps(), st.data())
def test_spans_start_where_those_before_them_ended(
    step: tuple[list[SequencePlan], list[list[int]], int, int], data: st.DataObject
) -> None:
    """The device finds what the host would have said."""
    plans, _, size, width = step
    most, columns = data.draw(st.integers(max(1, width - 1), 6)), data.draw(st.permutations(range(8)))
    accepted = AcceptedLengths(
        columns={plan.seq_id: columns[i] for i, plan in enumerate(plans)},
        next_3S=torch.tensor(data.draw(st.lists(st.lists(st.integers(0, 4), min_size=8, max_size=8), min_size=3, max_size=3))),
        drafts_KS=torch.tensor(
            data.draw(st.lists(st.lists(st.integers(-1, 4), min_size=8, max_size=8), min_size=most, max_size=most))
        ),
    )
    accepted.next_3S[0] += 200
    follows = [data.draw(st.booleans()) for _ in plans]
    asked = [
        plan._replace(start=200, unresolved=4, token_ids=(IN_FLIGHT,) * width, drafts=width - 1) if flag and width > 1 else plan
        for plan, flag in zip(plans, follows, strict=True)
    ]
    asked[0] = asked[0] if asked[0].unresolved is not None else asked[0]._replace(token_ids=(IN_FLIGHT,), drafts=0)
    plan = StepPlan(step=0, sequences=tuple(asked))
    known = accepted.resolve(plan).sequences
    last_token = torch.arange(7, 8 + SLOTS)
    inputs = step_inputs(asked, size, width, PAGES, accepted.columns)
    runs = place_spans(inputs, width, last_token, accepted.next_3S, accepted.drafts_KS).spans_XS
    ids = torch.tensor(data.draw(st.lists(st.integers(0, 4), min_size=size * width, max_size=size * width)), dtype=torch.int32)
    usable = torch.ones_like(ids)
    ill = data.draw(st.none() | st.integers(0, size * width - 1))
    if ill is not None:
        usable[ill] = 0
    samples = partial(Samples, torch.stack((ids, usable, usable)), first_rows=[i * width for i in range(len(asked))])
    results = samples(sequences=asked, placed=HostCopy(runs[:, : len(asked)])).to_host()
    assert repr(results) == repr(samples(sequences=known).to_host())  # errors, which name positions, are no equals
    assert [one.drafted for one in results.values()] == [s.drafts for s in known]
    resolved = step_inputs(
        [s._replace(token_ids=tuple(t if t != IN_FLIGHT else 7 + s.slot for t in s.token_ids)) for s in known],
        size,
        width,
        PAGES,
        {},
    )
    assert torch.equal(runs[:3], resolved[[0, 3, 2]])
    for i, s in enumerate(known):
        assert runs[3 : 4 + s.drafts, i].tolist() == resolved[6 : 7 + s.drafts, i].tolist()
    assert (runs[3:] >= 0).all()


def test_widths_of_graphs_are_few_and_cover_all_drafts() -> None:
    assert graph_widths(1, adaptive=True) == (1, 2)
    assert graph_widths(4, adaptive=True) == (1, 2, 3, 4, 5)
    assert graph_widths(4, adaptive=False) == (1, 5)
    assert graph_widths(16, adaptive=True) == (1, 2, 3, 4, 5, 9, 17)
