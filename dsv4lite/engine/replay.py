"""Runs a saved step again, op by op, each beside its reference on the same inputs, and names the first that is wrong.

An op is a function of ``kernels/`` that the model's text or ``linear`` calls. For the length of a replay these names stand for a
function that runs the op twice, first with every kernel refused (what remains is its reference), then as it is dispatched, and the
step goes on with the latter. Threads other than the replay's get the op itself.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from dsv4lite.config import EngineConfig
from dsv4lite.engine.cache import StateCache, StateSizes
from dsv4lite.engine.compare import BOUND, BOUNDS, Difference, compare, flatten, outputs, written_rows
from dsv4lite.engine.dump import Places, StepDump, stores, versions
from dsv4lite.engine.plan import empty_last_token, pack
from dsv4lite.errors import ConfigError
from dsv4lite.kernels.experts import Tiles
from dsv4lite.kernels.rows import RowStore
from dsv4lite.models import deepseek_v4
from dsv4lite.models.deepseek_v4 import DeepseekV4
from dsv4lite.weights import quant
from dsv4lite.weights.source import ModelSource

_KERNELS = "dsv4lite.kernels."
_E8M0_NAN = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class OpReport:
    """One call of an op.

    Attributes:
        place: The module that called it: ``layers.2.attn``; ``head`` after the last layer.
        op: Its name.
        weights: Parameters among its arguments.
        bad_weights: Those of them that are not finite.
        bad_inputs: Numbers among its other arguments that are not finite.
        differences: By output, changed state included.
        error: What it raised.
    """

    place: str
    op: str
    weights: tuple[str, ...]
    bad_weights: tuple[str, ...]
    bad_inputs: int
    differences: tuple[Difference, ...]
    error: str | None = None

    @property
    def layer(self) -> int | None:
        """Number of the layer, if it is in one."""
        parts = self.place.split(".")
        return int(parts[1]) if parts[0] == "layers" else None

    @property
    def problem(self) -> str | None:
        """What is wrong with it."""
        if self.error is not None:
            return f"raised {self.error}"
        for d in self.differences:
            if d.not_finite:
                reference = "so are" if d.reference_not_finite else "but none"
                return f"output {d.output}: {d.not_finite} of {d.count} numbers are not finite, {reference} the reference's"
        bound = BOUNDS.get(self.op, BOUND)
        for d in self.differences:
            if d.relative > bound:
                return f"output {d.output} is {d.relative:.2g} from the reference, more than {bound:.2g}"
        return None

    def __str__(self) -> str:
        inputs = "".join(f"; not finite among its inputs: {name}" for name in self.bad_weights)
        if self.bad_inputs:
            inputs += f"; {self.bad_inputs} numbers of its other inputs are not finite"
        return f"{self.place}: {self.op}({', '.join(self.weights)}) {self.problem or 'agrees'}{inputs}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """A step's ops, in the order in which they ran.

    Attributes:
        reason: Why the step was saved.
        notes: What is not as it was when the step was saved.
    """

    reason: str
    notes: tuple[str, ...]
    ops: tuple[OpReport, ...]

    @property
    def first(self) -> OpReport | None:
        """The first op that is wrong."""
        return next((op for op in self.ops if op.problem is not None), None)

    def __str__(self) -> str:
        lines = [f"{'place':<24} {'op':<22} {'output':<10} {'relative':>9} {'absolute':>9} {'not finite':>11} {'reference':>10}"]
        for op in self.ops:
            mark = "" if op.problem is None else "  <--"
            if op.error is not None:
                lines.append(f"{op.place:<24} {op.op:<22} {op.error}{mark}")
            lines += [
                f"{op.place:<24} {op.op:<22} {d.output:<10} {d.relative:>9.2g} {d.absolute:>9.2g} {d.not_finite:>11}"
                f" {d.reference_not_finite:>10}{mark}"
                for d in op.differences
            ]
        lines += ["", f"saved because: {self.reason}", *(f"note: {note}" for note in self.notes)]
        first = self.first
        return "\n".join([*lines, "no op is wrong" if first is None else f"first op that is wrong: {first}"])


def replay(path: str | Path, *, model: str | None = None, device: str | None = None) -> ReplayReport:
    """Run a saved step again.

    Args:
        path: The file.
        model: Folder or hub id of the checkpoint; default is the one that the step ran on.
        device: Where; default is where the step ran if that is here, else the CPU, in the same arithmetic.

    Raises:
        ConfigError: The file is no saved step, or of another model, or there is no such device.
        CheckpointError: The model cannot be loaded.
    """
    dump = StepDump.load(path)
    where = _device(dump.numerics.device, device)
    settings = dict(dump.settings) | ({} if model is None else {"model": model})
    source = ModelSource.open(EngineConfig.from_dict(settings))
    built = source.build(replace(dump.numerics, device=where), with_mtp=False, seed=settings["seed"])
    places = Places.of(dump.plan)
    cache = _state(dump, places, built)
    watch = _Watch(built, cache)
    with torch.inference_mode(), watch.watching():
        batch = pack(places.renumber(dump.plan), built, empty_last_token(cache))
        with suppress(_OpFailed):  # the report's last line says which, and how
            built.logits(built(batch, cache.layers))
    return ReplayReport(reason=dump.reason, notes=_notes(dump, where), ops=tuple(watch.reports))


def _device(saved: torch.device, wanted: str | None) -> torch.device:
    try:
        device = saved if wanted in (None, "auto") else torch.device(str(wanted))
    except RuntimeError as error:
        raise ConfigError(f"device={wanted!r} must be 'cpu', 'cuda' or 'cuda:N'") from error
    if device.type == "cpu" or (device.type == "cuda" and (device.index or 0) < torch.cuda.device_count()):
        return device
    if wanted is None:
        return torch.device("cpu")
    raise ConfigError(f"device={wanted!r} is not here; leave it out, or take 'cpu'")


def _notes(dump: StepDump, device: torch.device) -> tuple[str, ...]:
    here = versions(device)
    notes = [f"{name} was {was}, is {here.get(name, 'none')}" for name, was in dump.versions.items() if here.get(name) != was]
    if not dump.rows:
        notes.insert(0, "the device was lost before its state could be saved: all rows are zero here")
    return tuple(notes)


def _state(dump: StepDump, places: Places, model: DeepseekV4) -> StateCache:
    """Return a state that holds the rows of a dump, and nothing else."""
    sizes = StateSizes(grow_pages=len(places.pages), window_pages=max(1, len(places.windows)), slots=len(places.slots), snapshots=0)
    cache = StateCache.allocate(model.layout, sizes, model.numerics.device)
    if not dump.rows:
        return cache
    homes = {name: store.memory[: len(ids)] for name, store, ids in stores(cache.layers, places)}
    homes |= _carries(cache)
    wrong = sorted(
        name
        for name in homes.keys() | dump.rows.keys()
        if name not in homes or name not in dump.rows or homes[name].shape != dump.rows[name].shape
    )
    if wrong:
        raise ConfigError(
            f"the saved state does not fit this model ({', '.join(wrong[:3])}, …); name the one that it ran on with --model"
        )
    for name, home in homes.items():
        home.copy_(dump.rows[name])
    return cache


def _carries(cache: StateCache) -> dict[str, Tensor]:
    named = {
        f"layers.{i}.{name}": carry
        for i, layer in enumerate(cache.layers)
        for name, carry in (("carry", layer.carry), ("key_carry", layer.key_carry))
    }
    return {name: carry for name, carry in named.items() if carry is not None}


class _OpFailed(Exception):
    """An op raised; nothing can run after it."""


class _Watch:
    """Runs the ops of one model's forward pass twice, in the thread that made it."""

    def __init__(self, model: DeepseekV4, cache: StateCache) -> None:
        self.reports: list[OpReport] = []
        self._model = model
        self._thread = threading.get_ident()
        self._refuses_kernels = False
        self._place: list[str] = []
        self._names = {_storage(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        self._carries = {_storage(carry) for carry in _carries(cache).values()}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Put this object between model and ops."""
        undo: list[Callable[[], None]] = []

        def swap(module: ModuleType, name: str, value: object) -> None:
            undo.append(partial(setattr, module, name, getattr(module, name)))
            setattr(module, name, value)

        try:
            for text in (deepseek_v4, quant):
                for name, op in list(vars(text).items()):
                    if isinstance(op, FunctionType) and op.__module__.startswith(_KERNELS):
                        swap(text, name, self._twice(op))
            for name, module in list(sys.modules.items()):
                if name.startswith(_KERNELS) and "use_triton" in vars(module) and not name.endswith(".dispatch"):
                    swap(module, "use_triton", self._choice(vars(module)["use_triton"]))
            for name, part in self._model.named_modules():
                if name:
                    undo += [handle.remove for handle in self._hooks(name, part)]
            yield
        finally:
            for step in reversed(undo):
                step()

    def _hooks(self, name: str, part: nn.Module) -> Sequence[Any]:
        return (
            part.register_forward_pre_hook(lambda *_: self._place.append(name)),
            part.register_forward_hook(lambda *_: _drop(self._place), always_call=True),
        )

    def _choice(self, use_triton: Callable[[Tensor], bool]) -> Callable[[Tensor], bool]:
        def choose(x: Tensor) -> bool:
            refused = self._refuses_kernels and threading.get_ident() == self._thread
            return not refused and use_triton(x)

        return choose

    def _twice(self, op: FunctionType) -> Callable[..., Any]:
        @wraps(op)
        def run(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return op(*args, **kwargs)
            return self._run(op, args, kwargs)

        return run

    def _run(self, op: FunctionType, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        arguments = (*args, *kwargs.values())
        copies = {i: self._copy(value) for i, value in enumerate(args) if self._changes(value)}
        before = {i: copy.memory.clone() for i, copy in copies.items() if isinstance(copy, RowStore)}
        names, bad_weights, bad_inputs = self._inspect(arguments)
        differences: list[Difference] = []
        result, error = None, None
        try:
            wanted = self._reference(op, [copies.get(i, value) for i, value in enumerate(args)], kwargs)
            result = op(*args, **kwargs)
            got, reference = outputs(op.__name__, result, arguments), outputs(op.__name__, wanted, arguments)
            for i, copy in copies.items():
                if isinstance(copy, RowStore):
                    got[f"rows {i}"], reference[f"rows {i}"] = written_rows(before[i], args[i], copy)
                else:
                    got[f"state {i}"], reference[f"state {i}"] = args[i], copy
            if op.__name__ == "route":  # weights can only be compared where the choice is the same
                same = (got["0"] == reference["0"]).all(-1)
                got["1"], reference["1"] = got["1"][same], reference["1"][same]
            differences = [compare(op.__name__, name, tensor, reference[name]) for name, tensor in got.items()]
        except Exception as caught:
            error = caught
        self.reports.append(
            OpReport(
                place=self._place[-1] if self._place else "head",
                op=op.__name__,
                weights=names,
                bad_weights=bad_weights,
                bad_inputs=bad_inputs,
                differences=tuple(differences),
                error=None if error is None else f"{type(error).__name__}: {error}",
            )
        )
        if error is not None:
            raise _OpFailed from error
        return result

    def _reference(self, op: FunctionType, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self._refuses_kernels = True
        try:
            return op(*args, **kwargs)
        finally:
            self._refuses_kernels = False

    def _changes(self, value: object) -> bool:
        """Whether an op that gets this may write to it: state."""
        return isinstance(value, RowStore) or (isinstance(value, Tensor) and _storage(value) in self._carries)

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.clone()
        copy = RowStore(value.format, len(value.memory), value.rows_per_page, value.memory.device)
        copy.memory.copy_(value.memory)
        return copy

    def _inspect(self, arguments: tuple[Any, ...]) -> tuple[tuple[str, ...], tuple[str, ...], int]:
        """Return the names of parameters, those that are not finite, and how many other numbers are not."""
        names, bad, others = [], [], 0
        parts = [(value.codes, value.scales) if isinstance(value, Tiles) else value for value in arguments]
        for tensor in flatten(parts):
            name = self._names.get(_storage(tensor))
            if name is not None:
                names.append(name)
                if _not_finite(tensor, scale=name.endswith(".scale")):
                    bad.append(name)
            elif _storage(tensor) not in self._carries:
                others += _not_finite(tensor)
        return tuple(names), tuple(bad), others


def _drop(stack: list[str]) -> None:
    stack.pop()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _not_finite(tensor: Tensor, *, scale: bool = False) -> int:
    if scale and tensor.dtype == torch.uint8:
        return int((tensor == _E8M0_NAN).sum())
    return int((~tensor.float().isfinite()).sum()) if tensor.is_floating_point() else 0
