"""From a checkpoint's tensors to the places of a model.

First the headers are compared with the model: whatever is missing, unexpected or of another shape or dtype is found before a byte
of data is read, and all of it is raised at once. Then the tensors are streamed, each weight is joined with its scale, and both go
to their slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lite.config import Progress
from dsv4lite.errors import CheckpointError
from dsv4lite.parallel.shard import Shards, blocks_of
from dsv4lite.weights.checkpoint import Checkpoint, TensorInfo, Wanted, read_tensors
from dsv4lite.weights.quant import Slot
from dsv4lite.weights.tensors import FORMATS, MatrixFormat

MATRIX_FORMATS: Mapping[str, MatrixFormat] = {"F8_E4M3": FORMATS["fp8"], "I8": FORMATS["fp4"], "U8": FORMATS["fp4"]}
_FLOATS = ("BF16", "F16", "F32")
_INTEGERS = ("I64", "I32")
_INTEGER_TENSORS = ("tid2eid",)


class Assignment(NamedTuple):
    """What goes into one slot: a tensor, its scale if it has one, and which part of each."""

    slot: Slot
    weight: Wanted
    scale: Wanted | None = None


def load(
    checkpoint: Checkpoint,
    slots: Mapping[str, Slot],
    *,
    progress: Progress | None = None,
    shards: Shards | None = None,
    whole: bool = True,
) -> None:
    """Fill every slot from a checkpoint.

    Args:
        slots: Official tensor name to its place. A scale has no slot of its own: it comes with its weight.
        shards: Which part of each tensor this rank holds; default is all.
        whole: The slots are those of a whole model: tensors without one are errors.

    Raises:
        CheckpointError: The checkpoint does not fit the model (lists all problems; nothing was stored), or cannot be read.
        ConfigError: A tensor cannot be cut as ``shards`` says.
    """
    headers = checkpoint.headers
    if not whole:
        headers = {name: headers[name] for slot in slots for name in (slot, scale_name(slot)) if name in headers}
    assignments = match(headers, slots, shards)
    wanted = [part for a in assignments.values() for part in (a.weight, a.scale) if part is not None]
    stream = ((info.name, tensor) for info, tensor in read_tensors(wanted, progress=progress))
    for name, weight, scale in paired(stream, {name for name, a in assignments.items() if a.scale is not None}):
        assignments[name].slot.store(weight, scale)


def match(headers: Mapping[str, TensorInfo], slots: Mapping[str, Slot], shards: Shards | None = None) -> dict[str, Assignment]:
    """Find for every slot what goes into it, without reading data.

    Tensors under ``mtp.`` that the model has no slot for are passed over, and so is what other ranks hold.

    Raises:
        CheckpointError: Lists everything that is missing, unexpected, or of the wrong shape or dtype.
        ConfigError: A tensor cannot be cut as ``shards`` says.
    """
    problems: list[str] = []
    assignments: dict[str, Assignment] = {}
    for name, slot in slots.items():
        info = headers.get(name)
        if info is None:
            problems.append(f"{name}: missing")
            continue
        assignment = _assign(slot, info, headers.get(scale_name(name)) if slot.kind == "matrix" else None, shards, problems)
        if assignment is not None:
            assignments[name] = assignment
    problems += [f"{name}: unexpected; the model has no such tensor" for name in _unexpected(headers, slots, shards)]
    if problems:
        raise CheckpointError(f"the checkpoint does not fit the model; {len(problems)} problems:", problems=problems)
    return assignments


def paired(tensors: Iterable[tuple[str, Tensor]], with_scale: set[str]) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Join weights with their scales, whichever comes first.

    What has to wait for its partner is copied. The usual writer of the file format puts scales before weights, so only scales wait.

    Args:
        tensors: Official name and tensor; the tensor's memory may be reused when the next one is asked for.
        with_scale: Names of the weights that have a scale.

    Yields:
        Name of the weight, weight, scale.

    Raises:
        CheckpointError: The stream ended and some partners did not come.
    """
    waiting: dict[str, Tensor] = {}
    for name, tensor in tensors:
        weight_name = name.removesuffix(".scale") + ".weight" if name.endswith(".scale") else name
        if weight_name not in with_scale:
            yield name, tensor, None
            continue
        partner = waiting.pop(weight_name, None)
        if partner is None:
            waiting[weight_name] = tensor.clone()
        elif name == weight_name:
            yield weight_name, tensor, partner
        else:
            yield weight_name, partner, tensor
    if waiting:
        raise CheckpointError("weights or scales came without their partner:", problems=sorted(waiting))


