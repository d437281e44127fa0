"""Speculative decoding changes no output: whole engines with drafts that are right, wrong, or invalid."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4lite.config import MTP, EngineConfig, NGram, Speculator
from dsv4lite.engine.step_graphs import GraphShape, StepGraphs, StepOutput, graph_widths
from dsv4lite.errors import ConfigError, UnsupportedError
from dsv4lite.models.deepseek_v4.model import DeepseekV4
from dsv4lite.request import RequestOutput, SamplingParams
from dsv4lite.scheduling.scheduler import Scheduler
from dsv4lite.scheduling.step_plan import SequencePlan
from dsv4lite.speculation.speculator import DraftProposer
from tests import recorded
from tests.e2e.engines import SMALL, engine_of, opened, prompts_of, same_outputs, write_model
from tests.e2e.test_engine_determinism import ask_all, asks
from tests.mla import write_random_model

VOCAB = SMALL["vocab_size"]


class Oracle:
    """Drafts the tokens that follow in known outputs; each is right with a given probability."""

    def __init__(self, outputs: Sequence[RequestOutput], *, k: int, right: float) -> None:
        self.k = k
        self._texts = [(*o.prompt_token_ids, *c.token_ids) for o in outputs for c in o.outputs]
        self._rng, self._right = random.Random(0), right
        self.forgotten: list[int] = []

    def propose(self, sequence_id: int, token_ids: Sequence[int], max_drafts: int) -> list[int]:
        known = tuple(token_ids)
        text = next((t for t in self._texts if t[: len(known)] == known), known)
        drafts = (*text[len(known) : len(known) + max_drafts], *[0] * max_drafts)[:max_drafts]
        return [t if self._rng.random() < self._right else (t + 1) % VOCAB for t in drafts]

    def forget(self, sequence_id: int) -> None:
        self.forgotten.append(sequence_id)


FAMILIES = pytest.mark.parametrize("model", ["v4", "v3", "v32"], indirect=True)


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with an MTP block: of V4, or the variant of the MLA family that a test names."""
    folder, name = tmp_path_factory.mktemp("model"), getattr(request, "param", "v4")
    return write_model(folder, seed=2) if name == "v4" else write_random_model(folder, name, num_nextn_predict_layers=1)


@pytest.fixture(scope="module")
def expected(model: Path) -> Sequence[RequestOutput]:
    with opened(model, deterministic=True) as llm:
        return ask_all(llm, asks())


@FAMILIES
@pytest.mark.parametrize(("k", "overlap"), [(1, True), (2, False), (4, True)])
def test_mtp_changes_no_bit_in_deterministic_mode(model: Path, expected: Sequence[RequestOutput], k: int, overlap: bool) -> None:
    with opened(model, deterministic=True, speculative=MTP(k, adaptive=False), overlap=overlap) as llm:
        same_outputs(ask_all(llm, asks()), expected)
        stats = llm.stats().speculation
        assert stats.length == k and stats.drafted > 0 and stats.runs == stats.drafted_by_position[0] > 0


@pytest.mark.parametrize("right", [1.0, 0.7, 0.0])
def test_right_and_wrong_drafts_change_no_bit(model: Path, expected: Sequence[RequestOutput], right: float) -> None:
    oracle = Oracle(expected, k=3, right=right)
    with opened(model, deterministic=True, speculative=oracle, max_num_batched_tokens=100) as llm:
        same_outputs(ask_all(llm, asks()), expected)
        stats = llm.stats().speculation
    # Three completions share a prompt: the oracle takes the first one's next token for that of all.
    assert abs(stats.accepted_by_position[0] / stats.drafted_by_position[0] - right) < 0.25
    assert right > 0 or stats.accepted == 0
    assert stats.mean_accepted_length == 1 + stats.accepted / stats.runs
    assert len(oracle.forgotten) == len(set(oracle.forgotten)) == sum(len(output.outputs) for output in expected)


@FAMILIES
@pytest.mark.parametrize("speculative", [NGram(3), NGram(3, min_n=1), (NGram(2, min_n=1, adaptive=False), MTP(2)), "auto"], ids=str)
def test_other_and_adaptive_drafters_change_no_bit(model: Path, expected: Sequence[RequestOutput], speculative: Any) -> None:
    with opened(model, deterministic=True, speculative=speculative) as llm:
        outputs = ask_all(llm, asks())
        same_outputs(outputs, expected)
        stats = llm.stats().speculation
        assert stats.policy is not None
        assert stats.drafted > 0 or speculative == NGram(3)  # two tokens of random text need not come again
    usages = [output.usage for output in outputs]
    assert sum(usage.drafted_tokens for usage in usages) == stats.drafted
    assert sum(usage.accepted_tokens for usage in usages) == stats.accepted


