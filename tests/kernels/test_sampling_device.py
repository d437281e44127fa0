"""Steps sampled from the table of slots, and on the host what it cannot hold, against the sampler alone."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from dsv4lite.errors import RequestFailedError
from dsv4lite.kernels.sampling.rows import BEST
from dsv4lite.request import Request, SamplingParams
from dsv4lite.sampling.device import DeviceSampler
from dsv4lite.sampling.sampler import Sampler
from dsv4lite.sampling.samples import RowSamples
from dsv4lite.scheduling.step_plan import UNKNOWN, Sampled, SequencePlan

pytest.importorskip("triton")
pytestmark = pytest.mark.kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
V = 200
PROMPT = (5, 6, 7)


class Engine:
    """Two samplers of the same sequences: the one on the device, and the one that says what is right."""

    def __init__(self, **settings: dict[str, object]) -> None:
        self.names = list(settings)
        self.samplers = [Sampler(V, DEVICE, 0) for _ in range(2)]
        self.device = DeviceSampler(self.samplers[0], slots=8, rows=20, vocab_size=V, device=DEVICE)
        self.last_token = torch.full((9,), -1, dtype=torch.int64, device=DEVICE)
        self.slots = dict(zip(settings, (6, 0, 3, 1, 7), strict=False))
        self.lengths = dict.fromkeys(settings, len(PROMPT))
        for seq_id, (name, each) in enumerate(settings.items()):
            params = SamplingParams(**each)  # type: ignore[arg-type]
            for sampler in self.samplers:
                sampler.add(seq_id, Request(request_id=name, prompt_token_ids=PROMPT, params=params, eos_token_id=1), 0)
            self.device.add(seq_id)

    def step(
        self, logits: torch.Tensor, names: list[str], drafts: Mapping[str, tuple[int, ...]] | None = None
    ) -> tuple[dict[str, Sampled], dict[str, Sampled]]:
        """Return what is sampled for some sequences, and what should be."""
        guesses = [(drafts or {}).get(name, ()) for name in names]
        seq_ids = [self.names.index(name) for name in names]
        plans = [
            SequencePlan(i, self.slots[name], self.lengths[name] - 1, (0, *some), (), 0, (), True, drafts=len(some))
            for i, name, some in zip(seq_ids, names, guesses, strict=True)
        ]
        samples = self.device.sample(logits, plans, self.last_token)
        assert samples.seq_ids == tuple(seq_ids)
        results = samples.to_host()
        rows = [(plan, plan.end - plan.drafts + place) for plan in plans for place in range(1 + plan.drafts)]
        ill = {plan.seq_id for (plan, _), row in zip(rows, logits, strict=True) if not torch.isfinite(row).all()}
        assert samples.ill() == ill
        judged = [guess for some in guesses for guess in (*some, UNKNOWN)]
        expected = self.samplers[1].sample(logits, [p.seq_id for p, _ in rows], [place for _, place in rows], judged)
        for ours, theirs in zip(samples.ends(), expected.ends(), strict=True):
            assert ours.tolist() == theirs.tolist() or samples.ill()
        wanted = expected.to_host()
        for seq_id, name in zip(seq_ids, names, strict=True):
            found = (results[seq_id], *results[seq_id].after)
            self.lengths[name] += len(found)
            if results[seq_id].error is None:
                assert self.last_token[self.slots[name]] == found[-1].token_id
                for sampler in self.samplers:
                    for one in found:
                        sampler.accept(seq_id, one.token_id)
        return {n: results[i] for i, n in zip(seq_ids, names)}, {n: wanted[i] for i, n in zip(seq_ids, names)}


def normal(rows: int, seed: int) -> torch.Tensor:
    return (3 * torch.randn(rows, V, generator=torch.Generator().manual_seed(seed))).to(DEVICE)


def test_device_and_host_share_a_step() -> None:
    engine = Engine(
        greedy={"temperature": 0.0},
        listed={"top_p": 0.9, "logprobs": 2, "frequency_penalty": 1.0},
        worded={"bad_words_ids": ((9, 10),), "logprobs": 1},  # the host looks for its words
        whole={"logprobs": BEST + 1, "logprobs_mode": "processed"},  # more than the device lists
        early={"min_tokens": 2},
    )
    orders = [list(engine.names), engine.names[:2], [*engine.names[::-1]], ["worded"]]
    for seed, names in enumerate(orders):
        got, wanted = engine.step(normal(len(names), seed), names)
        for name in names:
            assert got[name].token_id == wanted[name].token_id and got[name].error is None
            ours, theirs = got[name].logprob, wanted[name].logprob
            assert (ours is None) == (theirs is None) == (name in ("greedy", "early"))
            if ours is not None and theirs is not None:
                assert ours.rank == theirs.rank and ours.token_ids.tolist() == theirs.token_ids.tolist()
                assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)
                assert ours.values.tolist() == pytest.approx(theirs.values.tolist(), abs=1e-5)


def test_rows_behind_guesses_are_sampled_as_if_these_were_right() -> None:
    """Each token is less likely the more often it was said: what a row takes for granted counts, what was wrong does not."""
    engine = Engine(
        penalised={"temperature": 0.0, "frequency_penalty": 1.0, "logprobs": 0},
        drawn={"temperature": 0.3, "presence_penalty": 1.0, "seed": 1},
        held={"temperature": 0.0, "min_tokens": 4, "stop_token_ids": (9,)},
        worded={"temperature": 0.0, "bad_words_ids": ((9, 12),), "frequency_penalty": 0.5},  # the host looks for its words
        plain={"temperature": 0.0},
    )
    row = torch.zeros(V)
    row[[9, 12, 15, 18]] = torch.tensor([20.0, 19.6, 19.3, 19.1])
    for drafts in (
        {"penalised": (9, 12, 15), "drawn": (9, 12), "held": (12, 12), "worded": (9, 15)},
        {"penalised": (18, 9), "drawn": (12,), "plain": (9,)},
        {"penalised": (12, 9), "held": (9,), "worded": (12,)},
    ):
        logits = row.repeat(len(engine.names) + sum(map(len, drafts.values())), 1).to(DEVICE)
        got, wanted = engine.step(logits, engine.names, drafts)
        for name in engine.names:
            ours, theirs = ([found[name], *found[name].after] for found in (got, wanted))
            assert [one.token_id for one in ours] == [one.token_id for one in theirs], name
            for one, other in zip(ours, theirs, strict=True):
                assert (one.logprob is None) == (other.logprob is None)
                if one.logprob is not None and other.logprob is not None:
                    assert one.logprob.token_ids.tolist() == other.logprob.token_ids.tolist()
                    assert one.logprob.logprob == pytest.approx(other.logprob.logprob, abs=1e-5)
    assert engine.lengths["penalised"] - len(PROMPT) == 4 + 1 + 2  # else nothing was tested


def test_guesses_take_the_draws_that_judge_them() -> None:
    engine = Engine(
        drawn={"seed": 3},
        narrow={"temperature": 0.5, "min_p": 0.2, "top_k": 1, "frequency_penalty": 2.0},
        only={"allowed_token_ids": (4, 8), "seed": 5},
        worded={"bad_words_ids": ((9, 10),), "seed": 6},
        greedy={"temperature": 0.0, "min_tokens": 3},
    )
    logits = normal(6, 3)
    engine.step(logits[:5].contiguous(), engine.names)
    slots = torch.tensor([*(engine.slots[name] for name in engine.names), -1], dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([3, 3, 3, 3, 3, -1], dtype=torch.int32, device=DEVICE)
    guesses = engine.device.guess(logits, slots, positions).tolist()
    assert guesses[:5] == engine.samplers[1].draft(logits[:5], range(5), positions[:5] + 1).tolist()
    assert 0 <= guesses[5] < V


def test_rows_that_fail_say_why() -> None:
    engine = Engine(
        plain={}, impossible={"allowed_token_ids": (1,), "min_tokens": 1}, ill={"temperature": 0.0}, hosted={"logprobs": V}
    )
    logits = normal(4, 0)
    logits[2:, 8] = float("nan")
    got, wanted = engine.step(logits, engine.names)
    assert got["plain"].error is None
    for name in ("impossible", "ill", "hosted"):
        error = got[name].error
        assert isinstance(error, RequestFailedError) and str(error) == str(wanted[name].error)


def test_a_step_of_best_tokens_needs_no_more_than_these() -> None:
    engine = Engine(one={"temperature": 0.0}, two={"temperature": 0.0, "top_k": 3}, drawn={})
    plans = [SequencePlan(i, slot, 2, (0,), (), 0, (), True) for i, slot in enumerate((6, 0, 3))]
    rows = engine.device.prepare(plans[:2])
    assert rows.nothing and rows is engine.device.prepare(plans[:2])
    assert not engine.device.prepare(plans).nothing
    out = torch.tensor([[4, 5, 0], [1, 1, 0], [1, 1, 0]], dtype=torch.int32, device=DEVICE)
    assert RowSamples.of(out, (0, 1), plans[:2], (0, 1)).to_host() == {0: Sampled(4), 1: Sampled(5)}


def test_a_sequence_that_left_is_forgotten() -> None:
    engine = Engine(one={"frequency_penalty": 1.0}, two={})
    plan = SequencePlan(0, 6, 2, (0,), (), 0, (), True)
    assert not engine.device.prepare([plan]).hosted
    engine.device.remove(0)
    engine.device.remove(0)
    assert engine.device.prepare([plan, plan._replace(seq_id=1, slot=0)]).hosted == (0,)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "frequency_penalty": 0.4},
        {"top_p": 0.7, "min_p": 0.01, "logit_bias": {5: 3.0}},
        {"top_k": 150, "min_tokens": 4, "allowed_token_ids": tuple(range(180))},
        {"bad_words_ids": ((3, 4), (9,))},
    ],
    ids=str,
)
def test_scores_of_given_tokens_are_those_of_sampling(settings: dict[str, object]) -> None:
    """More tokens than rows fit at once, in two calls, beside a sequence that samples between them."""
    params = SamplingParams(**settings, logprobs=3, logprobs_mode="processed")  # type: ignore[arg-type]
    count, first = 9, 5
    rows = normal(count, seed=3)
    engine = Engine(one={**settings, "logprobs": 3, "logprobs_mode": "processed"}, other={"repetition_penalty": 1.2})
    sampled = [engine.step(rows[i : i + 1], ["one"])[0]["one"] for i in range(count)]
    tokens = tuple(one.token_id for one in sampled)

    scorer = Engine(other={"repetition_penalty": 1.2}, spare={})
    scorer.device = DeviceSampler(scorer.samplers[0], slots=8, rows=4, vocab_size=V, device=DEVICE)
    scorer.device.add(0)
    request = Request(
        request_id="given", prompt_token_ids=PROMPT + tokens, params=params, eos_token_id=1, score_from=len(PROMPT), generate=False
    )
    scorer.samplers[0].add(9, request, 0)
    scorer.device.add(9)
    plan = SequencePlan(9, 3, 0, (0,), (), 0, (), False)
    found = []
    for begin, end in ((0, first), (first, count)):
        found.append(scorer.device.score(rows[begin:end].clone(), plan, len(PROMPT) + begin, tokens[begin:end]))
        ours, theirs = scorer.step(normal(1, seed=begin), ["other"])
        assert ours["other"].token_id == theirs["other"].token_id
    values, ranks, ids, listed = (torch.cat(column).cpu() for column in zip(*found, strict=True))
    expected = [one.logprob for one in sampled]
    assert values.tolist() == [one.logprob for one in expected] and ranks.tolist() == [one.rank for one in expected]
    assert torch.equal(ids, torch.stack([one.token_ids for one in expected]))
    assert torch.equal(listed, torch.stack([one.values for one in expected]))


def test_score_of_a_row_that_failed_is_nan() -> None:
    engine = Engine(one={})
    params = SamplingParams(logprobs=0, logprobs_mode="processed")
    request = Request(request_id="given", prompt_token_ids=(*PROMPT, 8, 9), params=params, score_from=len(PROMPT), generate=False)
    engine.samplers[0].add(9, request, 0)
    engine.device.add(9)
    rows = normal(2, seed=1)
    rows[1, 4] = torch.nan
    values, *_ = engine.device.score(rows, SequencePlan(9, 2, 0, (0,), (), 0, (), False), len(PROMPT), (8, 9))
    assert values.isnan().tolist() == [False, True]
