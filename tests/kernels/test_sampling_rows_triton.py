"""The sampler by its kernels, on a GPU or in the interpreter, against the sampler by its reference on the CPU."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.sampling import argmax_finite
from dsv4lite.kernels.sampling.rows import (
    BEST,
    EVERYTHING,
    PIECE,
    RowMasks,
    RowSpace,
    SampleInputs,
    row_bytes,
    sample_rows,
    scored_values,
)
from dsv4lite.request import Request, SamplingParams
from dsv4lite.sampling.sampler import Sampler
from dsv4lite.sampling.samples import GivenSpan
from dsv4lite.scheduling.step_plan import Sampled, SequencePlan
from tests.kernels.tensors import CPU, DEVICE, ON_GPU

triton = pytest.importorskip("triton")

from dsv4lite.kernels.counters import counters_of  # noqa: E402
from dsv4lite.kernels.sampling.rows_triton import sample_rows_triton  # noqa: E402

pytestmark = pytest.mark.kernel

V = 251
EOS = 1
OPEN, CLOSE = 240, 241
Settings = Mapping[str, object]


@contextmanager
def kernels() -> Iterator[None]:
    """Run kernels, in the interpreter on a machine without a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dsv4lite.kernels.dispatch.use_triton", lambda *_: True)
        yield
    assert not counters_of(DEVICE).any()


class Both:
    """The same sequences, in shuffled slots, in two samplers."""

    def __init__(self, *settings: Settings, vocab_size: int = V, rows: int = 20, seed: int = 0) -> None:
        rng, count = random.Random(seed), len(settings)
        self.slots = rng.sample(range(count + 3), count)
        self.lengths, self.prompts = [rng.randrange(1, 6) for _ in settings], list[tuple[int, ...]]()
        self.samplers = [Sampler(vocab_size, device, 0, slots=count + 3, rows=rows) for device in (DEVICE, CPU)]
        self.last_tokens = [torch.full((count + 4,), -1, dtype=torch.int64, device=device) for device in (DEVICE, CPU)]
        for i, each in enumerate(settings):
            params = SamplingParams(**each)  # type: ignore[arg-type]
            prompt = tuple(rng.randrange(vocab_size - 20) for _ in range(self.lengths[i]))
            think = (OPEN, CLOSE) if "thinking_budget" in each else None
            prompt = (*prompt[1:], OPEN) if think else prompt
            self.prompts.append(prompt)
            self.add(i, Request(request_id=f"r{i}", prompt_token_ids=prompt, params=params, eos_token_id=EOS, think_ids=think))

    def add(self, seq_id: int, request: Request) -> None:
        for sampler in self.samplers:
            sampler.add(seq_id, request, 0)

    def step(
        self, logits: Tensor, rows: Sequence[int] | None = None, drafts: Mapping[int, Sequence[int]] | None = None, apart: int = 0
    ) -> list[Sampled]:
        """Sample both ways, and return what the kernels have found; at most ``apart`` sequences may have other tokens."""
        rows, drafts = range(len(self.slots)) if rows is None else rows, drafts or {}
        runs = []
        for i in rows:
            tokens = (0, *drafts.get(i, ()))
            runs.append(SequencePlan(i, self.slots[i], self.lengths[i] - 1, tokens, (), 0, (), True, drafts=len(tokens) - 1))
        with kernels():
            ours = self.samplers[0].sample(logits.clone().to(DEVICE), runs, self.last_tokens[0])
        theirs = self.samplers[1].sample(logits.cpu(), runs, self.last_tokens[1])
        assert ours.not_finite() == theirs.not_finite()
        found, wanted = ours.to_host(), theirs.to_host()
        self.apart = [i for i in rows if found[i].error is None and found[i].token_id != wanted[i].token_id]
        assert len(self.apart) <= apart
        for i in set(rows) - set(self.apart):
            every, others = [found[i], *found[i].after], [wanted[i], *wanted[i].after]
            assert len(every) == len(others)
            for one, other in zip(every, others, strict=True):
                check(one, other)
            if every[-1].error is None:
                assert self.last_tokens[0][self.slots[i]] == self.last_tokens[1][self.slots[i]] == every[-1].token_id
            for sampler in self.samplers:
                for one in every:
                    sampler.accept(i, one.token_id)
            self.lengths[i] += len(every)
        if not apart and all(one.error is None for first in wanted.values() for one in (first, *first.after)):
            assert all(torch.equal(one.cpu(), other) for one, other in zip(ours.accepted(), theirs.accepted(), strict=True))
        return [found[i] for i in rows]


