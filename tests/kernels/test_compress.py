"""Streaming pooling against one softmax over all tokens of a group, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsv4lite.kernels.compress import (
    OVERLAP_RATIO,
    CompressInputs,
    Span,
    compress,
    compress_step,
    empty_state,
    make_segments,
)
from dsv4lite.kernels.norm import rms_norm
from dsv4lite.kernels.quantize import hadamard
from dsv4lite.kernels.rope import rope, rope_angles, rope_frequencies
from dsv4lite.kernels.rows import Fp4Key, Fp8Key, Fp8Kv, RowFormat, RowStore
from tests.kernels.paged import simulate
from tests.kernels.steps import step_of
from tests.kernels.tensors import cpu_random as random

WIDTH = 6
RATIOS = (1, 4, 8, 128)


def sets_of(ratio: int) -> int:
    return 2 if ratio == OVERLAP_RATIO else 1


def entries_of(values: Tensor, scores: Tensor, ratio: int) -> Tensor:
    """Pool a whole sequence in float64: entry w is a softmax per channel over its slots."""
    values, scores, out = values.double(), scores.double(), []
    for begin in range(0, len(values) - ratio + 1, ratio):
        own = slice(begin, begin + ratio)
        if sets_of(ratio) == 1:
            v, s = values[own], scores[own]
        else:
            v, s = values[own, WIDTH:], scores[own, WIDTH:]
            if begin:
                before = slice(begin - ratio, begin)
                v, s = torch.cat([values[before, :WIDTH], v]), torch.cat([scores[before, :WIDTH], s])
        out.append((v * s.softmax(0)).sum(0))
    return torch.stack(out) if out else torch.empty(0, WIDTH, dtype=torch.float64)


@dataclass
class Prompt:
    """A sequence that is fed in parts."""

    values: Tensor
    scores: Tensor
    start: int = 0


def prompt(length: int, ratio: int, seed: int = 0) -> Prompt:
    columns = WIDTH * sets_of(ratio)
    return Prompt(random(length, columns, seed=seed), random(length, columns, seed=seed + 100, scale=4.0))


def step(prompts: list[Prompt], counts: list[int], state: Tensor, ratio: int) -> tuple[list[list[tuple[int, Tensor]]], Tensor]:
    """Feed the next tokens of some sequences; return the (position, entry) pairs that close in each, and the new state."""
    begins = [sum(counts[:i]) for i in range(len(counts))]
    segments = make_segments([Span(p.start, n, row) for p, n, row in zip(prompts, counts, begins, strict=True)], ratio)
    parts = [slice(p.start, p.start + n) for p, n in zip(prompts, counts, strict=True)]
    values = torch.cat([p.values[part] for p, part in zip(prompts, parts, strict=True)])
    scores = torch.cat([p.scores[part] for p, part in zip(prompts, parts, strict=True)])
    entries, state = compress(values, scores, state, segments)
    closed: list[list[tuple[int, Tensor]]] = [[] for _ in prompts]
    owners = segments.sequence_G[segments.closed_E].tolist()
    for owner, position, entry in zip(owners, segments.positions_E.tolist(), entries, strict=True):
        closed[owner].append((position, entry))
    for p, count in zip(prompts, counts, strict=True):
        p.start += count
    return closed, state


def run(p: Prompt, cuts: list[int], ratio: int) -> tuple[Tensor, Tensor]:
    """Feed one sequence in parts; return its entries and the last state."""
    state, found = empty_state(1, sets_of(ratio), WIDTH), []
    for a, b in zip([0, *cuts], [*cuts, len(p.values)], strict=True):
        closed, state = step([p], [b - a], state, ratio)
        found += closed[0]
    assert [position for position, _ in found] == list(range(0, len(p.values) - ratio + 1, ratio))
    return (torch.stack([entry for _, entry in found]) if found else torch.empty(0, WIDTH)), state


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 63, 127, 128, 129, 257])
def test_entries_equal_the_softmax_over_the_group(ratio: int, length: int) -> None:
    p = prompt(length, ratio)
    got, _ = run(p, [], ratio)
    torch.testing.assert_close(got.double(), entries_of(p.values, p.scores, ratio), rtol=0, atol=2e-6)


@given(length=st.integers(1, 300), ratio=st.sampled_from(RATIOS), data=st.data())
@settings(max_examples=60)
def test_no_cut_changes_a_bit(length: int, ratio: int, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, length - 1)), max_size=8))) if length > 1 else []
    whole, state = run(prompt(length, ratio), [], ratio)
    parts, state_of_parts = run(prompt(length, ratio), cuts, ratio)
    assert torch.equal(parts, whole)
    assert torch.equal(state_of_parts, state)


@given(data=st.data(), ratio=st.sampled_from(RATIOS))
@settings(max_examples=40)
def test_sequences_of_one_step_are_independent(data: st.DataObject, ratio: int) -> None:
    """Several sequences in one step, one of them full of NaN, give each what it gets alone."""
    lengths = data.draw(st.lists(st.integers(2, 40), min_size=2, max_size=4))
    poisoned = data.draw(st.integers(0, len(lengths) - 1))
    prompts = [prompt(length, ratio, seed) for seed, length in enumerate(lengths)]
    prompts[poisoned].values.fill_(float("nan"))
    state = empty_state(len(lengths), sets_of(ratio), WIDTH)
    first = [data.draw(st.integers(1, length - 1)) for length in lengths]
    found, state = step(prompts, first, state, ratio)
    later, _ = step(prompts, [length - count for length, count in zip(lengths, first, strict=True)], state, ratio)
    for seed, length in enumerate(lengths):
        if seed != poisoned:
            expected, _ = run(prompt(length, ratio, seed), [], ratio)
            got = [entry for _, entry in found[seed] + later[seed]]
            assert len(got) == len(expected) and all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("ratio", RATIOS)
def test_state_of_another_sequence_is_not_read(ratio: int) -> None:
    """A sequence that starts at a boundary reads its own state only; the second segment of a step starts without one."""
    p, poisoned = prompt(3 * ratio, ratio), prompt(3 * ratio, ratio, 5)
    expected, _ = run(p, [], ratio)
    p.start = 0
    state = torch.cat([torch.full((1, sets_of(ratio), 3, WIDTH), float("nan")), empty_state(1, sets_of(ratio), WIDTH)])
    closed, _ = step([poisoned, p], [3 * ratio, 3 * ratio], state, ratio)
    assert torch.equal(torch.stack([entry for _, entry in closed[1]]), expected)


@pytest.mark.parametrize("ratio", RATIOS)
def test_closed_group_leaves_nothing_but_the_next_ones_lower_half(ratio: int) -> None:
    _, state = run(prompt(2 * ratio, ratio), [], ratio)
    fresh = empty_state(1, 1, WIDTH)
    assert torch.equal(state[:, -1:], fresh)
    assert sets_of(ratio) == 1 or not torch.equal(state[:, :1], fresh)


@pytest.mark.parametrize("ratio", RATIOS)
def test_extreme_scores_neither_overflow_nor_vanish(ratio: int) -> None:
    p = prompt(2 * ratio, ratio)
    p.scores *= 1e4
    got, _ = run(p, [], ratio)
    torch.testing.assert_close(got.double(), entries_of(p.values, p.scores, ratio), rtol=0, atol=2e-6)


@pytest.mark.parametrize("ratio", [4, 8])
def test_gradients_equal_those_of_the_softmax(ratio: int) -> None:
    p = prompt(19, ratio)
    values, scores = p.values.double().requires_grad_(), p.scores.double().requires_grad_()
    weight = random(19 // ratio, WIDTH, seed=3).double()
    expected = torch.autograd.grad((entries_of(values, scores, ratio) * weight).sum(), (values, scores))
    segments = make_segments([Span(0, 19)], ratio)
    entries, _ = compress(values, scores, empty_state(1, sets_of(ratio), WIDTH), segments)
    got = torch.autograd.grad((entries * weight).sum(), (values, scores))
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.isfinite(ours).all()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_segments_name_places_groups_and_boundaries() -> None:
    s = make_segments([Span(2, 7), Span(7, 1, 7), Span(4, 4, 8)], 4)
    # positions 2 3 | 4 5 6 7 | 8      7      4 5 6 7
    assert s.sequence_G.tolist() == [0, 0, 0, 1, 2]
    assert s.first_G11.flatten().tolist() == [True, False, False, True, True]
    assert s.last_S.tolist() == [2, 3, 4] and s.open_S11.flatten().tolist() == [True, False, False]
    assert s.closed_E.tolist() == [0, 1, 3, 4] and s.positions_E.tolist() == [0, 4, 4, 4]
    assert s.missing_GL is not None
    rows = [row[~gone].tolist() for row, gone in zip(s.tokens_GL, s.missing_GL, strict=True)]
    assert rows == [[0, 1], [2, 3, 4, 5], [6], [7], [8, 9, 10, 11]]


# ---------------------------------------------------------------------------------------------------------- a step into the store


def step_inputs(tokens: int, width: int, ratio: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return projections with columns to spare, the position term and the norm's weight."""
    columns = width * sets_of(ratio)
    projected = random(tokens, 2 * columns + 32, seed=seed, scale=2.0)[:, 16 : 16 + 2 * columns]
    return projected, random(ratio, columns, seed=seed + 1), random(width, seed=seed + 2).abs() + 0.5


