"""New weights for a loaded model: the sources of tensors, and the transaction that replaces one rank's weights.

An update follows the same path as loading: names are translated, each tensor is compared with its slot and cut, and the slot stores
it. In addition, tensors may arrive in any order, floats are quantized to the model's own format, and all tensors can be staged:
converted to their resident bytes, which host memory keeps until every rank has received and checked its part.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsv4lite.checks import file_name, is_integer, plain, require
from dsv4lite.errors import CheckpointError, ConfigError, WeightUpdateError, described, shown
from dsv4lite.kernels.four_bit import FourBit
from dsv4lite.kernels.quantize import quantize_matrix
from dsv4lite.parallel.shard import Cut, Shards
from dsv4lite.weights.checkpoint import Described, HeldTensor, TensorInfo, locate, official, read_headers, read_tensors
from dsv4lite.weights.delta import MARK, Blocks
from dsv4lite.weights.formats import Header, PackedCut, QuantFormat, assemble
from dsv4lite.weights.host_memory import HostMemory
from dsv4lite.weights.loader import MATRIX_FORMATS, OwnFormat, fit, read_assigned, scale_name, weight_name
from dsv4lite.weights.mirror import Mirror
from dsv4lite.weights.names import NameTables
from dsv4lite.weights.quant import Slot
from dsv4lite.weights.shared import SharedTensor, as_pairs, bytes_of, check_item, is_distributed
from dsv4lite.weights.tensors import FORMATS

Given = Tensor | TensorInfo | SharedTensor
"""A tensor, or its location on disk or in another process."""
Bucket = Sequence[tuple[str, Given]]
"""Tensors that the ranks receive together, under the source's names."""

_BUCKET_BYTES = 64 << 20
_MASK = (1 << 64) - 1
_MULTIPLIERS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # of splitmix64, as int64
_CHECKSUM_ELEMENTS = 1 << 24  # hashed at a time


# ---------------------------------------------------------------------------------------------------------------- sources


