"""Sampling by rows on the device against the engine's sampler, which is its specification."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.sampling import argmax_finite
from dsv4lite.kernels.sampling.rows import BEST, EVERYTHING, HEADER, PIECE, Needs, RowSpace, row_bytes, sample_rows
from dsv4lite.request import Request, SamplingParams
from dsv4lite.sampling.sampler import Sampler
from dsv4lite.sampling.table import SlotTable
from dsv4lite.scheduling.step_plan import Sampled, SequencePlan

triton = pytest.importorskip("triton")

from dsv4lite.kernels.gemm.triton import counters_of  # noqa: E402
from dsv4lite.kernels.sampling.rows_triton import sample_rows_triton  # noqa: E402

pytestmark = pytest.mark.kernel

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
V = 251
EOS = 1
Settings = Mapping[str, object]


@dataclass
class Row:
    """What came out for one row."""

    token_id: int
    finite: bool
    feasible: bool
    rank: int
    logprob: float
    best: list[int]
    values: list[float]


class Batch:
    """Sequences in shuffled slots, sampled both ways."""

    def __init__(self, *settings: Settings, vocab_size: int = V, seed: int = 0) -> None:
        rng = random.Random(seed)
        self.sampler = Sampler(vocab_size, DEVICE, 0)
        self.table = SlotTable(len(settings) + 3, vocab_size, DEVICE)
        self.slots = rng.sample(range(len(settings) + 3), len(settings))
        self.last_token = torch.zeros(len(settings) + 4, dtype=torch.int64, device=DEVICE)
        self.space = RowSpace.allocate(len(settings) + 2, vocab_size, DEVICE)
        self.lengths = [rng.randrange(1, 6) for _ in settings]
        for i, each in enumerate(settings):
            params = SamplingParams(**each)  # type: ignore[arg-type]
            prompt = tuple(rng.randrange(vocab_size) for _ in range(self.lengths[i]))
            self.sampler.add(i, Request(request_id=f"r{i}", prompt_token_ids=prompt, params=params, eos_token_id=EOS), 0)
            assert self.table.holds(self.sampler.state_of(i))
            self.table.add(i, self.sampler.state_of(i))
        self.seat()

    def seat(self) -> None:
        self.table.seat([SequencePlan(i, slot, 0, (0,), (), 0, (), True) for i, slot in enumerate(self.slots)])

    def expected(self, logits: Tensor) -> list[Sampled]:
        results = self.sampler.sample(logits, range(len(self.slots)), self.lengths).to_host()
        return [results[i] for i in range(len(self.slots))]

    def sample(self, logits: Tensor, rows: Sequence[int] | None = None, needs: Needs | None = None) -> list[Row]:
        """Sample some rows, -1 for padding."""
        rows = range(len(self.slots)) if rows is None else rows
        needs = self.table.needs(tuple(row for row in rows if row >= 0)) if needs is None else needs
        slots = [self.slots[row] if row >= 0 else -1 for row in rows]
        positions = [self.lengths[row] - 1 if row >= 0 else -1 for row in rows]
        out = sample_rows_triton(
            logits,
            argmax_finite(logits),
            torch.tensor(slots, dtype=torch.int32, device=DEVICE),
            torch.tensor(positions, dtype=torch.int32, device=DEVICE),
            self.table.settings,
            self.last_token,
            self.space,
            needs,
        )
        assert not counters_of(DEVICE).any()
        held = out.cpu()
        assert self.last_token[slots].tolist() == held[0].tolist() or -1 in rows
        floats = held.view(torch.float32)
        found = []
        for i, row in enumerate(rows):
            end = HEADER + 2 * max(0, self.table.num_logprobs(row))
            best, values = held[HEADER:end:2, i].tolist(), floats[HEADER + 1 : end + 1 : 2, i].tolist()
            token_id, finite, feasible, rank = held[:4, i].tolist()
            logprob = float(floats[4, i])
            if self.table.num_logprobs(row) < 0:
                rank, logprob = 0, 0.0  # undefined
            found.append(Row(token_id, bool(finite), bool(feasible), rank, logprob, best, values))
        return found


def check(row: Row, wanted: Sampled) -> None:
    assert (row.finite and row.feasible) == (wanted.error is None), wanted.error
    if wanted.error is not None:
        return
    assert row.token_id == wanted.token_id
    if wanted.logprob is not None:
        assert row.rank == wanted.logprob.rank and row.best == wanted.logprob.token_ids.tolist()
        assert row.logprob == pytest.approx(wanted.logprob.logprob, abs=1e-5)
        assert row.values == pytest.approx(wanted.logprob.values.tolist(), abs=1e-5)


def normal(rows: int, vocab_size: int = V, *, seed: int = 0, spread: float = 3.0) -> Tensor:
    return (torch.randn((rows, vocab_size), generator=torch.Generator().manual_seed(seed)) * spread).to(DEVICE)


SETTINGS: dict[str, list[Settings]] = {
    "temperature and min_p": [{"temperature": 0.0}, {}, {"temperature": 0.4, "seed": 3}, {"temperature": 2.5, "min_p": 0.1}],
    "nuclei": [
        {"top_p": 0.95},
        {"top_p": 0.5, "temperature": 3.0},
        {"top_p": 0.02, "temperature": 9.0},
        {"min_p": 0.01, "top_p": 0.7},
    ],
    "top_k": [{"top_k": 1}, {"top_k": 20, "temperature": 2.0}, {"top_k": BEST, "top_p": 0.3}, {"top_k": 50, "min_p": 0.3}],
    "top_k beyond the lists": [
        {"top_k": BEST + 1, "temperature": 5.0},
        {"top_k": 200, "top_p": 0.8, "temperature": 5.0},
        {"top_k": V},
    ],
    "penalties": [
        {"repetition_penalty": 1.7, "temperature": 0.0},
        {"frequency_penalty": 1.5, "presence_penalty": -0.5},
        {"repetition_penalty": 0.6, "presence_penalty": 1.0},
    ],
    "bias and masks": [
        {"logit_bias": {5: 4.0, 9: -3.0}, "temperature": 0.0},
        {"allowed_token_ids": (3, 4, 250), "logit_bias": {4: 2.0}},
        {"bad_words_ids": ((7,), (8,)), "min_tokens": 2, "stop_token_ids": (7, 11)},
        {"allowed_token_ids": (EOS,), "min_tokens": 1},
    ],
    "raw scores": [
        {"logprobs": 0, "temperature": 0.0},
        {"logprobs": 5, "frequency_penalty": 2.0},
        {"logprobs": 20, "logit_bias": {4: -50.0}},
        {"logprobs": BEST, "top_k": 3},
    ],
    "processed scores": [
        {"logprobs": 0, "logprobs_mode": "processed"},
        {"logprobs": 4, "logprobs_mode": "processed", "temperature": 0.0, "logit_bias": {4: 50.0}},
        {"logprobs": 8, "logprobs_mode": "processed", "top_k": 4, "top_p": 0.9},
        {"logprobs": 8, "logprobs_mode": "processed", "top_p": 0.6},
        {"logprobs": 9, "logprobs_mode": "processed", "allowed_token_ids": (200, 4, 2, 250)},
    ],
}


@pytest.mark.parametrize("case", SETTINGS)
def test_rows_are_sampled_as_by_the_sampler(case: str) -> None:
    batch = Batch(*SETTINGS[case])
    for step in range(9 if CUDA else 2 if case in ("penalties", "bias and masks") else 1):
        logits = normal(len(batch.slots), seed=step)
        for row, wanted in zip(batch.sample(logits), batch.expected(logits), strict=True):
            check(row, wanted)
        batch.lengths = [length + 1 for length in batch.lengths]


def test_many_equal_logits_are_ranked_by_token_id() -> None:
    """More than the candidates are as good as the k-th best."""
    vocab_size = 300
    settings: list[Settings] = [
        {"top_k": 3},
        {"top_k": 2, "logprobs": 4, "logprobs_mode": "processed"},
        {"top_p": 0.1},
        {"logprobs": 2},
    ]
    batch = Batch(*settings, vocab_size=vocab_size)
    logits = torch.zeros(4, vocab_size, device=DEVICE)
    logits[:, 17] = -1.0
    for row, wanted in zip(batch.sample(logits), batch.expected(logits), strict=True):
        check(row, wanted)


def test_rows_of_several_pieces_are_put_together() -> None:
    vocab_size = 2 * PIECE + 5
    settings: list[Settings] = [
        {"top_p": 0.99, "temperature": 0.5},
        {"top_k": 30, "top_p": 0.8, "logprobs": 3, "presence_penalty": 2.0},
    ]
    batch = Batch(*settings, vocab_size=vocab_size)
    logits = normal(2, vocab_size, seed=5, spread=2.0)
    for row, wanted in zip(batch.sample(logits), batch.expected(logits), strict=True):
        check(row, wanted)


def test_a_row_depends_on_nobody_else() -> None:
    settings: list[Settings] = [{"top_k": 9, "logprobs": 2}, {}, {"top_p": 0.7}, {"temperature": 0.0}]
    logits = normal(4, seed=8)
    together = Batch(*settings).sample(logits)
    apart = Batch(*settings)
    for row in range(4):
        assert apart.sample(logits[row : row + 1].clone(), [row]) == together[row : row + 1]
    order = [3, -1, 0, 2]
    shuffled = Batch(*settings).sample(logits[order], order, EVERYTHING)  # what nobody needs is harmless
    assert [shuffled[0], shuffled[3]] == [together[3], together[2]]
    assert shuffled[2] == together[0]


def test_unusable_logits_fail_their_row_only() -> None:
    batch = Batch({}, {"top_p": 0.5}, {"top_k": 4, "logprobs": 2}, {"allowed_token_ids": (2, 3)}, {}, seed=2)
    logits = normal(5, seed=4)
    logits[0, 7], logits[1, 9], logits[2] = math.nan, math.inf, -math.inf
    logits[3, 2:4] = -math.inf
    rows = batch.sample(logits)
    assert [row.finite for row in rows] == [False, False, False, True, True]
    assert [row.feasible for row in rows] == [False, False, False, False, True]
    assert all(0 <= row.token_id < V for row in rows)
    check(rows[4], batch.expected(logits)[4])


def test_sequences_take_their_settings_to_another_slot() -> None:
    batch = Batch({"frequency_penalty": 2.0, "temperature": 0.0}, {"temperature": 0.0})
    logits = torch.zeros(2, V, device=DEVICE)
    logits[:, 30], logits[:, 40] = 1.0, 0.5
    assert [row.token_id for row in batch.sample(logits)] == [30, 30]
    batch.slots.reverse()
    batch.seat()
    assert [row.token_id for row in batch.sample(logits)] == [40, 30]
    batch.table.remove(0)
    assert 0 not in batch.table and batch.table.num_logprobs(0) == -1


def test_space_is_as_large_as_it_says() -> None:
    space = RowSpace.allocate(3, V, DEVICE)
    parts = (space.edited, space.state, space.partial, space.peaks, space.candidates, space.single)
    assert sum(part.nbytes for part in parts) == 3 * row_bytes(V)


@pytest.mark.skipif(not CUDA, reason="takes minutes in the interpreter")
@pytest.mark.parametrize("spread", [0.3, 2.0, 6.0])
def test_rows_of_the_whole_vocabulary_are_those_of_the_sampler(spread: float) -> None:
    """But for draws and cuts within rounding: at most one row of a hundred."""
    rng, size = random.Random(1), 129_280
    settings: list[Settings] = []
    for case in SETTINGS.values():
        settings += [{k: v for k, v in each.items() if k not in ("allowed_token_ids", "min_tokens")} for each in case]
    settings *= 3
    rng.shuffle(settings)
    batch = Batch(*settings, vocab_size=size)
    differing = 0
    for step in range(3):
        logits = normal(len(settings), size, seed=step, spread=spread)
        rows, results = batch.sample(logits), batch.expected(logits)
        for row, wanted in zip(rows, results, strict=True):
            differing += row.token_id != wanted.token_id
            if row.token_id == wanted.token_id and wanted.logprob is not None:
                check(row, wanted)
        if differing:  # counts have gone apart
            break
        batch.lengths = [length + 1 for length in batch.lengths]
    assert differing <= len(settings) // 100 + 1


def test_sample_rows_is_the_kernels() -> None:
    batch, logits = Batch({"temperature": 0.0}), normal(1)
    tensors = [torch.tensor([value], dtype=torch.int32, device=DEVICE) for value in (batch.slots[0], 0)]
    out = sample_rows(logits, argmax_finite(logits), *tensors, batch.table.settings, batch.last_token, batch.space, Needs(0))
    assert out[0].tolist() == logits.argmax(-1).tolist()