def check(one: Sampled, wanted: Sampled) -> None:
    assert str(one.error) == str(wanted.error)
    if wanted.error is None:
        assert one.token_id == wanted.token_id and (one.logprob is None) == (wanted.logprob is None)
    if one.logprob is not None and wanted.logprob is not None:
        assert one.logprob.rank == wanted.logprob.rank and one.logprob.token_ids == wanted.logprob.token_ids
        assert one.logprob.logprob == pytest.approx(wanted.logprob.logprob, abs=1e-5)
        assert one.logprob.values.tolist() == pytest.approx(wanted.logprob.values.tolist(), abs=1e-5)


def normal(rows: int, vocab_size: int = V, *, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn((rows, vocab_size), generator=torch.Generator().manual_seed(seed)) * spread


SCORED: Settings = {"logprobs": 0, "logprobs_mode": "processed"}
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
    "rules of the host": [
        {"bad_words_ids": ((9, 10), (3,)), "logprobs": 3, "logprobs_mode": "processed", "top_p": 0.9},
        {"thinking_budget": 0, "allowed_token_ids": (4, 5), "logprobs": 2, "logprobs_mode": "processed"},
        {"thinking_budget": 1, "temperature": 0.0, "presence_penalty": 1.0},
        {"bad_words_ids": ((9, 10),), "min_tokens": 3, "top_k": 4, "frequency_penalty": 0.5},
        {},
    ],
    "raw scores": [
        {"logprobs": 0, "temperature": 0.0},
        {"logprobs": 5, "frequency_penalty": 2.0},
        {"logprobs": 20, "logit_bias": {4: -50.0}},
        {"logprobs": BEST, "top_k": 3},
        {"logprobs": BEST + 1, "top_p": 0.5, "logit_bias": {4: 50.0}},
    ],
    "processed scores": [
        {"logprobs": 0, "logprobs_mode": "processed"},
        {"logprobs": 4, "logprobs_mode": "processed", "temperature": 0.0, "logit_bias": {4: 50.0}},
        {"logprobs": 8, "logprobs_mode": "processed", "top_k": 4, "top_p": 0.9},
        {"logprobs": 8, "logprobs_mode": "processed", "top_p": 0.6},
        {"logprobs": 9, "logprobs_mode": "processed", "allowed_token_ids": (200, 4, 2, 250)},
    ],
    "long lists of processed scores": [
        {"logprobs": BEST + 1, "logprobs_mode": "processed", "top_k": 4, "top_p": 0.9},
        {"logprobs": V, "logprobs_mode": "processed", "top_p": 0.6, "frequency_penalty": 1.0},
        {"logprobs": V, "logprobs_mode": "processed", "temperature": 0.0, "bad_words_ids": ((9, 10),)},
        {"logprobs": V, "logprobs_mode": "processed", "top_k": 150, "temperature": 5.0},
    ],
}


@pytest.mark.parametrize("case", SETTINGS)
def test_kernels_sample_as_the_reference_does(case: str) -> None:
    both = Both(*SETTINGS[case])
    for step in range(9 if ON_GPU else 2 if case in ("penalties", "bias and masks", "rules of the host") else 1):
        both.step(normal(len(both.slots), seed=step))