class NamedTensors:
    """A mapping of names to tensors, or an iterable of pairs; the iterable may reuse a tensor's memory for the next pair.

    Raises:
        InvalidRequestError: ``tensors`` is neither.
    """

    def __init__(self, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        rule = "must map names to tensors, or yield pairs of both; ModuleSource takes a module"
        require(isinstance(tensors, Iterable) and not isinstance(tensors, (str, Tensor)), "tensors", tensors, rule)
        self._tensors = tensors

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the pairs; tensors of an iterable are copied."""
        if isinstance(self._tensors, Mapping):
            yield from self._tensors.items()
            return
        for name, tensor in as_pairs(self._tensors):
            yield name, tensor.detach().clone() if isinstance(tensor, Tensor) else tensor


@runtime_checkable
class _HasSlots(Protocol):
    def slots(self) -> Mapping[str, Slot]: ...


class ModuleSource:
    """The parameters and persistent buffers of a module: a model of transformers, or of this package.

    Distributed tensors (FSDP2, ``DTensor``) are gathered one after the other: all ranks of their mesh must iterate together.

    Raises:
        InvalidRequestError: ``module`` is no ``nn.Module``.
    """

    def __init__(self, module: nn.Module) -> None:
        require(isinstance(module, nn.Module), "module", module, "must be an nn.Module; NamedTensors takes a state_dict")
        self._module = module

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the module's tensors."""
        if isinstance(self._module, _HasSlots):
            for name, slot in self._module.slots().items():
                yield name, gathered(slot.values())
            return
        for name, tensor in self._module.state_dict().items():
            yield name, gathered(tensor)


def gathered(tensor: Any) -> Tensor:
    """Return a tensor; of a ``DTensor`` the whole, which all ranks of its mesh must ask for together."""
    whole: Tensor = tensor.full_tensor() if is_distributed(tensor) else tensor
    return whole


class DiskSource:
    """A checkpoint on disk, or a part of it. Each rank reads its own part of the tensors.

    Args:
        model: Folder, or hub id.
        prefix: Only tensors whose names on disk, without ``model.``, begin so: ``"mtp."`` is V4's drafter, ``"layers.61."`` V3's.

    Raises:
        InvalidRequestError: ``model`` is no name of a folder, or ``prefix`` neither text nor a tuple of texts.
    """

    def __init__(self, model: str | os.PathLike[str], *, prefix: str | tuple[str, ...] = "") -> None:
        problem, prefixes = file_name(model), prefix if isinstance(prefix, tuple) else (prefix,)
        require(not problem, "model", model, f"{problem}: a folder or a hub id")
        good = all(isinstance(text, str) for text in prefixes)
        require(good, "prefix", prefix, "must be a string with which names begin, or a tuple of such strings")
        self._model, self._prefix = os.fspath(model), prefix

    def tensors(self) -> Iterator[tuple[str, TensorInfo]]:
        """Yield the locations of the tensors, in the order in which they lie on disk.

        Raises:
            CheckpointError: The checkpoint cannot be found or read, or has no tensor whose name begins with the prefix.
        """
        found = read_headers(locate(self._model))
        wanted = [item for item in found.items() if item[0].removeprefix("model.").startswith(self._prefix)]
        if not wanted:
            raise CheckpointError(
                f"model={self._model!r} has no tensor whose name begins with prefix={self._prefix!r}; "
                f"it has {', '.join(sorted({name.removeprefix('model.').split('.')[0] + '.' for name in found})[:8])}"
            )
        yield from sorted(wanted, key=lambda item: (item[1].file, item[1].offset))


class ProcessGroupSource:
    """Tensors that one rank of the host's process group sends with ``broadcast_weights``; all other ranks receive together.

    Args:
        source: Global rank of the sender.
        group: The process group; ``None`` for the default group.
        device: Device on which the group's backend works.

    Raises:
        InvalidRequestError: ``source`` is no rank.
    """

    def __init__(self, source: int, *, group: dist.ProcessGroup | None = None, device: str | torch.device = "cpu") -> None:
        require(is_integer(source) and source >= 0, "source", source, "must be the global rank of the sender")
        self._source, self._group, self._device = source, group, torch.device(device)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Receive and yield tensors until the sender has sent all of them.

        If the caller stops early, the rest is received and dropped, so that the next transfer starts in step with the sender.

        Raises:
            WeightUpdateError: The sender has failed.
        """
        received = self._received()
        for pair in received:
            try:
                yield pair
            except GeneratorExit:  # the caller refused a tensor; the sender goes on
                with suppress(WeightUpdateError):
                    for _ in received:
                        pass
                raise

    def _received(self) -> Iterator[tuple[str, Tensor]]:
        while True:
            headers: list[Any] = [None]
            dist.broadcast_object_list(headers, self._source, self._group, device=self._device)
            if isinstance(headers[0], str):
                raise WeightUpdateError(f"rank {self._source} could not send all weights: {headers[0]}")
            if not headers[0]:
                return
            for name, dtype, shape in headers[0]:
                tensor = torch.empty(shape, dtype=dtype, device=self._device)
                dist.broadcast(bytes_of(tensor).flatten(), self._source, self._group)
                yield name, tensor


def broadcast_weights(
    tensors: Iterable[tuple[str, Tensor]], *, group: dist.ProcessGroup | None = None, device: str | torch.device = "cpu"
) -> None:
    """Send tensors to every ``ProcessGroupSource`` of a process group whose ``source`` is the calling rank.

    Raises:
        WeightUpdateError: An item is not a named tensor.
        Exception: Iterating ``tensors`` raised it. In either case the receivers raise ``WeightUpdateError``.
    """
    source, waiting = dist.get_rank(), buckets(tensors)

    def announce(what: list[Any] | str) -> None:
        dist.broadcast_object_list([what], source, group, device=torch.device(device))

    while True:
        try:
            bucket = next(waiting, [])
            if others := [f"{name}: {shown(given)}, expected a tensor" for name, given in bucket if not isinstance(given, Tensor)]:
                raise _refused(mismatched=others)
        except BaseException as error:
            announce(described(error))  # otherwise the receivers would wait forever
            raise
        held = [(name, tensor.to(device).contiguous()) for name, tensor in bucket if isinstance(tensor, Tensor)]
        announce([(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in held])
        if not held:
            return
        for _, tensor in held:
            dist.broadcast(bytes_of(tensor).flatten(), source, group)


def buckets(tensors: Iterable[tuple[str, Given]]) -> Iterator[Bucket]:
    """Collect tensors into buckets of about 64 MiB.

    Raises:
        WeightUpdateError: An item is not a named, dense tensor.
    """
    bucket: list[tuple[str, Given]] = []
    size = 0
    for name, tensor in as_pairs(tensors):
        check_item(name, tensor, Given)
        bucket.append((plain(name), tensor))
        size += tensor.nbytes
        if size >= _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


# --------------------------------------------------------------------------------------------------------------- one rank


class Transaction:
    """An update of one rank's slots: ``take`` every bucket, ``check``, then ``write`` if it is staged.

    Args:
        slots: All slots of the rank's model.
        names: Translates the source's names.
        formats: How the model stores its quantized matrices.
        shards: Which part of each tensor this rank holds.
        device: Device of the slots, on which tensors are converted.
        staging: Memory for resident bytes until ``write``; ``None`` stores tensors in their slots at once.
        packing: The weight-only format of the model's config. Random weights do not tell which matrices are in it.
    """

    def __init__(
        self,
        slots: Mapping[str, Slot],
        names: NameTables,
        formats: Mapping[str, OwnFormat | QuantFormat],
        shards: Shards,
        device: torch.device,
        *,
        staging: HostMemory | None,
        packing: QuantFormat | None = None,
    ) -> None:
        self._slots, self._names, self._formats, self._shards, self._device = slots, names, formats, shards, device
        self._mirror = None if staging is None else Mirror(staging)
        self._quant_format = packing
        self._waiting: dict[str, dict[str, Described]] = {}  # by matrix: a weight or a scale alone, some parts of a packed matrix
        self._incomplete: dict[str, list[str]] = {}  # packed matrices, with the leaves that have not arrived
        self._seen: set[str] = set()
        self._filled: set[str] = set()
        self._parts: dict[str, dict[str, Tensor]] = {}  # parts of deltas that are not complete, by the source's name
        self._blocks: dict[str, Blocks] = {}  # complete deltas, by official name

    def take(self, bucket: Bucket) -> None:
        """Check tensors, and stage or store this rank's part of them. Their memory may be reused after the call.

        Raises:
            WeightUpdateError: They do not fit the model. Without staging, some tensors of the bucket may have been stored.
            CheckpointError: A file cannot be read.
            CapacityError: The host has too little memory to stage them.
        """
        given = [self._opened(name, tensor) for name, tensor in bucket]
        for device in {info.tensor.device for info in given if isinstance(info, HeldTensor) and info.tensor.is_cuda}:
            torch.cuda.synchronize(device)  # another stream may still write them
        try:
            changed = self._block_headers([info for info in given if MARK in info.name])
            arrived = official([*(info for info in given if MARK not in info.name), *changed], self._names, "the update")
            if twice := self._seen.intersection(arrived):
                raise _refused(unexpected=[f"{name}: given twice" for name in sorted(twice)])
            self._seen.update(arrived)
            ready = self._completed(arrived)
            slots = {name: self._slots[name] for name in ready if name in self._slots}
            found = fit(ready, slots, self._shards, self._formats)
        except CheckpointError as error:
            raise _refused(mismatched=error.problems) from error
        except ConfigError as error:
            raise _refused(mismatched=[str(error)]) from error
        if found.missing or found.unexpected or found.mismatched:
            raise _refused(missing=found.missing, unexpected=found.unexpected, mismatched=found.mismatched)
        extremes: dict[str, Tensor] = {}  # of floats that are quantized, which must be finite
        try:
            for name, slot, weight, scale in read_assigned(found.assignments):
                if isinstance(weight, Tensor) and weight.is_meta:
                    weight = self._patched(name, slot, weight)
                packed = isinstance(found.assignments[name].weight, PackedCut)
                if isinstance(weight, Tensor) and scale is None and not packed and name in self._formats:
                    weight = weight.to(self._device)
                    extremes[name] = torch.stack(weight.aminmax()).float()
                self._accept(name, slot, weight, scale, packed=packed)
        except CheckpointError as error:
            if not error.problems:  # of a file
                raise
            raise _refused(mismatched=error.problems) from error
        finally:
            self._synchronize()  # the device reads the tensors' memory and writes the staging memory, which others use next
        finite = torch.stack([*extremes.values()]).isfinite().all(1).tolist() if extremes else []  # the host waits once
        if wrong := [name for name, good in zip(extremes, finite, strict=True) if not good]:
            rule = "has numbers that are infinite or NaN, which the model's format cannot hold"
            raise _refused(mismatched=[f"{name}: {rule}" for name in wrong])

    def _opened(self, name: str, tensor: Given) -> Described:
        if isinstance(tensor, TensorInfo):
            return tensor
        try:
            held = tensor.open(self._device) if isinstance(tensor, SharedTensor) else tensor.detach()
        except OSError as error:
            raise _refused(mismatched=[f"{name}: cannot be opened: {error}"]) from error
        return HeldTensor(name=name, tensor=held)

    def _completed(self, arrived: Mapping[str, Described]) -> dict[str, Header]:
        """Return the tensors that can be stored: those that arrived, and earlier ones that waited for them.

        A complete packed matrix takes the place of its parts. The others wait.
        """
        owners = dict.fromkeys(map(self._owner, arrived.values()))
        headers = dict(arrived)
        for owner in owners:
            headers |= self._waiting.get(owner, {})
        ready: dict[str, Header] = dict(headers)
        if self._quant_format is not None:
            ready, incomplete, problems = assemble(headers, self._quant_format)
            if problems:
                raise _refused(mismatched=problems)
            for owner in owners:
                self._incomplete.pop(owner, None)
            self._incomplete |= incomplete
        for owner in owners:
            self._waiting.pop(owner, None)
        for name, info in headers.items():
            if self._is_part(info) or (ready.get(name) is info and self._waits(info, headers)):
                self._waiting.setdefault(self._owner(info), {})[name] = _lasting(info) if name in arrived else info
                ready.pop(name, None)
        return ready

    def _owner(self, info: Described) -> str:
        """Return the name of the matrix that a tensor is a part of; for other tensors, a name of their own."""
        if self._quant_format is not None and self._quant_format.owns(info.name, info):
            return f"{info.name.rpartition('.')[0]}.weight"
        return weight_name(info.name)

    def _is_part(self, info: Described) -> bool:
        """Return whether a tensor is a part of an incomplete packed matrix."""
        form = self._quant_format
        return form is not None and self._owner(info) in self._incomplete and form.owns(info.name, info)

    def _block_headers(self, parts: Sequence[Described]) -> list[Described]:
        """Return a meta tensor, by the source's name, for each delta that these parts complete."""
        stored = read_tensors([info.cut(()) for info in parts if isinstance(info, TensorInfo)])
        held = [(info.name, info.tensor) for info in parts if isinstance(info, HeldTensor)]
        headers: list[Described] = []
        for name, tensor in chain(held, ((info.name, tensor) for info, tensor in stored)):
            owner, _, part = name.rpartition(MARK)
            if part not in Blocks._fields or owner.endswith(".scale"):
                raise _refused(unexpected=[f"{name}: unexpected; blocks of weights have {', '.join(Blocks._fields)}"])
            if self._mirror is None:
                raise _refused(mismatched=[f"{name}: blocks change only some numbers, so they need a staged update"])
            found = self._parts.setdefault(owner, {})
            if part in found:
                raise _refused(unexpected=[f"{name}: given twice"])
            found[part] = tensor.clone()
            if len(found) < len(Blocks._fields):
                continue
            try:
                blocks = Blocks.of(self._parts.pop(owner))
            except ValueError as error:
                raise _refused(mismatched=[f"{owner}: {error}"]) from error
            whole: Described = HeldTensor(name=owner, tensor=blocks.whole())
            self._blocks |= dict.fromkeys(official([whole], self._names, "the update"), blocks)
            headers.append(whole)
        return headers

    def _patched(self, name: str, slot: Slot, place: Tensor) -> Tensor:
        """Return this rank's part of a tensor that arrived as blocks: the present numbers, overwritten by the blocks."""
        own = self._formats.get(name)
        try:
            block = own.block if isinstance(own, QuantFormat) else None if own is None else own.form.block
            return self._blocks.pop(name).write(slot.values(), place, block)
        except ValueError as error:
            raise _refused(mismatched=[f"{name}: {error}"]) from error

    def _waits(self, info: Described, headers: Mapping[str, Described]) -> bool:
        """Return whether ``headers`` lack the scale that a weight needs, or the weight of a scale."""
        owner = weight_name(info.name)
        if owner not in self._slots or self._slots[owner].kind != "matrix":
            return False
        return owner not in headers if info.name != owner else info.dtype in MATRIX_FORMATS and scale_name(owner) not in headers

    def _accept(self, name: str, slot: Slot, weight: Tensor | FourBit, scale: Tensor | None, *, packed: bool) -> None:
        own = self._formats.get(name)
        if isinstance(own, QuantFormat):
            if not packed:
                assert own.quantize is not None and isinstance(weight, Tensor)
                quantize, floats = own.quantize, weight
                try:
                    weight = own.make(lambda: quantize(floats), slot.shape)
                except ValueError as error:
                    raise _refused(mismatched=[f"{name}: {error}"]) from error
        elif own is not None and scale is None:
            assert isinstance(weight, Tensor)
            weight, scale = quantize_matrix(weight, fp4=own.form is FORMATS["fp4"])
            scale = scale.float() if own.scale == "F32" else scale
        if scale is not None and isinstance(weight, Tensor):
            weight, scale = weight.to(self._device), scale.to(self._device)
        try:
            if self._mirror is None:
                slot.store(weight, scale)
            else:
                self._mirror.store(slot, weight, scale)
        except CheckpointError as error:
            raise _refused(mismatched=error.problems or [f"{name}: {error}"]) from error
        self._filled.add(name)

    def check(self, *, partial: bool) -> None:
        """Require a tensor for every slot; with ``partial``, only that each tensor that arrived is complete.

        Raises:
            WeightUpdateError: Lists the missing tensors.
        """
        waits = [info for infos in self._waiting.values() for info in infos.values()]
        waiting = {weight_name(info.name): info.name for info in waits if not self._is_part(info)}
        missing = [f"{name[: -len('weight')]}{leaf}: missing" for name, leaves in self._incomplete.items() for leaf in leaves]
        missing += [f"{scale_name(owner) if owner == name else owner}: missing; {name} came" for owner, name in waiting.items()]
        missing += [f"{name}: only {' and '.join(parts)} of its blocks came" for name, parts in self._parts.items()]
        if not partial and len(self._filled) < len(self._slots):
            known = {*self._filled, *waiting, *self._incomplete}
            missing += [f"{name}: missing" for name in self._slots if name not in known]
        if missing:
            raise _refused(missing=missing)

    def write(self) -> None:
        """Copy what was staged to the slots, in place. The host waits for the device once, at the end."""
        if self._mirror is not None:
            self._mirror.send()
            self._synchronize()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _lasting(info: Described) -> Described:
    """Return a description that stays valid after the call: tensors in memory are copied."""
    return HeldTensor(name=info.name, tensor=info.tensor.clone()) if isinstance(info, HeldTensor) else info


def _refused(*, missing: Iterable[str] = (), unexpected: Iterable[str] = (), mismatched: Iterable[str] = ()) -> WeightUpdateError:
    return WeightUpdateError("the update does not fit the model:", missing=missing, unexpected=unexpected, mismatched=mismatched)


def checksum(values: Tensor, cut: Cut, shape: Sequence[int]) -> int:
    """Return a 64-bit checksum of a part of a tensor; the checksums of disjoint parts add up to that of the whole, modulo 2^64.

    The checksum is a sum over the elements of a hash of the value's bits and the element's index in the whole tensor.

    Args:
        values: The part, float32.
        cut: The part's range of indices in each dimension.
        shape: Shape of the whole tensor.
    """
    places = torch.zeros((), dtype=torch.int64, device=values.device)
    for part, size in zip(cut, shape, strict=True):
        places = places[..., None] * size + torch.arange(part.start, part.stop, device=values.device)
    bits, total = values.contiguous().view(torch.int32).flatten(), 0
    for some, where in zip(bits.split(_CHECKSUM_ELEMENTS), places.flatten().split(_CHECKSUM_ELEMENTS), strict=True):
        mixed = (some.long() + where * _MULTIPLIERS[0]) * _MULTIPLIERS[1]
        mixed = (mixed ^ mixed >> 29) * _MULTIPLIERS[2]
        total += int((mixed ^ mixed >> 32).sum())
    return total & _MASK
