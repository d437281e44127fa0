"""How far two results of one op are apart, in the numbers that they stand for: codes with scales, packed rows, partial sums."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4lite.kernels.quantize import dequantize_fp8
from dsv4lite.kernels.rows import RowStore
from dsv4lite.weights.quant import ACTIVATION_GROUP

# The most that a row of an op's results may be from the reference's, by its norm. Where results are rounded to FP8 or FP4, one
# neighbouring sum moves a code, and at a border the scale of a group; choices of near equals are counted, not measured.
BOUND = 2**-6
BOUNDS: Mapping[str, float] = {
    "choose_paged": 0.02,
    "route": 1e-3,
    **dict.fromkeys(("quantize_fp8", "round_fp8", "swiglu_quantize", "hc_collapse_quantize"), 2**-4),
    **dict.fromkeys(("compress_step", "head_norms", "latent_norms"), 2**-3),
}
_ACCUMULATES = ("compress", "compress_step")  # accumulators hold -inf where nothing has come yet
_SMALL_ROW = 1e-3  # rows are measured by no less than this share of the largest one's norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One output of an op against its reference.

    Attributes:
        output: Its name.
        relative: Largest distance of a row by its norm; for integers the share of those that differ; ``inf`` where only one side is
            finite.
        absolute: Largest difference of two numbers.
        not_finite: Numbers that are NaN or infinite.
        reference_not_finite: The same of the reference.
        count: Numbers in all.
    """

    output: str
    relative: float
    absolute: float
    not_finite: int
    reference_not_finite: int
    count: int


def outputs(op: str, result: Any, arguments: tuple[Any, ...]) -> dict[str, Tensor]:
    """Return an op's results by name, as numbers that can be compared."""
    tensors = list(flatten(result))
    if op == "hc_leave_enter":
        return {"streams": tensors[0], "sums": tensors[1].sum(0)}
    if op == "choose_paged":
        return {"chosen": _choices(tensors[0], arguments)}
    if op == "latent_norms":
        fmt = next(a for a in arguments if isinstance(a, RowStore)).format
        codes, scales, fresh_TB = tensors
        data, row_scales = fresh_TB.split([fmt.data_bytes, fmt.scale_bytes], -1)
        return {
            "query": dequantize_fp8(codes, scales, ACTIVATION_GROUP),
            "rows": fmt.unpack(data, row_scales, torch.float32),
        }
    named: dict[str, Tensor] = {}
    for i, tensor in enumerate(tensors):
        if tensor.dtype == torch.float8_e4m3fn:
            tensor = dequantize_fp8(tensor, tensors[i + 1], ACTIVATION_GROUP)
        elif tensor.dtype == torch.uint8:
            continue  # the scales of what comes before
        named[str(len(named))] = tensor
    return named


def flatten(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from flatten(part)


def _choices(chosen_TK: Tensor, arguments: tuple[Any, ...]) -> Tensor:
    """Blank what ``choose_paged`` leaves undefined: tokens that see no more entries than are chosen."""
    keys, paging = arguments[2:4]
    visible_T = (paging.positions_T + 1) * keys.rows_per_page // 256
    return chosen_TK.masked_fill((visible_T <= chosen_TK.shape[1])[:, None], -1)


def compare(op: str, name: str, got: Tensor, wanted: Tensor) -> Difference:
    """Measure one output."""
    if not got.is_floating_point():
        differing = int((got != wanted).sum())
        share = differing / max(1, got.numel())
        return Difference(output=name, relative=share, absolute=differing, not_finite=0, reference_not_finite=0, count=got.numel())
    rows = (got.shape[0], -1) if got.dim() > 1 and got.numel() else (1, -1)
    a, b = got.double().reshape(rows), wanted.double().reshape(rows)
    good_a, good_b = _usable(op, a), _usable(op, b)
    both = a.isfinite() & b.isfinite()
    apart = torch.where(both, a - b, 0.0)
    norms = torch.where(both, b, 0.0).norm(dim=1)
    floor = max(_SMALL_ROW * float(norms.amax()), 1e-30) if norms.numel() else 1.0
    relative = float((apart.norm(dim=1) / norms.clamp_min(floor)).amax()) if a.numel() else 0.0
    same = (a == b) | (a.isnan() & b.isnan())
    return Difference(
        output=name,
        relative=relative if bool((both | same).all()) else math.inf,
        absolute=float(apart.abs().amax()) if a.numel() else 0.0,
        not_finite=int((~good_a).sum()),
        reference_not_finite=int((~good_b).sum()),
        count=a.numel(),
    )


def _usable(op: str, x: Tensor) -> Tensor:
    return (x < math.inf) if op in _ACCUMULATES else x.isfinite()


def written_rows(before: Tensor, got: RowStore, wanted: RowStore) -> tuple[Tensor, Tensor]:
    """Return the rows float32 [N, C] that either of two stores holds since both were ``before``, uint8 [pages, bytes]."""
    count, fmt = got.rows_per_page, got.format
    changed = (got.memory != before) | (wanted.memory != before)
    split = count * fmt.data_bytes
    rows = changed[:, :split].unflatten(1, (count, fmt.data_bytes)).any(-1)
    if fmt.scale_bytes:
        rows |= changed[:, split : split + count * fmt.scale_bytes].unflatten(1, (count, fmt.scale_bytes)).any(-1)
    addresses = rows.flatten().nonzero()[:, 0]
    return got.read(addresses, torch.float32), wanted.read(addresses, torch.float32)