def test_many_equal_logits_are_ranked_by_token_id() -> None:
    """More than the candidates are as good as the k-th best."""
    vocab_size = 300
    both = Both(
        {"top_k": 3},
        {"top_k": 2, "logprobs": 4, "logprobs_mode": "processed"},
        {"top_p": 0.1},
        {"logprobs": 2},
        vocab_size=vocab_size,
    )
    logits = torch.zeros(4, vocab_size)
    logits[:, 17] = -1.0
    both.step(logits)


def test_rows_of_several_pieces_are_put_together() -> None:
    vocab_size = 2 * PIECE + 5
    settings: list[Settings] = [
        {"top_p": 0.99, "temperature": 0.5},
        {"top_k": 30, "top_p": 0.8, "logprobs": 3, "presence_penalty": 2.0},
    ]
    Both(*settings, vocab_size=vocab_size).step(normal(2, vocab_size, seed=5, spread=2.0))


def test_rows_after_drafts_are_sampled_as_if_these_were_right() -> None:
    """Each token is less likely the more often it was said: what a row takes for granted counts, what was wrong does not."""
    both = Both(
        {"temperature": 0.0, "frequency_penalty": 1.0, "logprobs": 0},
        {"temperature": 0.3, "presence_penalty": 1.0, "seed": 1, "logprobs": BEST + 2},
        {"temperature": 0.0, "min_tokens": 4, "stop_token_ids": (9,)},
        {"temperature": 0.0, "bad_words_ids": ((9, 12),), "frequency_penalty": 0.5},
        {"temperature": 0.0},
    )
    row = torch.zeros(V)
    row[[9, 12, 15, 18]] = torch.tensor([20.0, 19.6, 19.3, 19.1])
    start = both.lengths[0]
    for drafts in (
        {0: (9, 12, 15), 1: (9, 12), 2: (12, 12), 3: (9, 15)},
        {0: (18, 9), 1: (12,), 4: (9,)},
        {0: (12, 9), 2: (9,), 3: (12,)},
    ):
        both.step(row.repeat(5 + sum(map(len, drafts.values())), 1), drafts=drafts)
    assert both.lengths[0] - start == 4 + 1 + 2  # else nothing was tested


def test_drafts_take_the_draws_that_check_them() -> None:
    both = Both(
        {"seed": 3},
        {"temperature": 0.5, "min_p": 0.2, "top_k": 1, "frequency_penalty": 2.0},
        {"allowed_token_ids": (4, 8), "seed": 5},
        {"bad_words_ids": ((9, 10), (11,)), "seed": 6},
        {"temperature": 0.0, "min_tokens": 3},
    )
    logits = normal(6, seed=3)
    found = both.step(logits[:5].contiguous())
    drafts = []
    for sampler, device in zip(both.samplers, (DEVICE, CPU), strict=True):
        slots = torch.tensor([*both.slots, -1], dtype=torch.int32, device=device)
        positions = torch.tensor([*(length - 2 for length in both.lengths), -1], dtype=torch.int32, device=device)
        if device == DEVICE and sampler is both.samplers[0]:
            with kernels():
                drafts.append(sampler.draft(logits.to(device), slots, positions).tolist())
        else:
            drafts.append(sampler.draft(logits, slots, positions).tolist())
    assert drafts[0][:5] == drafts[1][:5] and 0 <= drafts[0][5] < V
    assert [drafts[0][i] for i in (0, 2, 3)] == [found[i].token_id for i in (0, 2, 3)]