def test_prompt_lookup_goes_before_the_block(model: Path) -> None:
    """Where the text repeats itself, n-grams draft; elsewhere the MTP block does."""
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, allowed_token_ids=(9, 10))
    (prompt,) = prompts_of((30,), VOCAB)
    both = (NGram(4, adaptive=False), MTP(1, adaptive=False))
    with opened(model) as llm:
        expected = llm.generate(prompt, params).token_ids
    with opened(model, speculative=both) as llm:
        assert llm.generate(prompt, params).token_ids == expected
        stats = llm.stats().speculation
    assert stats.drafted_by_position[0] > stats.drafted_by_position[1] > 0 and stats.accepted > 10


def test_right_drafts_save_steps(model: Path) -> None:
    params = SamplingParams(max_tokens=41, temperature=0, ignore_eos=True)
    (prompt,) = prompts_of((20,), VOCAB)
    with opened(model) as llm:
        output = llm.generate(prompt, params)
        steps = llm.stats().steps
    with opened(model, speculative=Oracle([output], k=4, right=1.0)) as llm:
        assert llm.generate(prompt, params).token_ids == output.token_ids
        assert steps == 41 and llm.stats().steps == 9
        assert llm.stats().speculation.mean_accepted_length == 5 and llm.stats().generated_tokens == 41


class EagerGraphs(StepGraphs):
    """Step graphs without a device: a replay does the work again, into the tensors of the capture."""

    steps = drafting = rounds = unresolved = 0

    def _record(self, work: Callable[[], Any]) -> Any:
        return recorded.record(self, work)

    def replay(self, sequences: Sequence[SequencePlan], shape: GraphShape) -> StepOutput | torch.Tensor:
        self.steps += 1
        self.drafting += shape.drafts
        self.unresolved += sum(s.unresolved is not None for s in sequences)
        return super().replay(sequences, shape)

    def draft(self, sequences: Sequence[SequencePlan], tokens_R: torch.Tensor, count: int) -> torch.Tensor:
        self.rounds += count
        return super().draft(sequences, tokens_R, count)


def record(engine: Any, widths: Sequence[int], *, adaptive: bool = False) -> EagerGraphs:
    """Let an engine run its steps from such graphs."""
    runner = engine._runner
    runner._graphs = EagerGraphs(
        runner.model,
        runner.cache,
        max_num_seqs=8,
        max_model_len=1024,
        widths=widths,
        max_tokens=32,
        sampling=runner.sampler,
        drafter=runner._drafter,
        adaptive=adaptive,
    )
    return runner._graphs  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("k", "both", "captured"), [(3, False, False), (1, True, False), (1, False, True), (3, True, True)], ids=str
)
def test_drafts_change_no_token_eagerly_and_in_captured_steps(
    model: Path, expected: Sequence[RequestOutput], k: int, both: bool, captured: bool
) -> None:
    """The model's own drafter, alone or after another one."""
    own = MTP(k, adaptive=False)
    speculative = (Oracle(expected, k=2, right=0.6), own) if both else own
    widths = graph_widths(max(k, 2), adaptive=k == 1)
    with opened(model, deterministic=True, speculative=speculative, overlap=captured) as llm:
        graphs = engine_of(llm).call(partial(record, widths=widths)).result() if captured else None
        same_tokens(ask_all(llm, asks()), expected)
        stats = llm.stats().speculation
    assert stats.drafted > 20 and (graphs is None or graphs.steps > 4 < graphs.rounds)
    assert stats.accepted > 15 or not both


