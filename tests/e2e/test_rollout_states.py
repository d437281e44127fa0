"""Random interleavings of everything that changes weights, memory and requests, against a model of the states."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from torch import Tensor

from dsv4lite.api.blocking import Stream
from dsv4lite.errors import EngineStateError, WeightsNotLoadedError, WeightUpdateError
from dsv4lite.llm import LLM
from dsv4lite.request import Phase, SamplingParams, WeightSource
from dsv4lite.weights.delta import DeltaSource
from dsv4lite.weights.update import DiskSource, NamedTensors
from tests.e2e.engines import MODEST, assert_idle, engine_of, write_model
from tests.e2e.updates import LONG, PROMPT, read
from tests.parallel.requests import SHARED

pytestmark = pytest.mark.usefixtures("forked_ranks")

SHORT = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, logprobs=1)
OPEN = SamplingParams(max_tokens=700, temperature=0, ignore_eos=True, detokenize=False)
Fault = Literal["missing", "shape", "raises", "hangs", "block"]
MODES = st.sampled_from(["keep", "recompute", "abort"])
EVERY_FAULT: tuple[Fault, ...] = ("missing", "shape", "raises", "hangs", "block")
ACTIONS = (
    *("generate", "generate", "generate", "update", "update", "update", "delta", "delta", "stream", "abort", "reset_prefix_cache"),
    *("pause", "resume", "resume", "sleep", "wake_up", "wake_up", "revive", "revive"),
)
NORM = SHARED["hidden_size"]
# Where two of the four checkpoints differ from the others: a block of tensors that are else the same in all, and a whole tensor.
REGION = ("layers.0.attn.wq_a.weight", "layers.1.attn.wq_b.weight", "layers.2.ffn.experts.3.w2.weight", "head.weight")
Draw = Any


def spoiled(fault: Fault, go: threading.Event, first: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    yield from first
    if fault == "shape":
        yield "norm.weight", torch.zeros(1)
    if fault == "raises":
        raise OSError("no bucket came")
    if fault == "hangs":
        go.wait(60)


class Model(RuleBasedStateMachine):
    """The engine is one for all examples; each begins with a ready engine that has the first weights.

    Attributes:
        weights: Which of the four checkpoints the engine has; ``None`` if none.
        asleep: What sleeps.
        kept: Whether the weights that sleep are in host memory.
        streams: Open requests, each with whether it may still go on.
    """

    llm: LLM
    folders: Sequence[Path]
    tensors: Sequence[dict[str, Tensor]]
    expected: Sequence[dict[int, Any]]

    def __init__(self) -> None:
        super().__init__()
        self.weights: int | None = 0
        self.asleep: set[str] = set()
        self.paused = False
        self.streams: list[Stream] = []
        self.ended: list[tuple[Stream, tuple[str, ...]]] = []
        self.go = threading.Event()
        self.version = self.llm.weight_version
        self._repair()

    def _repair(self) -> None:
        """Bring the engine to where every example begins."""
        llm = self.llm
        llm.resume()
        llm.wake_up()
        self._load(0)
        self.asleep, self.paused = set(), False

    def _load(self, which: int) -> None:
        with self.llm.update_weights(self.version + 1) as update:
            update.load(DiskSource(str(self.folders[which])))
        self.version, self.weights = self.version + 1, which

    @property
    def serves(self) -> bool:
        return not self.asleep and self.weights is not None

    @property
    def state(self) -> Phase:
        if self.asleep:
            return Phase.ASLEEP
        if self.weights is None:
            return Phase.WEIGHTS_INVALID
        return Phase.PAUSED if self.paused else Phase.READY

    @property
    def refusal(self) -> type[Exception]:
        return WeightsNotLoadedError if self.weights is None else EngineStateError

    def _end_streams(self, *reasons: str) -> None:
        self.ended += [(stream, reasons) for stream in self.streams]
        self.streams = []

    @rule(action=st.sampled_from(ACTIONS), data=st.data())
    def act(self, action: str, data: st.DataObject) -> None:
        """One rule for all: with a rule for each, hypothesis leaves some of them out of an example."""
        getattr(self, action)(data.draw)

    # ---- requests ----

    def generate(self, draw: Draw) -> None:
        for prompt in (PROMPT, LONG):
            self._generate(prompt)

    def _generate(self, prompt: list[int]) -> None:
        if not self.serves:
            with pytest.raises(self.refusal):
                self.llm.generate(prompt, SHORT)
        elif self.paused:
            assert self.llm.generate(prompt, SHORT, deadline=1e-4).outputs[0].finish_reason == "deadline"
        else:
            (one,) = self.llm.generate(prompt, SHORT).outputs
            assert self.weights is not None and one.logprobs is not None
            tokens, values = self.expected[self.weights][len(prompt)]
            assert one.token_ids == tokens and one.logprobs.values.equal(values)
            assert one.weight_versions == ((self.version, 0, 2),)

    def stream(self, draw: Draw) -> None:
        if not self.serves or len(self.streams) > 3:
            return
        stream = self.llm.stream(LONG, OPEN)
        stream.__enter__()
        if not self.paused:
            next(stream)
        self.streams.append(stream)

    def abort(self, draw: Draw) -> None:
        if draw(st.booleans()) or not self.streams:
            self.llm.abort()
            self._end_streams("abort")
        else:
            stream = self.streams.pop()
            self.llm.abort(stream.request_id)
            self.ended.append((stream, ("abort",)))

    def reset_prefix_cache(self, draw: Draw) -> None:
        self.llm.reset_prefix_cache()

    # ---- states ----

    def pause(self, draw: Draw) -> None:
        mode: Any = draw(st.sampled_from(["keep", "abort"]))
        self.llm.pause(mode)
        self.paused = True
        if mode == "abort":
            self._end_streams("abort")

    def resume(self, draw: Draw) -> None:
        self.llm.resume()
        self.paused = False

    def sleep(self, draw: Draw) -> None:
        level, mode = draw(st.sampled_from([1, 2])), draw(st.sampled_from(["keep", "abort"]))
        self.llm.sleep(level, mode=mode)  # type: ignore[arg-type]
        self.asleep = {"weights", "kv_cache"}
        if level == 2:
            self.weights = None
        if mode == "abort":
            self._end_streams("abort")

    def wake_up(self, draw: Draw) -> None:
        tags: Any = draw(st.sampled_from([None, None, ("weights",), ("kv_cache",)]))
        self.llm.wake_up(tags)
        self.asleep -= set(tags or ("weights", "kv_cache"))

    def revive(self, draw: Draw) -> None:
        """Wake up with weights: deltas need them."""
        self.llm.wake_up()
        self.asleep = set()
        if self.weights is None:
            self._load(draw(st.integers(0, 3)))

    def update(self, draw: Draw) -> None:
        which = draw(st.integers(0, 3))
        self._update(draw, DiskSource(str(self.folders[which])), which, [("layers.0.attn_norm.weight", torch.full((NORM,), 3.0))])

    def delta(self, draw: Draw) -> None:
        """Send what differs between two checkpoints, whichever the engine has: it gets that, and whole what is not compared."""
        before, change = draw(st.integers(0, 3)), draw(st.sampled_from([2, 3, 2, 1, 0]))
        after, known = before ^ change, draw(st.sampled_from([True, True, True, False]))
        source, which = DeltaSource(NamedTensors(self.tensors[after]), self.tensors[before] if known else {}, block=(8, 8)), after
        if known and self.weights is not None:
            which = self.weights ^ ((self.weights ^ after) & change)
        blocks = [one for one in source.tensors() if one[0].startswith(REGION[0] + "@")]
        assert len(blocks) == (3 if known and change & 2 else 0)
        self._update(draw, source, which, blocks[: draw(st.integers(2, 3))], partial=True)

    def _update(
        self, draw: Draw, source: WeightSource, which: int, some: Sequence[tuple[str, Any]], *, partial: bool = False
    ) -> None:
        """Load a source, after which the engine has a checkpoint; or some of its tensors, and then what makes the update fail."""
        mode, staged = draw(MODES), draw(st.sampled_from([True, True, True, False] if partial else [False, True]))
        faults = [fault for fault in EVERY_FAULT if some or fault != "missing"]
        fault: Fault | None = draw(st.sampled_from([*[None] * (10 if partial else 5), *faults]))
        if "weights" in self.asleep or (partial and self.weights is None):
            with pytest.raises(self.refusal), self.llm.update_weights(1, partial=partial):
                raise AssertionError
            return
        version, was_valid = self.version + 1, self.weights is not None
        fails = fault is not None or (partial and len(some) > 0 and not staged)  # blocks change numbers that have to be there
        try:
            with self.llm.update_weights(version, mode=mode, partial=partial, staged=staged) as update:
                assert self.llm.state is Phase.UPDATING
                if fault is None:
                    update.load(source)
                elif fault == "block":
                    raise ZeroDivisionError
                else:
                    wrong = NamedTensors(spoiled(fault, self.go, some[:2] if fault == "missing" else some))
                    update.load(wrong, deadline=0.02 if fault == "hangs" else None)
        except (WeightUpdateError, ZeroDivisionError):
            assert fails
        else:
            assert not fails
            self.version, self.weights = version, which
        if fails and not (staged and was_valid):
            self.weights = None
        stopped = not fails or fault == "missing" or not (staged and was_valid)
        if mode == "abort" and stopped:
            self._end_streams("abort")
        if was_valid and self.weights is None and not self.asleep:
            self._end_streams("lost")

    @invariant()
    def state_is_as_documented(self) -> None:
        assert (self.llm.state, self.llm.weight_version) == (self.state, self.version)

    def teardown(self) -> None:
        self.go.set()
        self._repair()
        for stream, reasons in self.ended:
            try:
                reason = str(stream.final().outputs[0].finish_reason)
            except WeightsNotLoadedError:
                reason = "lost"
            assert reason in (*reasons, "length"), (reason, reasons)
            stream.__exit__(None, None, None)
        for stream in self.streams:  # none was lost: each still makes tokens, or has made all
            next(stream, None)
            stream.__exit__(None, None, None)
        self.generate(None)
        engine_of(self.llm).call(assert_idle).result(60)


def region(changed: bool, name: str, tensor: Tensor) -> Tensor:
    if name in REGION:
        tensor = 0.2 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name)))
        tensor[8:16, :8] += changed
    return tensor + 0.5 if changed and name == "norm.weight" else tensor


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Path]:
    """Checkpoints: bit 0 of their number says which weights they have, bit 1 which region."""
    folder = tmp_path_factory.mktemp("models")
    return [write_model(folder / str(i), SHARED, seed=i & 1, change=partial(region, i > 1)) for i in range(4)]


@pytest.mark.parametrize(
    ("layout", "examples"), [({}, 20), ({"tensor_parallel_size": 2, "executor": "thread"}, 2)], ids=["one rank", "two ranks"]
)
def test_random_interleavings_keep_to_the_model(folders: Sequence[Path], layout: dict[str, Any], examples: int) -> None:
    """50 calls in each example: 1,000 with one rank, 100 with two."""
    settings_: dict[str, Any] = {**MODEST, **layout, "deterministic": True}
    expected = []
    for folder in folders:
        with LLM(str(folder), **settings_) as llm:
            outputs = {len(prompt): llm.generate(prompt, SHORT).outputs[0] for prompt in (PROMPT, LONG)}
            expected.append({n: (one.token_ids, one.logprobs.values) for n, one in outputs.items() if one.logprobs is not None})
    values = [torch.cat([values for _, values in found.values()]) for found in expected]
    assert not any(a.equal(b) for a, b in combinations(values, 2))
    tensors = [read(folder) for folder in folders]
    with LLM(str(folders[0]), **settings_) as llm:
        machine = type("Machine", (Model,), {"llm": llm, "folders": folders, "tensors": tensors, "expected": expected})
        run_state_machine_as_test(
            machine,
            settings=settings(max_examples=examples, stateful_step_count=50, deadline=None, derandomize=True, database=None),
        )