def test_a_row_does_not_depend_on_other_rows() -> None:
    settings: list[Settings] = [{"top_k": 9, "logprobs": 2}, {}, {"top_p": 0.7}, {"temperature": 0.0}]
    logits = normal(4, seed=8)
    together, apart = Both(*settings).step(logits), Both(*settings)
    for row in range(4):
        assert repr(apart.step(logits[row : row + 1].clone(), [row])) == repr(together[row : row + 1])
    both, order = Both(*settings), [3, -1, 0, 2]  # with padding, and with kernels that no row needs
    sampler, rows = both.samplers[0], logits[order].to(DEVICE)
    sampler.prepare([SequencePlan(i, slot, 0, (0,), (), 0, (), True) for i, slot in enumerate(both.slots)])
    columns = [[both.slots[i] if i >= 0 else -1 for i in order], [both.lengths[i] - 1 if i >= 0 else -1 for i in order]]
    where = torch.tensor(columns, dtype=torch.int32, device=DEVICE)
    with kernels():
        out = sampler.run(rows, argmax_finite(rows), where[0], where[1], both.last_tokens[0], EVERYTHING)
    assert out[0, [0, 2, 3]].tolist() == [together[i].token_id for i in (3, 0, 2)]
    assert both.last_tokens[0][columns[0]].tolist() == out[0].tolist()


@pytest.mark.skipif(ON_GPU, reason="addresses of the GPU's memory, which the reference cannot read")
def test_ops_take_and_leave_the_same_tensors() -> None:
    """``apply_masks`` forbids and forces within both, and ``scored_values`` finds what both have sampled from."""
    sampler = Both(
        {"top_k": 4, "bad_words_ids": ((9, 10),), **SCORED}, {"thinking_budget": 0, **SCORED}, {"top_p": 0.7, **SCORED}
    ).samplers[1]
    asked = sampler.prepare([SequencePlan(i, i, 4, (0,), (), 0, (), True) for i in range(3)])
    logits, slots, positions = normal(3, seed=6), torch.arange(3, dtype=torch.int32), torch.full((3,), 4, dtype=torch.int32)
    forbidden = torch.zeros(2, V, dtype=torch.bool)
    forbidden[0, : V // 2], forbidden[1] = True, True
    masks = RowMasks(torch.tensor([0, 1]), forbidden, torch.tensor([-1, CLOSE]))
    found = []
    for op in (sample_rows_triton, sample_rows.reference):
        last_token, space = torch.zeros(len(sampler.settings), dtype=torch.int64), RowSpace.allocate(3, V, CPU)
        where = (slots, positions, sampler.settings, last_token, space)
        out = op(SampleInputs(logits, argmax_finite(logits), *where, asked.needs, masks=masks))
        values = scored_values(logits, logits.amax(1, keepdim=True), sampler.settings[:3], positions, space, torch.arange(3))
        found.append((out[:4], last_token, values.isfinite(), values.nan_to_num()))
        assert out[0, 0] >= V // 2 and out[0, 1] == CLOSE and values.isfinite().sum(1).tolist()[:2] == [4, 1]
    assert sum(part.nbytes for part in space) == 3 * row_bytes(V)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_unusable_logits_fail_their_row_only() -> None:
    both = Both({}, {"top_p": 0.5}, {"top_k": 4, "logprobs": 2}, {"allowed_token_ids": (2, 3)}, {}, seed=2)
    logits = normal(5, seed=4)
    logits[0, 7], logits[1, 9], logits[2] = math.nan, math.inf, -math.inf
    logits[3, 2:4] = -math.inf
    found = both.step(logits)
    assert [one.error is None for one in found] == [False, False, False, False, True]
    assert all(0 <= one.token_id < V for one in found)


def test_sequences_take_their_settings_to_another_slot() -> None:
    both = Both({"frequency_penalty": 2.0, "temperature": 0.0}, {"temperature": 0.0})
    logits = torch.zeros(2, V)
    logits[:, 30], logits[:, 40] = 1.0, 0.5
    assert [one.token_id for one in both.step(logits)] == [30, 30]
    both.slots.reverse()
    assert [one.token_id for one in both.step(logits)] == [40, 30]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "frequency_penalty": 0.4},
        {"top_p": 0.7, "min_p": 0.01, "logit_bias": {5: 3.0}, "logprobs": BEST + 3},
        {"top_k": 150, "min_tokens": 4, "allowed_token_ids": tuple(range(180))},
        {"bad_words_ids": ((3, 4), (9,)), "frequency_penalty": 0.4},
    ],
    ids=lambda each: ",".join(each),
)
def test_scores_of_given_tokens_are_those_of_sampling(settings: dict[str, object]) -> None:
    """More tokens than rows fit at once, in two calls, beside a sequence that samples between them."""
    wanted, (first, count) = {"logprobs": 3, **settings, "logprobs_mode": "processed"}, (5, 9) if ON_GPU else (3, 4)
    other, rows = {"repetition_penalty": 1.2}, normal(count, seed=3)
    both, scorers = Both(wanted), Both(other, other, rows=4 if ON_GPU else 2)
    start = both.lengths[0]
    found = [both.step(rows[i : i + 1])[0] for i in range(count)]
    tokens = tuple(one.token_id for one in found)
    whole = (*both.prompts[0], *tokens)
    params = SamplingParams(**wanted)  # type: ignore[arg-type]
    scorers.add(
        9, Request(request_id="", prompt_token_ids=whole, params=params, eos_token_id=EOS, score_from=start, generate=False)
    )
    run = SequencePlan(9, min(set(range(5)) - set(scorers.slots)), 0, (0,), (), 0, (), False)
    for sampler, device in zip(scorers.samplers, (DEVICE, CPU), strict=True):
        parts = []
        for begin, end in ((0, first), (first, count)):
            given = rows[begin:end].clone().to(device), [GivenSpan(run, start + begin, tokens[begin:end])]
            with kernels() if sampler is scorers.samplers[0] else nullcontext():
                parts.append(sampler.score(*given))
        values, ranks, ids, listed = (torch.cat(column).cpu() for column in zip(*parts, strict=True))
        expected = [one.logprob for one in found if one.logprob is not None]
        assert ranks.tolist() == [one.rank for one in expected]
        assert ids.tolist() == [one.token_ids.tolist() for one in expected]
        if sampler is scorers.samplers[0]:  # whose kernels have sampled, too
            assert values.tolist() == [one.logprob for one in expected]
            assert listed.tolist() == [one.values.tolist() for one in expected]
        assert values.tolist() == pytest.approx([one.logprob for one in expected], abs=1e-5)
    scorers.step(normal(2))


