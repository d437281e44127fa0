"""The distance of an op's results from its reference's. FP8 codes and packed rows are compared as the numbers that they encode."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4lite.kernels.experts import ExpertInputs, ExpertSum, Tiles, sum_experts
from dsv4lite.kernels.indexer import PAGE_TOKENS
from dsv4lite.kernels.quantize import dequantize_fp8
from dsv4lite.kernels.rows import RowStore
from dsv4lite.weights.quant import ACTIVATION_GROUP

# Largest accepted distance of a row (last dimension) from the reference's, divided by its norm; of choices, the share that differs.
# A wrong kernel is off by much more. Results rounded to FP8 or FP4 have higher bounds: a difference in a last bit changes a code.
BOUND = 2**-6
BOUNDS: Mapping[str, float] = {
    "choose_paged": 0.05,
    "route": 0.05,
    **dict.fromkeys(("quantize_fp8", "hc_enter", "swiglu_quantize", "latent_norms", "store_latent_rows"), 2**-4),
    **dict.fromkeys(("store_index_keys", "index_queries"), 2**-4),
    **dict.fromkeys(("experts_outputs", "moe_decode_small", "fp8_weight_linear_quantize"), 2**-4),
    "compress_step": 2**-3,
}
_SMALL_ROW = 1e-3  # of the largest row's norm; distances are divided by no less


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One output of an op, and how far it is from its reference.

    Attributes:
        output: Its name.
        relative: Largest distance of a row, divided by its norm; ``inf`` if only one side is finite. Of choices, the share that
            differs. ``None`` without a reference.
        not_finite: Numbers that are NaN or infinite.
        reference_not_finite: The same of the reference.
        count: Numbers in all.
    """

    output: str
    relative: float | None
    not_finite: int
    reference_not_finite: int
    count: int


def outputs(op: str, result: Any, arguments: tuple[Any, ...]) -> dict[str, Tensor]:
    """Return what an op returned by name, as numbers that can be compared."""
    tensors = list(flatten(result))
    if op == "route":
        return {"chosen": tensors[0], "weights": tensors[1]}
    if op == "moe_decode_small":
        return {"chosen": tensors[0], "sums": sum_experts.reference(result)}
    if op == "experts_outputs":  # undefined where there is no expert
        given = ExpertInputs(*arguments)
        return {"sums": sum_experts.reference(ExpertSum(given.slots_TK, result, None, given.sizes[0]))}
    if op == "choose_paged":
        keys, paging = arguments[2:4]  # undefined for tokens that see no more entries than are chosen: -1
        visible_T = (paging.positions_T + 1) * keys.rows_per_page // PAGE_TOKENS
        return {"chosen": tensors[0].masked_fill((visible_T <= tensors[0].shape[1])[:, None], -1)}
    if op == "latent_norms":
        *query, fresh_TB = tensors
        fmt = next(a for a in arguments if isinstance(a, RowStore)).format
        rows, row_scales = fresh_TB.split([fmt.data_bytes, fmt.scale_bytes], -1)
        return {"query": next(_numbers(query)), "rows": fmt.unpack(rows, row_scales, torch.float32)}
    return {f"{i}": numbers for i, numbers in enumerate(_numbers(tensors))}


def flatten(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested tuples, and the codes of weights in tiles."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Tiles):
        yield value.codes
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from flatten(part)


def _numbers(tensors: list[Tensor]) -> Iterator[Tensor]:
    """Yield tensors; FP8 codes are dequantized with the scales that follow them."""
    parts = iter(tensors)
    for tensor in parts:
        yield dequantize_fp8(tensor, next(parts), ACTIVATION_GROUP) if tensor.dtype == torch.float8_e4m3fn else tensor


def differences(op: str, got: Mapping[str, Tensor], wanted: Mapping[str, Tensor] | None) -> tuple[Difference, ...]:
    """Measure an op's outputs against those of its reference, if there is one."""
    if wanted is None:
        return tuple(_difference(op, name, tensor, None) for name, tensor in got.items())
    if op in ("route", "moe_decode_small"):  # other outputs are compared only for tokens with the same experts
        same_T = (got["chosen"] == wanted["chosen"]).all(-1)
        got, wanted = ({name: x if name == "chosen" else x[same_T] for name, x in named.items()} for named in (got, wanted))
    return tuple(_difference(op, name, tensor, wanted[name]) for name, tensor in got.items())


def _difference(op: str, name: str, got: Tensor, wanted: Tensor | None) -> Difference:
    if not got.is_floating_point():
        share = None if wanted is None else _share_missing(got, wanted)
        return Difference(output=name, relative=share, not_finite=0, reference_not_finite=0, count=got.numel())
    return Difference(
        output=name,
        relative=None if wanted is None else _distance(got, wanted),
        not_finite=_bad_numbers(op, got),
        reference_not_finite=0 if wanted is None else _bad_numbers(op, wanted),
        count=got.numel(),
    )


def _bad_numbers(op: str, x: Tensor) -> int:
    """Count numbers that are not finite, but for -inf, which empty compressor state holds."""
    good = x < math.inf if op in ("compress", "compress_step") else x.isfinite()
    return int((~good).sum())


def _share_missing(got: Tensor, wanted: Tensor) -> float:
    """Return the share of integers that differ; for choices [T, K], the share that is missing from the same row of ``wanted``."""
    if got.dim() == 2 and got.numel():
        ordered = wanted.sort(-1).values
        place = torch.searchsorted(ordered, got.contiguous()).clamp_max(got.shape[1] - 1)
        return float((ordered.gather(1, place) != got).float().mean())
    return float((got != wanted).float().mean()) if got.numel() else 0.0


def _distance(got: Tensor, wanted: Tensor) -> float:
    if not got.numel():
        return 0.0
    a, b = (x.double().reshape(-1, x.shape[-1]) for x in (got, wanted))
    both, same = a.isfinite() & b.isfinite(), (a == b) | (a.isnan() & b.isnan())
    if not bool((both | same).all()):
        return math.inf
    norms = b.where(both, 0.0).norm(dim=1)
    floor = max(_SMALL_ROW * float(norms.amax()), torch.finfo(torch.float32).tiny)
    return float(((a - b).where(both, 0.0).norm(dim=1) / norms.clamp_min(floor)).amax())


def written_rows(before: Tensor, *stores: RowStore) -> list[Tensor]:
    """Return the rows float32 [N, C] of stores that any of them has changed since all were ``before`` uint8 [pages, bytes]."""
    count, fmt = stores[0].rows_per_page, stores[0].format
    changed = torch.stack([store.memory != before for store in stores]).any(0)
    split = count * fmt.data_bytes
    rows = changed[:, :split].unflatten(1, (count, fmt.data_bytes)).any(-1)
    if fmt.scale_bytes:
        rows |= changed[:, split : split + count * fmt.scale_bytes].unflatten(1, (count, fmt.scale_bytes)).any(-1)
    addresses = rows.flatten().nonzero()[:, 0]
    return [store.read(addresses, torch.float32) for store in stores]
