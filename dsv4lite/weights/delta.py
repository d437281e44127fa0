"""Deltas: updates that bring only changed tensors, and of these only the changed blocks.

The changed blocks of a tensor are three named tensors, so that every source and file can carry them:

    name@shape    int64 [dimensions]   shape of the whole tensor, seen as a matrix with the columns of its last dimension
    name@offsets  int64 [N, 2]         row and column of the first element of each block
    name@values   [N, rows, columns]   new values, in the tensor's dtype

A block begins in the tensor; values beyond the tensor's edges are ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from dsv4lite.checks import is_integer, require
from dsv4lite.weights.checkpoint import TensorInfo, read_tensors
from dsv4lite.weights.formats import PACKED_LEAVES
from dsv4lite.weights.loader import weight_name
from dsv4lite.weights.shared import SharedTensor, bytes_of, is_distributed

MARK = "@"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32)  # of tensors that may come in blocks
_SCALES = (".scale", "_scale_inv")
_ELEMENTS = 1 << 22  # written at a time, to bound the memory of their indices


@runtime_checkable
class _Source(Protocol):
    def tensors(self) -> Iterable[tuple[str, Any]]: ...


class DeltaSource:
    """The changes in the tensors of another source; for updates with ``partial=True``.

    Tensors on disk or in another process are read one at a time. The tensors of a quantized matrix (codes and scale, or the parts
    of a weight-only format), in any order, are sent whole if a bit of any has changed; what the source does not bring is not
    sent.

    Args:
        source: Source of the new tensors.
        before: Copies of the tensors that the engine has, by the source's names; tensors without a copy are sent whole.
        block: Rows and columns of the blocks that are compared. An engine that stores a matrix in FP8 or FP4 requires multiples of
            its scale blocks, 128 x 128 or 1 x 32.
        leaves: Last parts of the names of a packed matrix's tensors; for a format of the host's own, those of its ``parts``.

    Raises:
        InvalidRequestError: ``source`` is no source, ``before`` is no mapping, or ``block`` is not two sizes.
    """

    def __init__(
        self,
        source: _Source,
        before: Mapping[str, Tensor],
        *,
        block: tuple[int, int] = (128, 128),
        leaves: Collection[str] = PACKED_LEAVES,
    ) -> None:
        sizes = tuple(block) if isinstance(block, (tuple, list)) else ()
        good = len(sizes) == 2 and all(is_integer(n) and n > 0 for n in sizes)
        require(good, "block", block, "must be two integers above 0: the rows and the columns of a block")
        require(isinstance(source, _Source), "source", source, "must have a method tensors; NamedTensors takes a mapping")
        require(isinstance(before, Mapping), "before", before, "must map names to tensors")
        self._source, self._before, self._block, self._leaves = source, before, block, frozenset(leaves)

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """Yield whole tensors, and the blocks in which any bit differs.

        Raises:
            CheckpointError: A file cannot be read.
            OSError: A tensor of another process cannot be opened.
        """
        unchanged: dict[str, list[str]] = {}  # names of tensors that have not changed, by the name of their matrix
        sent = set[str]()
        for name, given in self._source.tensors():
            owner, _, leaf = name.rpartition(".")
            matrix = f"{owner}.weight" if leaf in self._leaves else weight_name(name.removesuffix("_scale_inv"))
            changes = [(name, given)] if matrix in sent else self._changes(name, given)
            if not changes:
                unchanged.setdefault(matrix, []).append(name)
                continue
            sent.add(matrix)
            for partner in unchanged.pop(matrix, ()):
                yield partner, self._before[partner]  # has equal bits, so the source's tensor need not be kept
            yield from changes

    def _changes(self, name: str, given: Any) -> list[tuple[str, Any]]:
        """Return what to send of a tensor: its blocks, all of it, or nothing."""
        old = self._before.get(name)
        new = None if old is None else _opened(given)
        if old is None or new is None or (old.shape, old.dtype) != (new.shape, new.dtype):
            return [(name, given)]
        old = old.detach().to(new.device)
        if bytes_of(old).equal(bytes_of(new)):
            return []
        if new.dtype in _DTYPES and not name.endswith(_SCALES) and name.rpartition(".")[2] not in self._leaves:
            offsets, values = _changed(new, old, self._block)
            if values.nbytes + offsets.nbytes < new.nbytes:
                shape = torch.tensor(new.shape, dtype=torch.int64, device="cpu")
                parts = zip(Blocks._fields, (shape, offsets, values), strict=True)
                return [(f"{name}{MARK}{part}", tensor) for part, tensor in parts]
        return [(name, given)]  # a location on disk is sent as such: each rank reads its own part, from the page cache


def _opened(given: Any) -> Tensor | None:
    """Return the tensor that a source yielded, wherever it lies; ``None`` for other objects, which the update refuses by name."""
    if isinstance(given, TensorInfo):
        ((_, given),) = read_tensors([given.cut(())])
    elif isinstance(given, SharedTensor):
        given = given.open(torch.device("cpu"))
    return given.detach() if isinstance(given, Tensor) and not is_distributed(given) else None


def _matrix(tensor: Tensor) -> Tensor:
    rows: int = prod(tensor.shape[:-1])
    return tensor.reshape(rows, tensor.shape[-1] if tensor.dim() else 1)


def _grid(bytes_: Tensor, rows: int, columns: int) -> Tensor:
    """Return uint8 [R, C, size] as blocks [R / rows, C / columns, rows, columns, size], padded with zeros."""
    padded = F.pad(bytes_, (0, 0, 0, -bytes_.shape[1] % columns, 0, -bytes_.shape[0] % rows))
    grid: Tensor = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).transpose(1, 2)
    return grid


def _changed(new: Tensor, old: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return offsets and values of the blocks that differ. A block is at most as large as the tensor and has a number."""
    matrices = [bytes_of(_matrix(m)) for m in (new, old)]
    rows, columns, _ = matrices[0].shape
    block = min(block[0], max(1, rows)), min(block[1], max(1, columns))
    grids = [_grid(matrix, *block) for matrix in matrices]
    where = (grids[0] != grids[1]).flatten(2).any(2).nonzero()
    values = grids[0][where[:, 0], where[:, 1]].contiguous().view(new.dtype).squeeze(-1)
    return where * torch.tensor(block, dtype=torch.int64, device=where.device), values