def test_score_of_a_row_that_failed_is_nan() -> None:
    both, params = Both({}), SamplingParams(logprobs=0, logprobs_mode="processed")
    both.add(9, Request(request_id="", prompt_token_ids=(5, 6, 7, 8, 9), params=params, score_from=3, generate=False))
    rows, run = normal(2, seed=1), SequencePlan(9, 2, 0, (0,), (), 0, (), False)
    rows[1, 4] = torch.nan
    with kernels():
        values, *_ = both.samplers[0].score(rows.to(DEVICE), [GivenSpan(run, 3, (8, 9))])
    others, *_ = both.samplers[1].score(rows, [GivenSpan(run, 3, (8, 9))])
    assert values.isnan().tolist() == others.isnan().tolist() == [False, True]


@pytest.mark.skipif(not ON_GPU, reason="takes minutes in the interpreter")
@pytest.mark.parametrize("spread", [0.3, 2.0, 6.0])
def test_rows_of_the_whole_vocabulary_are_those_of_the_reference(spread: float) -> None:
    """But for draws and cuts within rounding: at most one row of a hundred."""
    rng, size = random.Random(1), 129_280
    settings: list[Settings] = []
    for case in SETTINGS.values():
        settings += [{k: v for k, v in each.items() if k not in ("allowed_token_ids", "min_tokens")} for each in case]
    settings *= 3
    rng.shuffle(settings)
    both = Both(*settings, vocab_size=size, rows=len(settings))
    for step in range(3):
        both.step(normal(len(settings), size, seed=step, spread=spread), apart=len(settings) // 100 + 1)
        if both.apart:
            break  # counts are no longer the same
