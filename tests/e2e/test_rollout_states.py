"""Random interleavings of everything that changes weights, memory and requests, against a model of the states.

python -m tests.e2e.test_rollout_states --count 1000            # more of them, with other random numbers each time
python -m tests.e2e.test_rollout_states --count 100 --ranks 2
"""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import hypothesis
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from torch import Tensor

from dsv4lite.api.blocking import Stream
from dsv4lite.config import MTP
from dsv4lite.engine import resident
from dsv4lite.errors import CapacityError, EngineStateError, WeightsNotLoadedError, WeightUpdateError
from dsv4lite.llm import LLM
from dsv4lite.request import Phase, SamplingParams, WeightSource
from dsv4lite.state import store
from dsv4lite.weights.delta import DeltaSource
from dsv4lite.weights.host_memory import HostMemory
from dsv4lite.weights.update import DiskSource, NamedTensors
from tests.e2e.engines import MODEST, assert_idle, engine_of, raising, write_model
from tests.e2e.test_sleep import failing
from tests.e2e.updates import LONG, PROMPT, read
from tests.parallel.requests import SHARED

pytestmark = pytest.mark.usefixtures("forked_ranks")

SHORT = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, logprobs=1)
OPEN_TOKENS = 50  # few enough to wait for
OPEN = SamplingParams(max_tokens=OPEN_TOKENS, temperature=0, ignore_eos=True, detokenize=False)
Fault = Literal["missing", "unexpected", "shape", "raises", "hangs", "block"]
PAUSES = st.sampled_from(["keep", "wait", "abort"])
MODES = st.sampled_from(["keep", "recompute", "wait", "abort"])
RARELY = st.sampled_from([False, False, True])
EVERY_FAULT: tuple[Fault, ...] = ("missing", "unexpected", "shape", "raises", "hangs", "block")
ACTIONS = (
    *("stream", "stream", "stream", "update", "update", "update", "delta", "delta", "generate", "generate", "abort"),
    *("reset_prefix_cache", "pause", "pause", "resume", "resume", "sleep", "wake_up", "wake_up", "revive", "revive"),
)
NORM = SHARED["hidden_size"]
# Where two of the four checkpoints differ from the others: a block of tensors that are else the same in all, and a whole tensor.
REGION = ("layers.0.attn.wq_a.weight", "layers.1.attn.wq_b.weight", "layers.2.ffn.experts.3.w2.weight", "head.weight")
Draw = Any


def spoiled(fault: Fault, go: threading.Event, first: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    yield from first
    if fault == "unexpected":
        yield "layers.0.nothing.weight", torch.zeros(1)
    if fault == "shape":
        yield "norm.weight", torch.zeros(1)
    if fault == "raises":
        raise OSError("no bucket came")
    if fault == "hangs":
        go.wait(60)


@contextmanager
def too_little_memory() -> Iterator[None]:
    """Leave rank 0 no memory for host copies, and for two more tensors of the device; other ranks have enough."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostMemory, "take", raising(CapacityError("no memory")))
        for module in (resident, store):
            failing(patch, module, "fill_storage", after=2)
        yield


class Model(RuleBasedStateMachine):
    """The engine is one for all examples; each begins with a ready engine that has the first weights.

    Attributes:
        weights: Which of the four checkpoints the engine has; ``None`` if none.
        asleep: What sleeps.
        streams: Open requests that the engine has.
        queued: Open requests that wait for the end of a pause.
        ended: Requests that are not open, with the version at their end and the reasons for it besides their length.
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
        self.queued: list[Stream] = []
        self.ended: list[tuple[Stream, int, tuple[str, ...]]] = []
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
        self.ended += [(stream, self.version, reasons) for stream in self.streams + self.queued]
        self.streams, self.queued = [], []

    def _stop(self, mode: str) -> None:
        """Stop the engine; what is open ends as the mode says. Without weights or memory nothing runs that could be waited for."""
        if mode == "abort":
            self._end_streams("abort")
        if mode == "wait" and self.serves:
            self.ended += [(stream, self.version, ()) for stream in self.streams]
            self.streams = []

    @rule(action=st.sampled_from(ACTIONS), data=st.data())
    def act(self, action: str, data: st.DataObject) -> None:
        """One rule for all: with a rule for each, hypothesis leaves some of them out of an example."""
        getattr(self, action)(data.draw)
        if self.state is Phase.READY:
            self.streams, self.queued = self.streams + self.queued, []

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
        if not self.serves or len(self.streams + self.queued) > 3:
            return
        stream = self.llm.stream(LONG, OPEN)
        stream.__enter__()
        if not self.paused:
            next(stream)
        (self.queued if self.paused else self.streams).append(stream)

    def abort(self, draw: Draw) -> None:
        if draw(st.booleans()) or not self.streams + self.queued:
            self.llm.abort()
            self._end_streams("abort")
        else:
            stream = (self.streams or self.queued).pop()
            self.llm.abort(stream.request_id)
            self.ended.append((stream, self.version, ("abort",)))

    def reset_prefix_cache(self, draw: Draw) -> None:
        self.llm.reset_prefix_cache()

    # ---- states ----

    def pause(self, draw: Draw) -> None:
        mode: Any = draw(PAUSES)
        self.llm.pause(mode)
        self._stop(mode)
        self.paused = True

    def resume(self, draw: Draw) -> None:
        self.llm.resume()
        self.paused = False

    def sleep(self, draw: Draw) -> None:
        level, mode, little = draw(st.sampled_from([1, 2])), draw(PAUSES), draw(RARELY)
        has_effect = len(self.asleep) < 2 or (level == 2 and self.weights is not None)
        fails = little and level == 1 and "weights" not in self.asleep
        with too_little_memory() if little else nullcontext(), pytest.raises(CapacityError) if fails else nullcontext():
            self.llm.sleep(level, mode=mode)
        if has_effect:
            self._stop(mode)
        if not fails:
            self.asleep = {"weights", "kv_cache"}
            self.weights = None if level == 2 else self.weights

    def wake_up(self, draw: Draw) -> None:
        tags: Any = draw(st.sampled_from([None, None, ("weights",), ("kv_cache",)]))
        woken, little = self.asleep.intersection(tags or ("weights", "kv_cache")), draw(RARELY)
        fails = little and len(woken) > 0
        with too_little_memory() if little else nullcontext(), pytest.raises(CapacityError) if fails else nullcontext():
            self.llm.wake_up(tags)
        self.asleep -= set() if fails else woken

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
        if not fails or fault == "missing" or not (staged and was_valid):
            self._stop(mode)
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
        if was_valid and self.weights is None and not self.asleep:
            self._end_streams("lost")

    @invariant()
    def state_is_as_documented(self) -> None:
        assert (self.llm.state, self.llm.weight_version) == (self.state, self.version)

    def teardown(self) -> None:
        self.go.set()
        self._repair()
        for stream, last, reasons in self.ended:
            try:
                (one,) = stream.final().outputs
                reason = str(one.finish_reason)
                assert (reason == "length") == (len(one.token_ids) == OPEN_TOKENS)
                assert all(version <= last for version, _, _ in one.weight_versions)
            except WeightsNotLoadedError:
                reason = "lost"
            assert reason in (*reasons, "length"), (reason, reasons)
            stream.__exit__(None, None, None)
        for stream in self.streams + self.queued:  # none was lost: each still makes tokens, or has made all
            next(stream, None)
            stream.__exit__(None, None, None)
        self.generate(None)
        engine_of(self.llm).call(assert_idle).result(60)


def region(changed: bool, name: str, tensor: Tensor) -> Tensor:
    if name in REGION:
        tensor = 0.2 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name)))
        tensor[8:16, :8] += changed
    return tensor + 0.5 if changed and name == "norm.weight" else tensor


