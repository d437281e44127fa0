"""Runs the ops of one forward pass beside their references.

An op is a function of ``kernels/`` that a model's modules or ``linear`` call. While a pass is watched, these names refer to
wrappers. A wrapper runs the op; if the op launched a kernel, it also runs the reference, without kernels, on copies of the state.
The pass continues with the op's result. Threads other than the watcher's call the op itself.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from dsv4lite.debug.compare import BOUND, BOUNDS, Difference, differences, flatten, outputs, written_rows
from dsv4lite.errors import described
from dsv4lite.kernels.dispatch import Op
from dsv4lite.kernels.rows import RowStore
from dsv4lite.models.family import Model
from dsv4lite.state.store import StateCache

_KERNELS = "dsv4lite.kernels."
_CALLERS = ("dsv4lite.models.", "dsv4lite.weights.quant")
_E8M0_NAN = 0xFF
_E4M3_NAN = 0x7F  # but for the sign


class OpFailed(Exception):
    """An op raised; nothing can run after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpReport:
    """One call of an op.

    Attributes:
        place: The module that called it: ``layers.2.attn``; ``head`` after the last layer.
        op: Its name.
        weights: Parameters among its arguments.
        bad_weights: Those of them that are not finite.
        bad_inputs: Numbers among its other arguments that are not finite.
        differences: By output, changed state included; without a reference where it launched no kernel.
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
    def compared(self) -> bool:
        """Whether it ran beside a reference."""
        return any(d.relative is not None for d in self.differences)

    @property
    def problem(self) -> str | None:
        """What is wrong with it."""
        if self.error is not None:
            return f"raised {self.error}"
        for d in self.differences:
            if d.not_finite:
                other = "" if d.relative is None else f", {d.reference_not_finite} of the reference's"
                return f"output {d.output}: {d.not_finite} of {d.count} numbers are not finite{other}"
        bound = BOUNDS.get(self.op, BOUND)
        for d in self.differences:
            if d.relative is not None and d.relative > bound:
                return f"output {d.output} is {d.relative:.2g} from the reference, more than {bound:.2g}"
        return None

    def __str__(self) -> str:
        inputs = "".join(f"; not finite among its inputs: {name}" for name in self.bad_weights)
        if self.bad_inputs:
            inputs += f"; {self.bad_inputs} numbers of its other inputs are not finite"
        return f"{self.place}: {self.op}({', '.join(self.weights)}) {self.problem or 'agrees'}{inputs}"


class OpWatch:
    """Watches the passes of one model on one state, in the thread that made it; mutable, for one replay.

    Args:
        model, cache: What the pass runs on.
        rows: Tokens of the pass.
        tokens: How many of them, the first ones, are no padding.

    Attributes:
        reports: Of the ops that ran, in order.
        bad_parameters: Names of parameters with numbers that are not finite; FP4 has none, and experts in FP8 tiles are not
            looked at.
    """

    def __init__(self, model: Model, cache: StateCache, *, rows: int, tokens: int) -> None:
        self.reports: list[OpReport] = []
        self._model, self._rows, self._tokens = model, rows, tokens
        self._device = model.numerics.device
        self._thread = threading.get_ident()
        self._may_launch = True
        self._launched = False
        self._place: list[str] = []
        parameters = [*model.named_parameters(), *model.named_buffers()]
        self._names = {_storage(tensor): name for name, tensor in parameters}
        self.bad_parameters = sorted({name for name, tensor in parameters if _is_bad(name, tensor)})
        self._slots = {_storage(slot) for slot in cache.slots().values()}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Wrap the ops that the model calls, until the block ends."""
        with ExitStack() as undo:
            for module in [module for name, module in sys.modules.items() if name.startswith((_KERNELS, *_CALLERS))]:
                inside = module.__name__.startswith(_KERNELS)
                for name, value in list(vars(module).items()):
                    if inside and name == "use_triton":
                        setattr(module, name, self._dispatch(value))
                    elif not inside and isinstance(value, FunctionType | Op) and value.__module__.startswith(_KERNELS):
                        setattr(module, name, self._watched(value))
                    else:
                        continue
                    undo.callback(setattr, module, name, value)
            for name, part in self._model.named_modules():
                for handle in self._hooks(name, part) if name else ():
                    undo.callback(handle.remove)
            yield

    def _hooks(self, name: str, part: nn.Module) -> Sequence[Any]:
        def leave(*_: object) -> None:
            self._place.pop()

        return (
            part.register_forward_pre_hook(lambda *_: self._place.append(name)),
            part.register_forward_hook(leave, always_call=True),
        )

    def _dispatch(self, use_triton: Callable[..., bool]) -> Callable[..., bool]:
        def choose(*arguments: object) -> bool:
            if threading.get_ident() != self._thread:
                return use_triton(*arguments)
            launches = self._may_launch and use_triton(*arguments)
            self._launched |= launches
            return launches

        return choose

    def _watched(self, op: FunctionType | Op[..., Any]) -> Callable[..., Any]:
        @wraps(op)
        def run(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return op(*args, **kwargs)
            return self._run(op, args, kwargs)

        return run

    def _run(self, op: FunctionType | Op[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        given = _fields(args)
        arguments = (*given, *kwargs.values())
        before = {i: _copy(value) for i, value in enumerate(given) if self._is_state(value)}
        names, bad_inputs = self._inspect(arguments)
        found: tuple[Difference, ...] = ()
        result, error = None, None
        try:
            self._launched = False
            self._synchronize()  # the op may overlap with the previous launch, which here copies its state
            result = op(*args, **kwargs)
            self._synchronize()  # errors of this op show here, not in the next one
            got, wanted = self._outputs(op, result, arguments), None
            others = given
            if self._launched or (isinstance(op, Op) and op.launches(*args, **kwargs)):
                others = tuple(_copy(before[i]) if i in before else value for i, value in enumerate(given))
                wanted = self._outputs(op, self._reference(op, _with_fields(args, others), kwargs), arguments)
            for i, old in before.items():
                both = (given[i], others[i])
                mine, reference = written_rows(old.memory, *both) if isinstance(old, RowStore) else both
                if mine.numel():
                    got[f"state {i}"] = mine
                    if wanted is not None:
                        wanted[f"state {i}"] = reference
            found = differences(op.__name__, got, wanted)
        except Exception as caught:
            error = caught
        if error is None and not found:
            return result  # it computed nothing, but only chose another op
        self.reports.append(
            OpReport(
                place=self._place[-1] if self._place else "head",
                op=op.__name__,
                weights=names,
                bad_weights=tuple(name for name in names if name in self.bad_parameters),
                bad_inputs=bad_inputs,
                differences=found,
                error=None if error is None else described(error),
            )
        )
        if error is not None:
            raise OpFailed from error
        return result

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _reference(self, op: FunctionType | Op[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self._may_launch = False
        try:
            return (op.reference if isinstance(op, Op) else op)(*args, **kwargs)
        finally:
            self._may_launch = True

    def _outputs(self, op: FunctionType | Op[..., Any], result: Any, arguments: tuple[Any, ...]) -> dict[str, Tensor]:
        """Return an op's outputs without the rows of padding, which come last."""
        named = outputs(op.__name__, result, arguments)
        return {name: x[: self._tokens] if len(x) == self._rows else x for name, x in named.items()}

    def _is_state(self, value: object) -> bool:
        """Whether an op that gets this may write to it."""
        return isinstance(value, RowStore) or (isinstance(value, Tensor) and _storage(value) in self._slots)

    def _inspect(self, arguments: tuple[Any, ...]) -> tuple[tuple[str, ...], int]:
        """Return the names of parameters, and how many other numbers are not finite."""
        names, bad = [], 0
        for tensor in flatten(arguments):
            if (name := self._names.get(_storage(tensor))) is not None:
                names.append(name)
            elif tensor.is_floating_point() and _storage(tensor) not in self._slots:
                bad += int((~tensor.float().isfinite()).sum())
        return tuple(names), bad


def _fields(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return an op's arguments; the fields, if it takes them as one tuple."""
    return tuple(args[0]) if len(args) == 1 and isinstance(args[0], tuple) else args


def _with_fields(args: tuple[Any, ...], fields: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments like ``args`` with other ``fields``."""
    return (type(args[0])(*fields),) if len(args) == 1 and isinstance(args[0], tuple) else fields


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    copy = RowStore(value.format, len(value.memory), value.rows_per_page, value.memory.device)
    copy.memory.copy_(value.memory)
    return copy


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_bad(name: str, tensor: Tensor) -> bool:
    """Whether a parameter has a number that is not finite."""
    if tensor.dtype == torch.float8_e4m3fn:
        return bool((tensor.view(torch.uint8) & 0x7F == _E4M3_NAN).any())
    if name.endswith(".scale") and tensor.dtype == torch.uint8:
        return bool((tensor == _E8M0_NAN).any())
    return tensor.is_floating_point() and not bool(tensor.isfinite().all())
