"""Loads tensors, of a checkpoint or of an update, into the slots of a model.

First the headers are compared with the slots. Missing and unexpected tensors, wrong shapes and wrong dtypes are found before any
data is read, and one error lists them all. Then the tensors are streamed: each weight is joined with its scale and stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import NamedTuple

from torch import Tensor

from dsv4lite.config import Progress
from dsv4lite.errors import CheckpointError, ConfigError
from dsv4lite.kernels.four_bit import FourBit
from dsv4lite.parallel.shard import Shards, blocks_of
from dsv4lite.weights.checkpoint import Checkpoint, Described, HeldTensor, Wanted, read_tensors
from dsv4lite.weights.formats import Header, PackedCut, PackedTensor, QuantFormat, assemble
from dsv4lite.weights.quant import Slot
from dsv4lite.weights.tensors import FORMATS, MatrixFormat

MATRIX_FORMATS: Mapping[str, MatrixFormat] = {"F8_E4M3": FORMATS["fp8"], "I8": FORMATS["fp4"], "U8": FORMATS["fp4"]}
_FLOATS = ("BF16", "F16", "F32")
_INTEGERS = ("I64", "I32")
_INTEGER_TENSORS = ("tid2eid",)


class OwnFormat(NamedTuple):
    """How a model stores a quantized matrix. An update may bring the matrix in this form, or as floats."""

    form: MatrixFormat
    scale: str


class Assignment(NamedTuple):
    """The source of one slot: a part of a tensor, and of its scale if it has one; or of a packed matrix."""

    slot: Slot
    weight: Wanted | HeldTensor | PackedCut
    scale: Wanted | HeldTensor | None = None


class Fit(NamedTuple):
    """The result of comparing tensors with slots.

    Attributes:
        assignments: Sources by the name of the slot.
        missing, unexpected, mismatched: Problems, as lines that begin with the name of a tensor.
    """

    assignments: dict[str, Assignment]
    missing: list[str]
    unexpected: list[str]
    mismatched: list[str]


def load(
    checkpoint: Checkpoint,
    slots: Mapping[str, Slot],
    *,
    progress: Progress | None = None,
    shards: Shards | None = None,
    whole: bool = True,
    headers: Mapping[str, Header] | None = None,
) -> None:
    """Fill every slot from a checkpoint.

    Args:
        slots: Slots by official name. A scale has no slot of its own: its weight's slot stores it.
        shards: Which part of each tensor this rank holds; default is all.
        whole: The slots are those of a whole model, so tensors without a slot are errors.
        headers: The checkpoint's tensors, with packed matrices assembled; default is its tensors as they are.

    Raises:
        CheckpointError: The checkpoint does not fit the model (lists all problems; nothing was stored), or cannot be read.
        ConfigError: ``shards`` would cut a tensor unequally or through a scale block.
    """
    headers = checkpoint.headers if headers is None else headers
    if not whole:
        headers = {name: headers[name] for slot in slots for name in (slot, scale_name(slot)) if name in headers}
    for _, slot, weight, scale in read_assigned(match(headers, slots, shards), progress=progress):
        slot.store(weight, scale)


def packed_headers(headers: Mapping[str, Described], form: QuantFormat, where: str) -> dict[str, Header]:
    """Return a checkpoint's tensors, with packed matrices assembled.

    Raises:
        CheckpointError: Lists the parts that are missing, or of the wrong shape or dtype.
    """
    found, incomplete, problems = assemble(headers, form)
    for name, leaves in incomplete.items():
        problems += [f"{name[: -len('weight')]}{leaf}: missing; {form.name} needs it" for leaf in leaves]
    if problems:
        raise CheckpointError(f"{where}: packed matrices do not fit quantization_config:", problems=problems)
    return found


def match(headers: Mapping[str, Header], slots: Mapping[str, Slot], shards: Shards | None = None) -> dict[str, Assignment]:
    """Find the source of every slot without reading data; see ``fit``.

    Raises:
        CheckpointError: Lists everything that is missing, unexpected, or of the wrong shape or dtype.
        ConfigError: See ``load``.
    """
    found = fit(headers, slots, shards)
    by_slot = {name: i for i, name in enumerate(slots)}
    lines = sorted(found.missing + found.mismatched, key=lambda line: by_slot[weight_name(line.split(":")[0])])
    problems = lines + found.unexpected
    if problems:
        raise CheckpointError(f"the checkpoint does not fit the model; {len(problems)} problems:", problems=problems)
    return found.assignments


def fit(
    headers: Mapping[str, Header],
    slots: Mapping[str, Slot],
    shards: Shards | None = None,
    formats: Mapping[str, OwnFormat | QuantFormat] | None = None,
) -> Fit:
    """Compare tensors with the slots of a model, without reading data.

    Tensors under ``mtp.`` without a slot are ignored, and so are tensors that other ranks hold.

    Args:
        headers: Tensors by official name.
        slots: The slots to fill.
        shards: Which part of each tensor this rank holds; default is all.
        formats: For an update, how the model stores its quantized matrices: their floats are accepted if the format can quantize.

    Raises:
        ConfigError: See ``load``.
    """
    found = Fit({}, [], [], [])
    for name, slot in slots.items():
        info = headers.get(name)
        if info is None:
            found.missing.append(f"{name}: missing")
            continue
        own = None if formats is None else formats.get(name)
        _assign(slot, info, headers.get(scale_name(name)) if slot.kind == "matrix" else None, shards, own, found)
    found.unexpected.extend(f"{name}: unexpected; the model has no such tensor" for name in _unexpected(headers, slots, shards))
    return found


def read_assigned(
    assignments: Mapping[str, Assignment], *, progress: Progress | None = None
) -> Iterator[tuple[str, Slot, Tensor | FourBit, Tensor | None]]:
    """Read the assigned tensors: yields name, slot, this rank's part of the weight and of its scale, both as stored.

    The parts of a matrix may lie in any order. Those that wait for the last one are copied, for the next tensor may reuse their
    memory; files usually have scales before weights, so only scales wait.

    Raises:
        CheckpointError: A file cannot be read, or the parts of a packed matrix are invalid.
    """
    wanted = {name: _parts(assignment) for name, assignment in assignments.items()}
    every = [(name, leaf, part) for name, parts in wanted.items() for leaf, part in parts.items()]
    owners = {part.name if isinstance(part, HeldTensor) else part.info.name: (name, leaf) for name, leaf, part in every}
    held = ((part.name, part.tensor) for _, _, part in every if isinstance(part, HeldTensor))
    stored = read_tensors([part for _, _, part in every if isinstance(part, Wanted)], progress=progress)
    waiting: dict[str, dict[str, Tensor]] = {}
    for given, tensor in chain(held, ((info.name, tensor) for info, tensor in stored)):
        name, leaf = owners[given]
        slot, weight, _ = assignments[name]
        arrived = waiting.setdefault(name, {})
        last = len(arrived) + 1 == len(wanted[name])
        packed = weight if isinstance(weight, PackedCut) else None
        # A packed matrix is unpacked on the device of its slot: a GPU does this much faster than the host.
        arrived[leaf] = tensor.to(tensor.device if packed is None else slot.tensors[0].device, copy=not last)
        if last:
            del waiting[name]
            if packed is None:
                yield name, slot, arrived["weight"], arrived.get("scale")
            else:
                yield name, slot, packed.read(arrived), None


def _parts(assignment: Assignment) -> Mapping[str, Wanted | HeldTensor]:
    """Return the tensors to read for a slot, by leaf."""
    if isinstance(assignment.weight, PackedCut):
        return assignment.weight.parts
    found = {"weight": assignment.weight}
    if assignment.scale is not None:
        found["scale"] = assignment.scale
    return found


def scale_name(name: str) -> str:
    """Return the name of the scale of ``X.weight``: ``X.scale``."""
    return name.removesuffix(".weight") + ".scale"


def weight_name(name: str) -> str:
    """Return ``X.weight`` for ``X.scale``; other names are returned as they are."""
    return name.removesuffix(".scale") + ".weight" if name.endswith(".scale") else name


def own_formats(headers: Mapping[str, Header]) -> dict[str, OwnFormat | QuantFormat]:
    """Return how a checkpoint stores each of its quantized matrices."""
    packed = {name: info.format for name, info in headers.items() if isinstance(info, PackedTensor)}
    return packed | {
        name: OwnFormat(MATRIX_FORMATS[info.dtype], headers[scale_name(name)].dtype)
        for name, info in headers.items()
        if info.dtype in MATRIX_FORMATS and scale_name(name) in headers
    }


def _assign(
    slot: Slot, info: Header, scale: Header | None, shards: Shards | None, own: OwnFormat | QuantFormat | None, found: Fit
) -> None:
    """Check a tensor against its slot; add the assignment or the problems to ``found``."""
    name, problems, before = info.name, found.mismatched, len(found.mismatched)
    packed = info if isinstance(info, PackedTensor) and slot.kind == "matrix" else None
    if packed is None and isinstance(own, QuantFormat) and own.quantize is None:
        leaves = ", ".join(part.leaf for part in own.parts)
        problems.append(f"{name}: dtype {info.dtype}, but floats cannot be rounded to {own.name}; send {leaves}")
        return
    group = packed.format if packed else own if isinstance(own, QuantFormat) else None
    own = own if isinstance(own, OwnFormat) else None
    form = MATRIX_FORMATS.get(info.dtype) if slot.kind == "matrix" else None
    allowed = _INTEGERS if name.endswith(_INTEGER_TENSORS) else _FLOATS
    if form is None and packed is None and info.dtype not in allowed:
        known = (*MATRIX_FORMATS, *allowed) if slot.kind == "matrix" else allowed
        problems.append(f"{name}: dtype {info.dtype}, expected {' or '.join(known)}")
        return
    if own is not None and form is not None and form is not own.form:
        kept = " or ".join(code for code, known in MATRIX_FORMATS.items() if known is own.form)
        problems.append(f"{name}: dtype {info.dtype}, expected {kept}, or floats, which are quantized")
        return
    shape = info.shape if form is None else (*info.shape[:-1], *(n * form.pack for n in info.shape[-1:]))
    if len(shape) != len(slot.shape):
        problems.append(f"{name}: shape {list(shape)}, expected {list(slot.shape)}")
        return
    block = group.block if group else form.block if form else own.form.block if own else ()
    try:
        cut = None if shards is None else shards.cut(name, shape, block)
    except ConfigError:
        if not any(n % part for n, part in zip(shape, slot.shape, strict=True)):
            raise  # the shape may be the model's, which the layout does not suit
        problems.append(f"{name}: shape {list(shape)}, which has no parts of the expected {list(slot.shape)}")
        return
    held = shape if cut is None else tuple(part.stop - part.start for part in cut)
    if held != slot.shape:
        part = "" if held == shape else f", of which this rank holds {list(held)}"
        problems.append(f"{name}: shape {list(shape)}{part}, expected {list(slot.shape)}")
        return
    if form is None:
        if scale is not None:
            problems.append(f"{scale.name}: a scale, but {name} is {info.dtype}, which has none")
            return
        found.assignments[name] = Assignment(slot, info.cut(cut or ()))
        return
    if scale is None:
        found.missing.append(f"{scale_name(name)}: missing; {name} is {info.dtype} and needs a scale")
        return
    scales = form.scales if own is None else (own.scale,)
    if scale.dtype not in scales:
        problems.append(f"{scale.name}: dtype {scale.dtype}, expected {' or '.join(scales)}")
    expected = form.blocks(*shape)
    if scale.shape != expected:
        problems.append(f"{scale.name}: shape {list(scale.shape)}, expected {list(expected)}: one per {form.block}")
    if len(problems) > before:
        return
    parts = (blocks_of(cut, (1, form.pack)), blocks_of(cut, form.block)) if cut else ((), ())
    assert not isinstance(scale, PackedTensor)
    found.assignments[name] = Assignment(slot, info.cut(parts[0]), scale.cut(parts[1]))


def _unexpected(headers: Mapping[str, Header], slots: Mapping[str, Slot], shards: Shards | None) -> list[str]:
    """Return the tensors that have no slot and that ``fit`` does not ignore."""
    found = []
    for name in headers:
        owner = weight_name(name)
        if owner in slots and (owner == name or (owner in headers and slots[owner].kind == "matrix")):
            continue
        if name.startswith("mtp.") or (shards is not None and shards.elsewhere(owner)):
            continue
        found.append(name)
    return found