def same_tokens(ours: Sequence[RequestOutput], theirs: Sequence[RequestOutput]) -> None:
    assert [[c.token_ids for c in o.outputs] for o in ours] == [[c.token_ids for c in o.outputs] for o in theirs]


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("own", [True, False])
def test_steps_planned_ahead_change_no_token(
    model: Path, expected: Sequence[RequestOutput], own: bool, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the host drafts nothing, a step is planned while the previous one runs; the number of drafts changes."""
    lengths = itertools.cycle([0] * 7 + [2] * 3 + [0] * 2 + [1] * 2)
    ahead = []
    inner = Scheduler.schedule

    def spy(scheduler: Scheduler, now: float, most: int | None = None) -> Any:
        ahead.append(len(scheduler._outstanding))
        assert not ahead[-1] or most == 0 or own
        return inner(scheduler, now, most)

    monkeypatch.setattr(Scheduler, "schedule", spy)
    monkeypatch.setattr(DraftProposer, "choose_length", lambda proposer, num_sequences: next(lengths))
    speculative = MTP(2) if own else NGram(2, min_n=1)
    settings = {"overlap": True, "deterministic": True, "max_num_batched_tokens": 150, "speculative": speculative}
    with opened(model, **settings) as llm:
        graphs = engine_of(llm).call(partial(record, widths=(1, 2, 3))).result() if captured else None
        (same_tokens if captured else same_outputs)(ask_all(llm, asks()), expected)
        stats = llm.stats().speculation
    assert sum(ahead) > len(ahead) // 4 and stats.drafted > 20 and (graphs is None or graphs.steps > 4)


def drafts_after(model: DeepseekV4, tokens: Sequence[int], k: int) -> list[int]:
    """Return the ``k`` drafts after a text of which all but the last token ran, by passes over the whole text."""
    batch, caches = model.prepare(tokens[:-1], drafter=True)
    streams, following, found = model(batch, caches[:-1]), list(tokens[1:]), []
    for _ in range(k):
        batch, caches = model.prepare(following, drafter=True)  # only its places and its cache count
        out = model.mtp_forward(streams, replace(batch, token_ids_T=torch.tensor(following)), caches[-1])
        found.append(int(model.mtp_logits(out[-1:]).argmax()))
        following.append(found[-1])
        streams = torch.cat([streams, out[-1:]])
    return found


@pytest.mark.parametrize(
    ("model", "captured"), [("v4", False), ("v4", True), ("v3", False), ("v3", True), ("v32", True)], indirect=["model"]
)
def test_mtp_drafts_depend_on_the_text_alone(model: Path, captured: bool, drafted: list[list[int]]) -> None:
    """Chunks, rejected drafts, pages that slid away and what drafting writes into the window make no difference."""
    (prompt,) = prompts_of((50,), VOCAB, seed=3)
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    with opened(model, speculative=MTP(3, adaptive=False), max_num_batched_tokens=20) as llm:
        graphs = engine_of(llm).call(partial(record, widths=(1, 3, 4))).result() if captured else None
        text = [*prompt, *llm.generate(prompt, params).token_ids]
        stats = llm.stats()
        whole = engine_of(llm)._runner.model
    assert stats.speculation.runs > 10 and (graphs is None or graphs.rounds > 30)
    known = len(prompt) + 1
    for drafts in drafted:
        if known < len(text):
            wanted = drafts_after(whole, text[:known], 3)
            assert drafts == [*wanted[: sum(d >= 0 for d in drafts)], *[-1] * sum(d < 0 for d in drafts)]
            assert sum(d < 0 for d in drafts) <= (2 if known // 64 != (known + 2) // 64 or known % 64 < 3 else 0)
        used = [d for d in drafts if d >= 0][: max(0, len(text) - 1 - known)]
        known += 1 + next((i for i, d in enumerate(used) if text[known + i] != d), len(used))


class Broken:
    """A speculator with a given answer."""

    def __init__(self, answer: Callable[[int], Any]) -> None:
        self.k, self._answer, self.calls = 2, answer, 0

    def propose(self, sequence_id: int, token_ids: Sequence[int], max_drafts: int) -> Sequence[int]:
        self.calls += 1
        with pytest.raises(TypeError):
            token_ids[0] = 1  # type: ignore[index]
        answer: Sequence[int] = self._answer(max_drafts)
        return answer

    def forget(self, sequence_id: int) -> None:
        self._answer(0)
        raise KeyError(sequence_id)


class NoText(Exception):
    def __str__(self) -> str:
        raise AttributeError


def broke(count: int) -> list[int]:
    raise NoText


def cancelled(count: int) -> list[int]:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    "answer",
    [
        broke,
        cancelled,
        sys.exit,
        lambda n: None,
        lambda n: [VOCAB],
        lambda n: [-1],
        lambda n: ["a"],
        lambda n: [1.0],
        lambda n: [True],
        lambda n: [1] * (n + 1),
        lambda n: repeat(1),
    ],
)
def test_invalid_drafts_end_speculation_of_the_request_with_one_warning(
    model: Path, expected: Sequence[RequestOutput], answer: Callable[[int], Any], caplog: pytest.LogCaptureFixture
) -> None:
    speculator = Broken(answer)
    ask, wanted = asks()[-1], expected[-1]
    with opened(model, deterministic=True, speculative=speculator) as llm, caplog.at_level(logging.WARNING, "dsv4lite"):
        same_outputs(ask_all(llm, [ask]), [wanted])
        assert llm.stats().speculation.drafted == 0 and speculator.calls == 1
    assert [r.message for r in caplog.records if "continues without speculation" in r.message] == [caplog.records[0].message]
    assert "named" in caplog.records[0].message and "Broken" in caplog.records[0].message


@pytest.mark.parametrize("k", [0, 5, -1, 1.0, True, "1"])
def test_mtp_out_of_range_is_refused(k: Any) -> None:
    with pytest.raises(ConfigError, match="integer from 1 to 4"):
        MTP(k)


@pytest.mark.parametrize("value", [3, "mtp", MTP, object(), (), (MTP(1), MTP(2)), (MTP(1), None), Broken])
def test_values_that_are_not_drafters_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="speculative"):
        EngineConfig(model="m", speculative=value)


def test_checkpoint_without_mtp_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path, {**SMALL, "num_nextn_predict_layers": 0, "compress_ratios": [4, 8, 0]})
    with pytest.raises(UnsupportedError, match=r"MTP\(k=1.*no MTP block"), opened(folder, speculative=MTP()):
        pass
    with opened(folder, speculative="auto") as llm:
        assert llm.stats().speculation.length == 0


def test_speculator_is_recognized_by_its_methods() -> None:
    assert isinstance(Broken(broke), Speculator) and not isinstance(object(), Speculator)
