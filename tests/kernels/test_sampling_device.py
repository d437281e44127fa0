"""Steps sampled from the table of slots, and on the host what it cannot hold, against the sampler alone."""

from __future__ import annotations

import pytest
import torch

from dsv4lite.engine.sampler import Sampler
from dsv4lite.engine.samples import RowSamples
from dsv4lite.engine.sampling_device import DeviceSampler
from dsv4lite.engine.step import Sampled, SequencePlan
from dsv4lite.errors import RequestFailedError
from dsv4lite.kernels.sampling_rows import BEST
from dsv4lite.request import Request, SamplingParams

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
        self.device = DeviceSampler(self.samplers[0], slots=8, rows=6, vocab_size=V, device=DEVICE)
        self.last_token = torch.full((9,), -1, dtype=torch.int64, device=DEVICE)
        self.slots = dict(zip(settings, (6, 0, 3, 1, 7), strict=False))
        self.lengths = dict.fromkeys(settings, len(PROMPT))
        for seq_id, (name, each) in enumerate(settings.items()):
            params = SamplingParams(**each)  # type: ignore[arg-type]
            for sampler in self.samplers:
                sampler.add(seq_id, Request(request_id=name, prompt_token_ids=PROMPT, params=params, eos_token_id=1), 0)
            self.device.add(seq_id)

    def step(self, logits: torch.Tensor, names: list[str]) -> tuple[dict[str, Sampled], dict[str, Sampled]]:
        """Return what is sampled for some sequences, and what should be."""
        seq_ids = [self.names.index(name) for name in names]
        plans = [
            SequencePlan(i, self.slots[name], self.lengths[name] - 1, (0,), (), 0, (), True)
            for i, name in zip(seq_ids, names, strict=True)
        ]
        samples = self.device.sample(logits, plans, self.last_token)
        assert samples.runs.seq_ids == tuple(seq_ids) and samples.finite.tolist() == torch.isfinite(logits).all(1).tolist()
        results = samples.to_host()
        wanted = self.samplers[1].sample(logits, seq_ids, [plan.end for plan in plans]).to_host()
        for seq_id, name in zip(seq_ids, names, strict=True):
            self.lengths[name] += 1
            if results[seq_id].error is None:
                assert self.last_token[self.slots[name]] == results[seq_id].token_id
                for sampler in self.samplers:
                    sampler.accept(seq_id, results[seq_id].token_id)
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
    assert RowSamples.of(out, (0, 1), plans[:2]).to_host() == {0: Sampled(4), 1: Sampled(5)}


def test_a_sequence_that_left_is_forgotten() -> None:
    engine = Engine(one={"frequency_penalty": 1.0}, two={})
    plan = SequencePlan(0, 6, 2, (0,), (), 0, (), True)
    assert not engine.device.prepare([plan]).hosted
    engine.device.remove(0)
    engine.device.remove(0)
    assert engine.device.prepare([plan, plan._replace(seq_id=1, slot=0)]).hosted == (0,)
