"""The sampler against a plain reference, feature by feature, and what it keeps of its sequences."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsv4lite.errors import InvalidRequestError, RequestFailedError
from dsv4lite.kernels.sampling import token_logprobs
from dsv4lite.request import Request, SamplingParams, TokenLogprob
from dsv4lite.sampling.sampler import Sampler, dry_run
from dsv4lite.sampling.samples import Samples
from dsv4lite.sampling.state import random_stream
from dsv4lite.scheduling.step_plan import Sampled, SequencePlan
from dsv4lite.text.structured import StructuredOutputs
from tests.e2e.engines import tensor_bytes
from tests.kernels.test_sampling import mix

INF = math.inf
V = 61
EOS = 1
OPEN, CLOSE = 58, 59
STREAM_OF_SEED_0 = (-1398245620, -1067685636)


def request(
    prompt: Sequence[int] = (5, 6, 7), request_id: str = "r", eos: int | None = EOS, think: bool = False, **params: object
) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**params),  # type: ignore[arg-type]
        eos_token_id=eos,
        think_ids=(OPEN, CLOSE) if think else None,
    )


def normal(rows: int, vocab_size: int = V, *, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn((rows, vocab_size), generator=torch.Generator().manual_seed(seed)) * spread


def sampler_of(
    vocab_size: int = V, default_seed: int = 0, grammars: object = None, *, places: int = 64, device: str = "cpu"
) -> Sampler:
    return Sampler(vocab_size, device, default_seed, grammars, slots=places, rows=places)  # type: ignore[arg-type]


def run_of(seq_id: int, position: int, drafts: Sequence[int] = (), *, slot: int | None = None) -> SequencePlan:
    """A sequence that samples the token at ``position``, and one after each draft; its slot is its number unless it has another."""
    slot = seq_id if slot is None else slot
    return SequencePlan(seq_id, slot, position - 1, (0, *drafts), (), 0, (), True, drafts=len(drafts))


def sample(sampler: Sampler, logits: Tensor, runs: Sequence[SequencePlan]) -> Samples:
    last_token = torch.full((len(sampler.settings),), -1, dtype=torch.int64, device=logits.device)
    return sampler.sample(logits, runs, last_token)


class Driver:
    """One sequence per request, all in one batch, driven as the engine would without overlap."""

    def __init__(self, *requests: Request, vocab_size: int = V, default_seed: int = 0, grammars: object = None) -> None:
        self.sampler = sampler_of(vocab_size, default_seed, grammars)
        self.requests = requests
        self.lengths = [len(r.prompt_token_ids) for r in requests]
        for seq_id, r in enumerate(requests):
            self.sampler.add(seq_id, r, 0)

    def step(self, logits: Tensor, rows: Sequence[int] | None = None, *, accept: bool = True) -> list[Sampled]:
        rows = range(len(self.requests)) if rows is None else rows
        before = logits.clone()
        results = sample(self.sampler, logits, [run_of(r, self.lengths[r]) for r in rows]).to_host()
        assert torch.equal(logits.nan_to_num(), before.nan_to_num())
        assert list(results) == list(rows)
        for r in rows:
            self.lengths[r] += 1
            if accept and results[r].error is None:
                self.sampler.accept(r, results[r].token_id)
        return [results[r] for r in rows]


def tokens(results: Sequence[Sampled]) -> list[int]:
    assert all(r.error is None for r in results)
    return [r.token_id for r in results]


def scored(result: Sampled) -> TokenLogprob:
    assert result.logprob is not None
    return result.logprob


def same_sampled(one: Sampled, other: Sampled) -> None:
    """Assert that two rows have the same error, or the same token and bits of log-probabilities."""
    assert str(one.error) == str(other.error)
    if one.error is None:
        assert one.token_id == other.token_id
        assert (one.logprob is None) == (other.logprob is None)
    if one.logprob is not None and other.logprob is not None:
        assert one.logprob[:4] == other.logprob[:4]


def distribution(result: Sampled, vocab_size: int = V) -> dict[int, float]:
    """Log-probabilities by token of a row that asked for all, without the forbidden ones."""
    listed = scored(result)
    assert len(listed.token_ids) == vocab_size
    return {t: x for t, x in zip(listed.token_ids.tolist(), listed.values.tolist()) if x > -INF}


ALL = {"logprobs": V, "logprobs_mode": "processed"}


# ------------------------------------------------------------------------------------------------------------- reference


@dataclass
class Reference:
    """One sequence in plain Python and double precision.

    ``clear`` is false where the last decision hung on less than rounding can tell.
    """

    request: Request
    output: list[int] = field(default_factory=list)
    clear: bool = True

    def processed(self, logits: Sequence[float]) -> list[float]:
        """What the token is chosen from, after temperature and truncation, best at 0 for sampled rows."""
        self.clear = True
        p, prompt, output = self.request.params, self.request.prompt_token_ids, self.output
        z = []
        for t, x in enumerate(logits):
            if t in prompt or t in output:
                x = x / p.repetition_penalty if x > 0 else x * p.repetition_penalty
            x -= p.frequency_penalty * output.count(t)
            x -= p.presence_penalty if t in output else 0
            x += (p.logit_bias or {}).get(t, 0)
            if p.allowed_token_ids is not None and t not in p.allowed_token_ids:
                x = -INF
            if len(output) < p.min_tokens and t in (self.request.eos_token_id, *p.stop_token_ids):
                x = -INF
            for word in p.bad_words_ids:
                history = [*prompt, *output]
                if t == word[-1] and (len(word) == 1 or tuple(history[-(len(word) - 1) :]) == word[:-1]):
                    x = -INF
            z.append(x)
        best = max(z)
        if best == -INF or p.temperature == 0:
            return z
        z = [(x - best) / p.temperature for x in z]
        if p.min_p > 0:
            self.clear &= all(x == 0 or abs(x - math.log(p.min_p)) > 1e-4 for x in z)
            z = [x if math.exp(x) >= p.min_p else -INF for x in z]
        ranking = sorted(range(len(z)), key=lambda t: (-z[t], t))
        if 0 < p.top_k < len(z):
            inside, outside = z[ranking[p.top_k - 1]], z[ranking[p.top_k]]
            self.clear &= outside == -INF or inside - outside > 1e-5
            for t in ranking[p.top_k :]:
                z[t] = -INF
        if p.top_p < 1:
            total, mass = sum(map(math.exp, z)), 0.0
            for t in ranking:
                self.clear &= z[t] == -INF or abs(mass - p.top_p * total) > 1e-5 * total
                weight = math.exp(z[t])
                if mass >= p.top_p * total:
                    z[t] = -INF
                mass += weight
        return z

    def choose(self, z: Sequence[float], stream: tuple[int, int]) -> int:
        if self.request.params.temperature > 0:
            position = len(self.request.prompt_token_ids) + len(self.output)
            a, b = (mix((half ^ position) % 2**32, 0) for half in stream)
            u = [((mix(t ^ a, b) % 2**31) + 0.5) / 2**31 for t in range(len(z))]
            z = [x - math.log(-math.log1p(-y)) for x, y in zip(z, u)]
        ordered = sorted(z, reverse=True)
        self.clear &= ordered[0] - ordered[1] > 1e-3
        return z.index(ordered[0])


def params_strategy(vocab_size: int) -> st.SearchStrategy[dict[str, object]]:
    ids = st.integers(0, vocab_size - 1)
    small = st.floats(-2, 2)
    return st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.8]),
            "top_k": st.integers(0, vocab_size + 3),
            "top_p": st.floats(0.05, 1.0),
            "min_p": st.sampled_from([0.0, 0.02, 0.3, 1.0]),
            "presence_penalty": small,
            "frequency_penalty": small,
            "repetition_penalty": st.floats(0.5, 2.0),
            "logit_bias": st.dictionaries(ids, st.floats(-5, 5), max_size=3),
            "allowed_token_ids": st.lists(ids, min_size=2, max_size=vocab_size, unique=True),
            "bad_words_ids": st.lists(st.lists(ids, min_size=1, max_size=3), max_size=3),
            "min_tokens": st.integers(0, 3),
            "stop_token_ids": st.lists(ids, max_size=2),
            "seed": st.integers(-5, 2**64 - 1),
        },
    )


@given(
    rows=st.lists(st.tuples(params_strategy(13), st.lists(st.integers(0, 12), min_size=1, max_size=5)), min_size=1, max_size=5),
    logits_seed=st.integers(0, 10_000),
)
@settings(max_examples=80)
def test_sampler_agrees_with_the_reference(rows: list[tuple[dict[str, object], list[int]]], logits_seed: int) -> None:
    vocab_size = 13
    full = {"logprobs": vocab_size, "logprobs_mode": "processed"}
    requests = [request(prompt, f"r{i}", **{**params, **full}) for i, (params, prompt) in enumerate(rows)]
    driver = Driver(*requests, vocab_size=vocab_size, default_seed=3)
    references = [Reference(r) for r in requests]
    alive = list(range(len(rows)))
    for step in range(4):
        logits = normal(len(alive), vocab_size, seed=logits_seed + step)
        results = driver.step(logits, alive)
        for row, r in enumerate(list(alive)):
            reference, result = references[r], results[row]
            z = reference.processed(logits[row].tolist())
            if max(z) == -INF:
                assert isinstance(result.error, RequestFailedError)
                alive.remove(r)
                continue
            assert result.error is None
            if reference.clear:
                total = math.log(sum(map(math.exp, z)))
                expected = {t: x - total for t, x in enumerate(z) if x > -INF}
                assert distribution(result, vocab_size) == pytest.approx(expected, abs=1e-4)
            params = requests[r].params
            stream = random_stream(params.seed, 0, default_seed=3, request_id=f"r{r}")
            token = reference.choose(z, stream)
            assert result.token_id == token or not reference.clear
            reference.output.append(result.token_id)
        if not alive:
            break


# ----------------------------------------------------------------------------------------------------------------- draws


def test_greedy_takes_the_best_token_and_the_lowest_of_equal_ones() -> None:
    logits = torch.zeros((3, V))
    logits[0, [9, 4, 30]] = 2.0
    logits[1, 60] = 1e-3
    assert tokens(Driver(*[request(temperature=0.0)] * 3).step(logits)) == [4, 60, 0]


def test_greedy_and_drawn_rows_share_a_batch() -> None:
    logits = normal(6)
    requests = [request(request_id=str(i), temperature=0.0 if i % 2 else 1.0) for i in range(6)]
    together = tokens(Driver(*requests).step(logits))
    assert [together[i] for i in (1, 3, 5)] == logits.argmax(-1)[[1, 3, 5]].tolist()
    for i in (0, 2, 4):
        assert tokens(Driver(requests[i]).step(logits[i : i + 1])) == [together[i]]


def test_draws_have_the_processed_distribution() -> None:
    """Temperature, penalties, bias, min_p, top_k and top_p at once: 20,000 sequences draw from the same logits."""
    params = dict(temperature=1.3, repetition_penalty=1.2, logit_bias={3: 2.0}, min_p=0.02, top_k=12, top_p=0.93, **ALL)
    logits, count = normal(1, seed=5), 20_000
    reference = Reference(request(**params))
    z = torch.tensor(reference.processed(logits[0].tolist()), dtype=torch.float64)
    assert reference.clear
    params["logprobs"] = None
    sampler, shared = sampler_of(places=count), request(**params)
    for i in range(count):
        sampler.add(i, shared, i)
    samples = sample(sampler, logits.expand(count, -1).contiguous(), [run_of(i, 3) for i in range(count)])
    counts = torch.bincount(samples.out[0], minlength=V).double()
    expected = z.softmax(-1) * count
    kept = expected > 0
    assert counts[~kept].sum() == 0 and expected[kept].min() > 5 and kept.sum() > 5
    freedom = int(kept.sum()) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 4.753 * math.sqrt(2 / (9 * freedom))) ** 3  # once in a million
    assert ((counts - expected)[kept] ** 2 / expected[kept]).sum() < limit
    biased = expected.clone()
    order = expected.argsort(descending=True)
    biased[order[0]] -= 0.03 * count
    biased[order[2]] += 0.03 * count
    assert ((counts - biased)[kept] ** 2 / biased[kept]).sum() > limit


def test_draws_repeat_with_the_seed_whatever_engine_and_batch() -> None:
    logits = torch.zeros((1, V))

    def text(r: Request, *, default_seed: int = 0, index: int = 0, start: int = 3) -> list[int]:
        sampler = sampler_of(default_seed=default_seed)
        sampler.add(7, r, index)
        return [sample(sampler, logits, [run_of(7, start + i)]).to_host()[7].token_id for i in range(20)]

    seeded = text(request(seed=4))
    assert text(request(seed=4, request_id="other"), default_seed=9) == seeded
    assert text(request(seed=4, temperature=0.5)) == seeded  # equal logits: the noise alone decides
    assert text(request(seed=5)) != seeded and text(request(seed=4), index=1) != seeded
    assert text(request(seed=4), start=4)[:-1] == seeded[1:]
    unseeded = text(request())
    assert text(request()) == unseeded
    assert text(request(), default_seed=1) != unseeded and text(request(request_id="s")) != unseeded
    assert text(request(), index=1) != unseeded


def test_random_streams_are_stable_and_distinct() -> None:
    """The numbers are part of the contract: a seed gives the same draws in every process and version."""
    assert random_stream(0, 0, default_seed=0, request_id="") == STREAM_OF_SEED_0
    streams = {random_stream(s, i, default_seed=0, request_id="") for s in (0, 1, -1, 2**64, 10**30) for i in range(10)}
    streams |= {random_stream(None, i, default_seed=s, request_id=r) for s in (0, 1) for r in ("", "0", "1 2") for i in range(10)}
    assert len(streams) == 110
    assert all(-(2**31) <= half < 2**31 for stream in streams for half in stream)


def test_temperature_extremes_stay_exact() -> None:
    logits = normal(4)
    logits[:, 3] = logits.max() + 0.5
    cold = Driver(*[request(request_id=str(i), temperature=t) for i, t in enumerate((1e-300, 1e-40, 1e-6, 1e-3))])
    assert tokens(cold.step(logits)) == [3] * 4
    hot = Driver(*[request(request_id=str(i), temperature=1e300, allowed_token_ids=range(10), **ALL) for i in range(4)])
    for result in hot.step(logits):
        assert distribution(result) == pytest.approx(dict.fromkeys(range(10), -math.log(10)), abs=1e-5)


def test_a_cold_row_draws_among_equal_best_tokens() -> None:
    logits = torch.zeros((1, V))
    logits[0, [10, 20]] = 5.0
    driver = Driver(request(temperature=1e-300))
    assert {tokens(driver.step(logits))[0] for _ in range(40)} == {10, 20}


# ------------------------------------------------------------------------------------------------------------- the batch


def mixed_params(i: int) -> dict[str, object]:
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0, "logprobs": i % 4},
        {"temperature": 0.8, "top_p": 0.9, "logprobs": 2, "logprobs_mode": "processed"},
        {"top_k": 1 + i % 9, "min_p": 0.01},
        {"top_k": 7, "top_p": 0.5, "logprobs": 0, "seed": i},
        {
            "presence_penalty": 0.5,
            "frequency_penalty": -0.25,
            "repetition_penalty": 1.3,
            "logprobs": 3,
            "logprobs_mode": "processed",
        },
        {"logit_bias": {i % V: 4.0}, "allowed_token_ids": tuple(range(0, V, 2)), "bad_words_ids": [[2], [4, 6]]},
        {"min_tokens": 2, "stop_token_ids": [3, 4], "temperature": 2.0, "logprobs": 5},
    ]
    return kinds[i % len(kinds)]


@pytest.mark.parametrize("vocab_size", [V, 4096])
def test_rows_come_out_the_same_bits_alone_and_in_a_batch(vocab_size: int) -> None:
    requests = [request(prompt=range(2 + i % 5), request_id=str(i), **mixed_params(i)) for i in range(64)]
    batch = Driver(*requests, vocab_size=vocab_size)
    alone = {i: Driver(requests[i], vocab_size=vocab_size) for i in (*range(14), 63)}
    order = list(range(64))
    for step in range(3):
        logits = normal(64, vocab_size, seed=step)
        results = batch.step(logits[order], order)
        for i, driver in alone.items():
            mine, theirs = driver.step(logits[i : i + 1])[0], results[order.index(i)]
            assert mine.error is None
            same_sampled(mine, theirs)
        order = order[::-1] if step == 0 else order[5:] + order[:5]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_sampler_agrees_with_the_cpu() -> None:
    requests = [request(prompt=range(2 + i % 5), request_id=str(i), **mixed_params(i)) for i in range(42)]
    samplers = {device: sampler_of(device=device) for device in ("cpu", "cuda")}
    for sampler in samplers.values():
        for i, r in enumerate(requests):
            sampler.add(i, r, 0)
    for step in range(5):
        logits = normal(42, seed=step)
        runs = [run_of(i, len(r.prompt_token_ids) + step) for i, r in enumerate(requests)]
        got = {device: sample(s, logits.to(device), runs).to_host() for device, s in samplers.items()}
        for i in range(42):
            cpu, cuda = got["cpu"][i], got["cuda"][i]
            assert cpu.token_id == cuda.token_id
            for s in samplers.values():
                s.accept(i, cpu.token_id)
            if cpu.logprob is not None:
                assert scored(cuda).logprob == pytest.approx(cpu.logprob.logprob, abs=1e-5)
                assert scored(cuda).token_ids == cpu.logprob.token_ids


@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
def test_unusable_logits_fail_their_own_row_only(bad: float) -> None:
    requests = [request(request_id=str(i), **mixed_params(i)) for i in range(14)]
    logits = normal(14)
    expected = Driver(*requests).step(logits)
    for r in range(0, 14, 3):
        broken = logits.clone()
        broken[r] = bad if bad == -INF else broken[r]
        broken[r, 40] = bad
        results = Driver(*requests).step(broken)
        assert isinstance(results[r].error, RequestFailedError) and results[r].logprob is None
        assert "logits" in str(results[r].error) and 0 <= results[r].token_id < V
        for i in set(range(14)) - {r}:
            assert results[i].error is None and results[i].token_id == expected[i].token_id
            if expected[i].logprob is not None:
                assert scored(results[i])[:4] == scored(expected[i])[:4]


def test_unusable_logits_are_not_hidden_by_a_mask() -> None:
    logits = normal(1)
    logits[0, 40] = math.nan
    assert Driver(request(allowed_token_ids=[3])).step(logits)[0].error is not None


def test_a_batch_may_change_between_steps() -> None:
    """The stacked settings follow the rows: order, subsets, and a new sequence under an old id."""
    logits = torch.zeros((2, V))
    logits[:, 8] = 1.0
    driver = Driver(request(temperature=0.0, logit_bias={3: 9.0}), request(temperature=0.0))
    assert tokens(driver.step(logits)) == tokens(driver.step(logits)) == [3, 8]
    assert tokens(driver.step(logits, [1, 0])) == [8, 3]
    assert tokens(driver.step(logits[:1], [1])) == [8]
    driver.sampler.remove(1)
    driver.sampler.add(1, request(temperature=0.0, logit_bias={4: 9.0}), 0)
    assert tokens(driver.step(logits[:1], [1])) == [4]
    assert tokens(driver.step(logits)) == [3, 4]


# ------------------------------------------------------------------------------------------------------------- penalties


def test_penalties_follow_the_sampled_tokens_without_the_host() -> None:
    """The next step may run before the host knows the token, so nothing but ``sample`` may be needed."""
    driver = Driver(request(prompt=[0], temperature=0.0, frequency_penalty=1.0))
    logits = torch.zeros((1, V))
    logits[0, [0, 10, 11]] = torch.tensor([4.0, 3.5, 2.25])
    got = [driver.step(logits, accept=False)[0].token_id for _ in range(8)]
    counts, expected = {0: 0, 10: 0, 11: 0}, []
    for _ in range(8):
        best = max(counts, key=lambda t: float(logits[0, t]) - counts[t])
        counts[best] += 1
        expected.append(best)
    assert got == expected and len(set(got)) == 3


def test_a_preempted_sequence_keeps_its_counts_and_counts_nothing_twice() -> None:
    requests = [request(request_id=str(i), frequency_penalty=0.7, presence_penalty=0.3, repetition_penalty=1.2) for i in range(3)]
    steady, interrupted = Driver(*requests), Driver(*requests)
    for step in range(12):
        logits = normal(3, seed=step, spread=1.0)
        expected = tokens(steady.step(logits))
        order = [[0, 1, 2], [2], [1, 0]][step % 3]
        got = dict(zip(order, tokens(interrupted.step(logits[order], order))))
        for late in set(range(3)) - set(order):  # comes back alone, later
            got |= dict(zip([late], tokens(interrupted.step(logits[[late]], [late]))))
        assert [got[i] for i in range(3)] == expected


def test_extreme_penalties_and_biases_stay_finite() -> None:
    logits = normal(4)
    kinds = (
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e300},
        {"logit_bias": {5: 1e308}},
        {"logit_bias": {5: -1e308}},
    )
    driver = Driver(*[request(temperature=0.0, **kind) for kind in kinds])
    for result in driver.step(logits):
        assert result.error is None
    assert tokens(driver.step(logits))[2] == 5


# ------------------------------------------------------------------------------------------------------- bias and masks


def test_a_row_without_any_possible_token_fails_alone() -> None:
    driver = Driver(request(allowed_token_ids=[3], bad_words_ids=[[3]], logprobs=1), request(temperature=0.0))
    logits = normal(2)
    first, second = driver.step(logits)
    assert isinstance(first.error, RequestFailedError) and "allowed_token_ids" in str(first.error)
    assert second.error is None and second.token_id == int(logits[1].argmax())


@pytest.mark.parametrize(
    ("word", "prompt", "then", "banned"),
    [
        ((9,), (5,), (), True),
        ((5, 9), (1, 5), (), True),
        ((5, 9), (5, 1), (), False),
        ((5, 9), (1,), (5,), True),
        ((4, 5, 9), (1, 4), (5,), True),
        ((4, 5, 9), (4, 5), (5,), False),
        ((1, 2, 3, 4, 9), (2, 3, 4), (), False),
        ((1, 2, 3, 4, 9), (1, 2), (3, 4), True),
        ((9, 9), (9,), (), True),
    ],
)
def test_bad_words_forbid_their_last_token_after_the_others(
    word: tuple[int, ...], prompt: tuple[int, ...], then: tuple[int, ...], banned: bool
) -> None:
    driver = Driver(request(prompt=prompt, temperature=0.0, bad_words_ids=[word, (30, 31)]))
    for token in then:
        logits = torch.zeros((1, V))
        logits[0, token] = 5.0
        assert tokens(driver.step(logits)) == [token]
    logits = torch.zeros((1, V))
    logits[0, 9] = 5.0
    assert tokens(driver.step(logits)) == ([0] if banned else [9])


def test_min_tokens_holds_back_the_end_exactly_that_long() -> None:
    settings = (
        {"min_tokens": 2},
        {"min_tokens": 2, "stop_token_ids": [7]},
        {"min_tokens": 3},
        {},
        {"min_tokens": 2, "ignore_eos": True},
    )
    driver = Driver(*[request(prompt=range(3 + i), temperature=0.0, **kind) for i, kind in enumerate(settings)])
    logits = torch.zeros((5, V))
    logits[:, EOS], logits[:, 7], logits[:, 20] = 3.0, 2.0, 1.0
    assert [tokens(driver.step(logits)) for _ in range(4)] == [
        [7, 20, 7, 1, 7],
        [7, 20, 7, 1, 7],
        [1, 1, 7, 1, 1],
        [1, 1, 1, 1, 1],
    ]


def test_min_tokens_without_an_end_of_sequence_changes_nothing() -> None:
    logits = normal(1)
    assert tokens(Driver(request(eos=None, temperature=0.0, min_tokens=5)).step(logits)) == [int(logits.argmax())]


# ------------------------------------------------------------------------------------------------------------- logprobs


def test_raw_logprobs_are_those_of_the_model_bit_by_bit() -> None:
    logits = normal(3)
    kinds = (
        {"logprobs": 4, "temperature": 0.3, "top_k": 2},
        {"logprobs": 0, "logit_bias": {3: 50.0}},
        {"logprobs": V, "temperature": 0.0},
    )
    results = Driver(*[request(request_id=str(i), **kind) for i, kind in enumerate(kinds)]).step(logits)
    assert results[1].token_id == 3
    ids = torch.tensor(tokens(results))
    values, ranks, top_ids, top_values = token_logprobs(logits, ids, V)
    for r, k in enumerate((4, 0, V)):
        got = scored(results[r])
        assert got.logprob == float(values[r]) and got.rank == int(ranks[r])
        assert (got.token_ids.typecode, got.values.typecode) == ("i", "f")
        assert got.token_ids.tolist() == top_ids[r, :k].tolist() and got.values.tolist() == top_values[r, :k].tolist()
    assert scored(results[2]).rank == 1
    assert values.tolist() == pytest.approx(logits.double().log_softmax(-1).gather(1, ids[:, None])[:, 0].tolist(), abs=1e-5)


def test_processed_logprobs_are_those_of_the_distribution_that_was_sampled_from() -> None:
    logits = normal(2)
    params = {"temperature": 0.5, "top_k": 3, "logit_bias": {4: 20.0}}
    results = Driver(request(**params, **ALL), request(**{**params, "logprobs": V})).step(logits)
    biased = logits.double()
    biased[:, 4] += 20
    kept = biased[0].topk(3)
    assert distribution(results[0]) == pytest.approx(
        dict(zip(kept.indices.tolist(), (kept.values / 0.5).log_softmax(-1).tolist())), abs=1e-4
    )
    assert len(distribution(results[1])) == V
    assert distribution(results[1])[4] == pytest.approx(float(logits[1].double().log_softmax(-1)[4]), abs=1e-4)


def test_rank_counts_strictly_better_tokens() -> None:
    logits = torch.zeros((1, V))
    logits[0, [4, 5]] = 1.0
    (result,) = Driver(request(allowed_token_ids=[30], logprobs=3)).step(logits)
    assert scored(result).rank == 3 and scored(result).token_ids.tolist() == [4, 5, 0]


def test_logprobs_are_returned_only_where_asked_for() -> None:
    driver = Driver(request(), request(logprobs=0), request(), request(logprobs=2, logprobs_mode="processed"))
    results = driver.step(normal(4))
    assert [r.logprob is None for r in results] == [True, False, True, False]
    assert len(scored(results[1]).token_ids) == 0 and len(scored(results[3]).values) == 2


# -------------------------------------------------------------------------------------------------------------- thinking


def always(*favoured: int) -> Tensor:
    """Return logits that prefer these tokens, in this order."""
    logits = torch.zeros((1, V))
    for better, token in enumerate(reversed(favoured)):
        logits[0, token] = 1.0 + better
    return logits


@pytest.mark.parametrize("budget", [1, 2, 3, 5])
def test_thinking_ends_when_its_budget_is_spent(budget: int) -> None:
    driver = Driver(request(prompt=[4, OPEN], think=True, temperature=0.0, thinking_budget=budget))
    assert driver.sampler.prepare([run_of(0, 2)]).ruled == (0,)
    got = [tokens(driver.step(always(30)))[0] for _ in range(8)]
    assert got == [30] * budget + [CLOSE] + [30] * (7 - budget)


@pytest.mark.parametrize("prompt", [(4,), (OPEN, 4, CLOSE), (CLOSE,)])
def test_thinking_that_the_prompt_does_not_open_is_not_cut(prompt: tuple[int, ...]) -> None:
    driver = Driver(request(prompt=prompt, think=True, temperature=0.0, thinking_budget=1))
    assert [tokens(driver.step(always(30)))[0] for _ in range(4)] == [30] * 4


def test_thinking_that_the_model_opens_is_counted_over_all_its_parts() -> None:
    driver = Driver(request(prompt=[4], think=True, temperature=0.0, thinking_budget=3))
    got = [tokens(driver.step(always(token, 31)))[0] for token in (OPEN, 30, 30, CLOSE, 30, OPEN, 30, 30, OPEN, 30)]
    assert got == [OPEN, 30, 30, CLOSE, 30, OPEN, 30, CLOSE, 31, 30]  # used up: closed, and not opened again


def test_thinking_budget_of_zero_closes_at_once_against_every_mask() -> None:
    settings = dict(thinking_budget=0, allowed_token_ids=[30], bad_words_ids=[[CLOSE]], **ALL)
    driver = Driver(request(prompt=[OPEN], think=True, **settings))
    logits = always(30)
    logits[0, CLOSE] = -INF
    (result,) = driver.step(logits)
    assert result.token_id == CLOSE and distribution(result) == {CLOSE: 0.0}
    assert tokens(driver.step(always(OPEN, 31, 30))) == [30]


def test_opening_tags_inside_thinking_spend_budget() -> None:
    driver = Driver(request(prompt=[OPEN], think=True, temperature=0.0, thinking_budget=2))
    assert [tokens(driver.step(always(OPEN)))[0] for _ in range(3)] == [OPEN, OPEN, CLOSE]


# --------------------------------------------------------------------------------------------------------------- grammar


class CountUp:
    """A grammar of the ids ``first``, ``first + 1``, … up to ``last``; the end may come from ``enough`` on."""

    def __init__(self, first: int, last: int, enough: int, breaks_at: int | None = None) -> None:
        self.next, self.last, self.enough, self.breaks_at = first, last, enough, breaks_at
        self.ended = False

    def mask(self) -> Tensor:
        mask = torch.zeros(V, dtype=torch.bool)
        if not self.ended and self.next <= self.last:
            mask[self.next] = True
        mask[EOS] = self.ended or self.next > self.enough
        return mask

    def accept(self, token_id: int) -> None:
        if token_id == self.breaks_at:
            raise RequestFailedError("the grammar engine gave up")
        if self.ended or not self.mask()[token_id]:
            raise InvalidRequestError("not allowed", parameter="structured_outputs", value=token_id)
        self.ended = token_id == EOS
        self.next += not self.ended

    def is_terminated(self) -> bool:
        return self.ended or self.next > self.last


@dataclass
class Grammars:
    matchers: list[CountUp]

    def begin(self, spec: StructuredOutputs, *, caches: bool) -> CountUp:
        return self.matchers.pop(0)

    def matcher(self, compiled: CountUp) -> CountUp:
        return compiled


GRAMMAR = StructuredOutputs(regex="x")


def test_structured_outputs_follow_the_grammar_to_its_end() -> None:
    grammars = Grammars([CountUp(10, 12, 12), CountUp(20, 30, 21)])
    constrained = {"temperature": 0.0, "structured_outputs": GRAMMAR}
    driver = Driver(request(**constrained), request(temperature=0.0), request(ignore_eos=True, **constrained), grammars=grammars)
    assert driver.sampler.prepare([run_of(i, driver.lengths[i]) for i in range(3)]).ruled == (0, 2)
    logits = always(40, EOS).expand(3, -1)
    assert [tokens(driver.step(logits)) for _ in range(5)] == [
        [10, 40, 20],
        [11, 40, 21],
        [12, 40, EOS],
        [EOS, 40, EOS],
        [EOS, 40, EOS],
    ]


def test_min_tokens_lengthens_a_grammar_only_where_it_can_go_on() -> None:
    grammars = Grammars([CountUp(10, 11, 10), CountUp(20, 30, 19)])
    driver = Driver(*[request(temperature=0.0, structured_outputs=GRAMMAR, min_tokens=3)] * 2, grammars=grammars)
    logits = always(EOS).expand(2, -1)
    assert [tokens(driver.step(logits)) for _ in range(4)] == [[10, 20], [11, 21], [EOS, 22], [EOS, EOS]]


def test_a_grammar_waits_for_the_thinking_to_end() -> None:
    driver = Driver(
        request(prompt=[OPEN], think=True, temperature=0.0, structured_outputs=GRAMMAR, stop_token_ids=[40]),
        grammars=Grammars([CountUp(10, 12, 12)]),
    )
    favourites = [(30,), (40, EOS, 31), (CLOSE,), (30,), (OPEN,), (30,), (30,)]
    assert [tokens(driver.step(always(*f)))[0] for f in favourites] == [30, 31, CLOSE, 10, 11, 12, EOS]


def test_a_grammar_that_gives_up_fails_its_own_row_only() -> None:
    driver = Driver(
        *[request(temperature=0.0, structured_outputs=GRAMMAR)] * 2,
        grammars=Grammars([CountUp(10, 20, 20, breaks_at=11), CountUp(10, 20, 20)]),
    )
    logits = always(40).expand(2, -1)
    assert [tokens(driver.step(logits)) for _ in range(2)] == [[10, 10], [11, 11]]
    first, second = driver.step(logits)
    assert isinstance(first.error, RequestFailedError) and "gave up" in str(first.error)
    assert tokens([second]) == [12]


def test_a_token_that_a_grammar_rejects_fails_its_own_row_only() -> None:
    driver = Driver(
        *[request(temperature=0.0, structured_outputs=GRAMMAR)] * 2, grammars=Grammars([CountUp(10, 20, 20), CountUp(10, 20, 20)])
    )
    logits = always(40).expand(2, -1)
    assert tokens(driver.step(logits)) == [10, 10]
    driver.sampler.accept(0, 30)
    first, second = driver.step(logits)
    assert isinstance(first.error, RequestFailedError) and isinstance(first.error.__cause__, InvalidRequestError)
    assert tokens([second]) == [11]


@pytest.mark.parametrize("method", ["begin", "matcher"])
def test_a_grammar_that_only_this_rank_cannot_compile_fails_its_own_row_only(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*what: object, **how: object) -> CountUp:
        raise ZeroDivisionError("out of luck")

    monkeypatch.setattr(Grammars, method, fail)
    driver = Driver(
        *(request(temperature=0.0, structured_outputs=GRAMMAR), request(temperature=0.0)), grammars=Grammars([CountUp(10, 20, 20)])
    )
    for _ in range(2):
        first, second = driver.step(always(40).expand(2, -1))
        assert isinstance(first.error, RequestFailedError) and "out of luck" in str(first.error)
        assert tokens([second]) == [40]
    driver.sampler.remove(0)
    assert tokens(driver.step(always(40), rows=[1])) == [40]


def test_settings_that_no_tensor_can_hold_fail_before_any_step() -> None:
    dry_run(request(logit_bias={4: 1.0}, allowed_token_ids=[4], bad_words_ids=[[5]], min_tokens=3, presence_penalty=1.0), V)
    for wrong in ({"logit_bias": {V: 1.0}}, {"stop_token_ids": [V], "min_tokens": 1}, {"allowed_token_ids": [V]}):
        with pytest.raises(IndexError):
            dry_run(request(**wrong), V)


def test_a_grammar_with_penalties_and_a_draw_keeps_to_the_grammar() -> None:
    driver = Driver(
        request(structured_outputs=GRAMMAR, presence_penalty=1.0, top_p=0.9, **ALL), grammars=Grammars([CountUp(10, 20, 10)])
    )
    driver.step(normal(1))
    (result,) = driver.step(normal(1, seed=1, spread=0.1))
    assert set(distribution(result)) <= {11, EOS}


# ----------------------------------------------------------------------------------------------------------------- state


def test_sequences_that_wait_hold_no_tensors() -> None:
    vocab_size = 100_000
    kinds = [{"allowed_token_ids": [3]}, {"bad_words_ids": [[4]]}, {"presence_penalty": 1.0}, {"logit_bias": {4: 1.0}}]
    matchers = [CountUp(10, 20, 20) for _ in range(10)]
    sampler = sampler_of(vocab_size, grammars=Grammars(list(matchers)))
    before = tensor_bytes()
    for i in range(50):
        sampler.add(i, request(request_id=str(i), **(kinds[i % 4] if i < 40 else {"structured_outputs": GRAMMAR})), 0)
    assert tensor_bytes() == before
    samples = sample(sampler, normal(4, vocab_size), [run_of(i, 3) for i in range(4)]).to_host()
    assert samples[0].token_id == 3 and tensor_bytes() > before + vocab_size
    for i in range(50):
        sampler.remove(i)
    del samples
    assert tensor_bytes() <= before + 1000


def test_removed_sequences_leave_nothing_behind() -> None:
    sampler = sampler_of()
    requests = [request(request_id=str(i), **mixed_params(i)) for i in range(40)]
    references = [sys.getrefcount(r.params) for r in requests]
    for i, r in enumerate(requests):
        sampler.add(i, r, 0)
    before = tensor_bytes()
    sample(sampler, normal(40), [run_of(i, 3) for i in range(40)])
    assert tensor_bytes() > before
    assert sampler.num_sequences == 40
    for i in range(40):
        sampler.remove(i)
        sampler.remove(i)
    assert sampler.num_sequences == 0 and tensor_bytes() == before
    assert [sys.getrefcount(r.params) for r in requests] == references


def test_counts_stay_apart_while_sequences_come_and_go() -> None:
    """Slots are taken again, also by sequences that were in others before; each sequence still sees its own tokens only."""
    generator = torch.Generator().manual_seed(0)
    sampler, references, next_id = sampler_of(), {}, 0
    for step in range(60):
        for _ in range(int(torch.randint(3, (), generator=generator))):
            r = request(
                prompt=[next_id % V], request_id=str(next_id), temperature=0.0, frequency_penalty=1.5, repetition_penalty=1.2
            )
            sampler.add(next_id, r, 0)
            references[next_id] = Reference(r)
            next_id += 1
        for seq_id in [s for s in references if (s * 7 + step) % 11 == 0]:
            sampler.remove(seq_id)
            del references[seq_id]
        if not references:
            continue
        seq_ids = list(references)
        logits = normal(len(seq_ids), seed=step, spread=1.0)
        runs = [run_of(s, 1 + len(references[s].output), slot=(i + step) % 64) for i, s in enumerate(seq_ids)]
        results = sample(sampler, logits, runs).to_host()
        for row, s in enumerate(seq_ids):
            z = references[s].processed(logits[row].tolist())
            token = references[s].choose(z, (0, 0))
            assert results[s].token_id == token or not references[s].clear
            references[s].output.append(results[s].token_id)
    assert next_id > 40


def test_token_of_a_removed_sequence_is_ignored() -> None:
    driver = Driver(request(bad_words_ids=[[1, 2]]))
    driver.sampler.remove(0)
    driver.sampler.accept(0, 3)
    assert driver.sampler.num_sequences == 0


def test_host_rules_are_what_the_device_cannot_decide() -> None:
    kinds = (
        {},
        {"temperature": 0.0, "presence_penalty": 1.0, "min_tokens": 3},
        {"bad_words_ids": [[3]]},
        {"bad_words_ids": [[3, 4]]},
    )
    driver = Driver(*[request(**kind) for kind in kinds])
    assert driver.sampler.prepare([run_of(i, driver.lengths[i]) for i in range(4)]).ruled == (3,)