def cut_pair(name: str, weight: Tensor, scale: Tensor | None, shards: Shards) -> tuple[Tensor, Tensor | None]:
    """Return a rank's part of a weight and of its scale, if it has one.

    Raises:
        ConfigError: They cannot be cut as ``shards`` says.
    """
    if scale is None:
        return weight[shards.cut(name, weight.shape)].contiguous(), None
    form = FORMATS["fp4" if weight.dtype in (torch.int8, torch.uint8) else "fp8"]
    cut = shards.cut(name, (weight.shape[0], weight.shape[1] * form.pack), form.block)
    return weight[blocks_of(cut, (1, form.pack))].contiguous(), scale[blocks_of(cut, form.block)].contiguous()


def scale_name(name: str) -> str:
    """Return the name of the scale of ``X.weight``: ``X.scale``."""
    return name.removesuffix(".weight") + ".scale"


def _assign(
    slot: Slot, info: TensorInfo, scale: TensorInfo | None, shards: Shards | None, problems: list[str]
) -> Assignment | None:
    """Check a tensor against its slot; append to ``problems`` and return None if it does not fit."""
    name, before = info.name, len(problems)
    form = MATRIX_FORMATS.get(info.dtype) if slot.kind == "matrix" else None
    allowed = _INTEGERS if name.endswith(_INTEGER_TENSORS) else _FLOATS
    if form is None and info.dtype not in allowed:
        known = (*MATRIX_FORMATS, *allowed) if slot.kind == "matrix" else allowed
        problems.append(f"{name}: dtype {info.dtype}, expected {' or '.join(known)}")
        return None
    shape = info.shape if form is None else (*info.shape[:-1], *(n * form.pack for n in info.shape[-1:]))
    if len(shape) != len(slot.shape):
        problems.append(f"{name}: shape {list(shape)}, expected {list(slot.shape)}")
        return None
    cut = None if shards is None else shards.cut(name, shape, form.block if form else ())
    held = shape if cut is None else tuple(part.stop - part.start for part in cut)
    if held != slot.shape:
        part = "" if held == shape else f", of which this rank holds {list(held)}"
        problems.append(f"{name}: shape {list(shape)}{part}, expected {list(slot.shape)}")
        return None
    if form is None:
        if scale is not None:
            problems.append(f"{scale.name}: a scale, but {name} is {info.dtype}, which has none")
            return None
        return Assignment(slot, Wanted(info, cut or ()))
    if scale is None:
        problems.append(f"{scale_name(name)}: missing; {name} is {info.dtype} and needs a scale")
        return None
    if scale.dtype not in form.scales:
        problems.append(f"{scale.name}: dtype {scale.dtype}, expected {' or '.join(form.scales)}")
    expected = form.blocks(*shape)
    if scale.shape != expected:
        problems.append(f"{scale.name}: shape {list(scale.shape)}, expected {list(expected)}: one per {form.block}")
    if len(problems) > before:
        return None
    parts = (blocks_of(cut, (1, form.pack)), blocks_of(cut, form.block)) if cut else ((), ())
    return Assignment(slot, Wanted(info, parts[0]), Wanted(scale, parts[1]))


def _unexpected(headers: Mapping[str, TensorInfo], slots: Mapping[str, Slot], shards: Shards | None) -> list[str]:
    """Return the tensors that have no place in the model and are not left out on purpose."""
    found = []
    for name in headers:
        owner = name.removesuffix(".scale") + ".weight" if name.endswith(".scale") else name
        if owner in slots and (owner == name or (owner in headers and slots[owner].kind == "matrix")):
            continue
        if name.startswith("mtp.") or (shards is not None and shards.elsewhere(owner)):
            continue
        found.append(name)
    return found