def write_models(folder: Path) -> Sequence[Path]:
    """Write four checkpoints: bit 0 of their number says which weights they have, bit 1 which region."""
    return [write_model(folder / str(i), SHARED, seed=i & 1, change=partial(region, i > 1)) for i in range(4)]


def interleave(folders: Sequence[Path], ranks: int, examples: int, seed: int | None = None) -> None:
    """Run examples of 50 calls: those of a seed, or without one the same each time."""
    layout = {"tensor_parallel_size": 2, "executor": "thread"} if ranks == 2 else {}
    engine: dict[str, Any] = {**MODEST, **layout, "deterministic": True}
    expected = []
    for folder in folders:
        with LLM(str(folder), **engine) as llm:
            outputs = {len(prompt): llm.generate(prompt, SHORT).outputs[0] for prompt in (PROMPT, LONG)}
            expected.append({n: (one.token_ids, one.logprobs.values) for n, one in outputs.items() if one.logprobs is not None})
    values = [torch.cat([values for _, values in found.values()]) for found in expected]
    assert not any(a.equal(b) for a, b in combinations(values, 2))
    tensors = [read(folder) for folder in folders]
    with LLM(str(folders[0]), **engine) as llm:
        machine = type("Machine", (Model,), {"llm": llm, "folders": folders, "tensors": tensors, "expected": expected})
        run_state_machine_as_test(
            machine if seed is None else hypothesis.seed(seed)(machine),
            settings=settings(
                max_examples=examples, stateful_step_count=50, deadline=None, derandomize=seed is None, database=None
            ),
        )


@pytest.mark.parametrize(("ranks", "examples"), [(1, 20), (2, 2)], ids=["one rank", "two ranks"])
def test_random_interleavings_keep_to_the_model(tmp_path: Path, ranks: int, examples: int) -> None:
    interleave(write_models(tmp_path), ranks, examples)


@pytest.mark.parametrize("speculative", [None, MTP(2, adaptive=False)], ids=["plain", "mtp"])
def test_tokens_sent_again_with_the_seed_continue_as_if_undisturbed(tmp_path: Path, speculative: MTP | None) -> None:
    """A trainer's partial rollout: an aborted request comes again, with its first tokens as a part of the prompt."""
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=7, ignore_eos=True, logprobs=0, logprobs_mode="processed")
    with LLM(str(write_model(tmp_path, SHARED)), **MODEST, deterministic=True, speculative=speculative) as llm:
        (whole,) = llm.generate(LONG, params).outputs
        assert whole.logprobs is not None and len(set(whole.token_ids)) > 10
        for done in (1, 17, 39):
            again, left = [*LONG, *whole.token_ids[:done]], params.replace(max_tokens=40 - done)
            (rest,) = llm.generate(again, left).outputs
            assert rest.token_ids == whole.token_ids[done:] and rest.logprobs is not None
            assert rest.logprobs.sampled.equal(whole.logprobs.sampled[done:])
            (other,) = llm.generate(again, left.replace(seed=8)).outputs
            assert done == 39 or other.token_ids != rest.token_ids


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=1)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    args = parser.parse_args()
    print(args, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        interleave(write_models(Path(folder)), args.ranks, args.count, args.seed)


if __name__ == "__main__":
    main()