FORMATS: list[tuple[RowFormat, bool]] = [(Fp8Kv(64, 64), False), (Fp4Key(128), True), (Fp8Key(128), False)]


@pytest.mark.parametrize(("fmt", "transformed"), FORMATS)
@pytest.mark.parametrize("ratio", [4, 128])
def test_compress_step_stores_what_the_model_composes(ratio: int, fmt: RowFormat, transformed: bool) -> None:
    """Chunks, singles and padding; entries and states equal those of each sequence pooled, normed and packed at once."""
    width, slots = fmt.width, [2, 0, 3]
    state = empty_state(5, 1, sets_of(ratio), width)
    other = state[1:2].fill_(7.0).clone()
    store = RowStore(fmt, 3 * 16, 256 // ratio, torch.device("cpu"))
    lens = [2 * ratio + 3, ratio, 1]
    whole = [step_inputs(3 * ratio + 6, width, ratio, seed=i)[0] for i in range(len(lens))]
    _, ape, norm = step_inputs(1, width, ratio)
    freq = rope_frequencies(64, 10000.0)
    starts = [0, 0, 0]
    for turn, counts in enumerate([lens, [1, 1, 1], [ratio - 1, 2, ratio + 1]]):
        paging = step_of(starts, counts, slots=slots, padding=2, width=int(turn == 1))
        parts = [w[start : start + count] for w, start, count in zip(whole, starts, counts, strict=True)]
        projected = torch.cat([*parts, torch.full((2, parts[0].shape[1]), float("nan"))])
        group = paging.positions_T // ratio * ratio
        angles = rope_angles(group, freq)
        compress_step(CompressInputs(projected, ape, norm, state, store, paging, ratio, *angles, 1e-6, transformed))
        starts = [start + count for start, count in zip(starts, counts, strict=True)]
    assert torch.equal(state[1:2], other)
    for i, (end, slot) in enumerate(zip(starts, slots, strict=True)):
        segments = make_segments([Span(0, end)], ratio)
        columns = ape.shape[1]
        scores = whole[i][:end, columns:] + ape[torch.arange(end) % ratio]
        pooled, after = compress(whole[i][:end, :columns], scores, empty_state(1, sets_of(ratio), width), segments)
        assert torch.equal(state[slot], after)
        rows = rope(rms_norm(pooled.bfloat16(), norm, 1e-6), *rope_angles(segments.positions_E, freq))
        entry = torch.arange(len(rows))
        per_page = 256 // ratio
        addresses = paging.grow_SP[i][entry // per_page].long() * per_page + entry % per_page
        wanted = simulate(fmt, hadamard(rows) if transformed else rows)
        assert torch.equal(store.read(addresses, torch.bfloat16), wanted)


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("start", [1, 2, 3, 4, 5, 125, 126, 127, 128])
def test_state_before_each_draft_is_kept(ratio: int, start: int) -> None:
    """Spans of five with four drafts, of which two, none and all are accepted: the same as without the others."""
    fmt, drafts = Fp8Kv(64, 64), 4
    projected, ape, norm = step_inputs(start + 9, fmt.width, ratio)
    wrong = step_inputs(drafts, fmt.width, ratio, seed=50)[0]
    freq = rope_frequencies(64, 10000.0)

    def run(state: Tensor, store: RowStore, rows: Tensor, position: int, num_drafts: int, copy: int) -> None:
        paging = step_of(
            [1, position, 2], [3, len(rows), 1], slots=[1, 2, 0], drafts=[2, num_drafts, 0], copies=[0, copy, 0], padding=1
        )
        angles = rope_angles(paging.positions_T // ratio * ratio, freq)
        step = torch.cat([projected[:3], rows, projected[:1], torch.full((1, rows.shape[1]), float("nan"))])
        compress_step(CompressInputs(step, ape, norm, state, store, paging, ratio, *angles, 1e-6, False))

    ours, plain = (empty_state(4, drafts + 1, sets_of(ratio), fmt.width) for _ in range(2))
    our_store, plain_store = (RowStore(fmt, 3 * 16, 256 // ratio, torch.device("cpu")) for _ in range(2))
    for state, store in ((ours, our_store), (plain, plain_store)):
        run(state, store, projected[:start], 0, 0, 0)
    done, copy = start, 0
    for right in (2, 0, drafts):
        run(ours, our_store, torch.cat([projected[done : done + right + 1], wrong[right:]]), done, drafts, copy)
        for i in range(right + 1):
            run(plain, plain_store, projected[done + i : done + i + 1], done + i, 0, 0)
            assert torch.equal(ours[2, i], plain[2, 0])
        done, copy = done + right + 1, right
    assert done == start + 9
    entry, per_page = torch.arange(done // ratio), 256 // ratio
    tables = step_of([1, done, 2], [3, 1, 1], slots=[1, 2, 0]).grow_SP
    addresses = tables[1][entry // per_page].long() * per_page + entry % per_page
    assert torch.equal(our_store.read(addresses, torch.bfloat16), plain_store.read(addresses, torch.bfloat16))


def test_compress_step_of_nothing_but_padding_changes_nothing() -> None:
    projected, ape, norm = step_inputs(2, 128, 4)
    state, store = empty_state(1, 1, 2, 128), RowStore(Fp8Kv(64, 64), 1, 64, torch.device("cpu"))
    before = state.clone()
    paging = step_of([], [], padding=2)
    angles = torch.ones(2, 32), torch.zeros(2, 32)
    compress_step(CompressInputs(projected, ape, norm, state, store, paging, 4, *angles, 1e-6, False))
    assert torch.equal(state, before) and not store.memory.any()