class Blocks(NamedTuple):
    """New values for blocks of a tensor; see the module's docstring."""

    shape: tuple[int, ...]
    offsets: Tensor
    values: Tensor

    @classmethod
    def of(cls, parts: Mapping[str, Tensor]) -> Blocks:
        """Return the blocks that three named parts describe.

        Raises:
            ValueError: Their dtypes or shapes do not fit.
        """
        shape, offsets, values = parts["shape"], parts["offsets"], parts["values"]
        if shape.dim() != 1 or offsets.dim() != 2 or offsets.shape[1] != 2 or {shape.dtype, offsets.dtype} != {torch.int64}:
            raise ValueError(f"shape {list(shape.shape)} and offsets {list(offsets.shape)} of blocks, expected int64 [d], [n, 2]")
        if values.dim() != 3 or len(values) != len(offsets) or values.dtype not in _DTYPES:
            raise ValueError(
                f"values of blocks are {values.dtype} {list(values.shape)}, expected {len(offsets)} matrices of numbers"
            )
        sizes = tuple(shape.tolist())
        if any(n < 0 for n in sizes) or prod(sizes) >= 1 << 48:
            raise ValueError(f"blocks of a tensor of shape {list(sizes)}")
        rows, columns = prod(sizes[:-1]), sizes[-1] if sizes else 1
        ends = torch.tensor((rows, columns), dtype=torch.int64, device=offsets.device)
        outside = ((offsets < 0) | (offsets >= ends)).any(1)
        if outside.any():
            raise ValueError(f"a block begins at {offsets[outside][0].tolist()}, outside of its {rows} rows of {columns} columns")
        return cls(sizes, offsets, values)

    def whole(self) -> Tensor:
        """Return a meta tensor with the shape and dtype of the whole tensor."""
        return torch.empty(self.shape, dtype=self.values.dtype, device="meta")

    def write(self, part: Tensor, place: Tensor, quantum: tuple[int, int] | None) -> Tensor:
        """Return a part of the tensor, overwritten by the blocks.

        Args:
            part: Present values of the part.
            place: The same part as a view of ``whole()``.
            quantum: Rows and columns that are quantized together; ``None`` without quantization.

        Raises:
            ValueError: Blocks overwrite only some of the numbers that are quantized together.
        """
        written = part.clone()
        matrix, (_, height, width) = _matrix(written), self.values.shape
        touched = torch.zeros(matrix.shape, dtype=torch.bool, device=part.device)
        first_row, first_column = divmod(int(place.storage_offset()), self.shape[-1] if self.shape else 1)
        many = max(1, _ELEMENTS // max(1, height * width))
        for offsets, values in zip(self.offsets.split(many), self.values.split(many), strict=True):
            corner = offsets.to(part.device)[:, :, None, None]
            rows = corner[:, 0] - first_row + torch.arange(height, device=part.device)[:, None]
            columns = corner[:, 1] - first_column + torch.arange(width, device=part.device)
            inside = (rows >= 0) & (rows < len(matrix)) & (columns >= 0) & (columns < matrix.shape[1])
            at = rows.expand(inside.shape)[inside], columns.expand(inside.shape)[inside]
            matrix[at] = values.to(part.device)[inside].to(matrix.dtype)
            touched[at] = True
        if quantum is not None:
            some, others = (_grid(mask.to(torch.uint8)[:, :, None], *quantum).flatten(2).any(2) for mask in (touched, ~touched))
            if (some & others).any():
                raise ValueError(f"blocks of {height} x {width} cut through numbers that are quantized {quantum[0]} x {quantum[1]}")
        return matrix.view(part.shape)
