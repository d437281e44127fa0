"""Kernel of ``latent_entries.py``: programs for each sequence's compressors, then two for each token's latents."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.compress_triton import advance, entry_sizes, memory_of
from dsv4lite.kernels.dispatch import Variant
from dsv4lite.kernels.latent_triton import kv_latent, latent_sizes, query_latent, room_for_latents
from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.pdl import dependent_launch, let_successor_in, wait_for_predecessor
from dsv4lite.kernels.rows import Fp4Key, Fp8Kv, RowStore

_NUM_WARPS = 4


@triton.jit(do_not_specialize=["tokens", "count", "window_columns", "grow_columns"])
def _latent_entries_kernel(
    latent, q_norm, kv_norm, cos, sin, q_codes, q_scales, fresh, window,
    projected, group_cos, group_sin, ape, norm, carry, entries, key_projected, key_ape, key_norm, key_carry, keys,
    positions, sequences, first, lens, window_pages, window_first, slots, copies, rows, drafts, grow,
    tokens, count, latent_stride, window_stride, window_columns, window_tokens,
    projected_stride, copies_held, entry_stride, key_stride, grow_columns, eps,
    RANK: tl.constexpr, QUERY_GROUPS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, ROWS: tl.constexpr,
    FRESH_ROW: tl.constexpr, WINDOW_PLACES: tl.constexpr, RATIO: tl.constexpr, A: tl.constexpr, PLACES: tl.constexpr,
    KEY_WIDTH: tl.constexpr, KEY_LOG: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor()
    let_successor_in()
    program = tl.program_id(0)
    if program < count:
        advance(
            program, projected, ape, norm, carry, entries, group_cos, group_sin, slots, copies, first, rows, lens, drafts, grow,
            copies_held, projected_stride, entry_stride, grow_columns, eps, A, RATIO, NOPE + ROPE, ROWS, PLACES, 0, 0, ROPE, GPU,
        )  # fmt: skip
    KEYS: tl.constexpr = 1 if KEY_WIDTH > 0 else 0
    if KEYS:  # noqa: SIM102  decided when compiled; the other when run
        if (program >= count) & (program < 2 * count):
            advance(
                program - count, key_projected, key_ape, key_norm, key_carry, keys, group_cos, group_sin, slots, copies, first,
                rows, lens, drafts, grow, copies_held, projected_stride, key_stride, grow_columns, eps, A, RATIO, KEY_WIDTH,
                (KEY_WIDTH + 63) // 64, PLACES, KEY_LOG, 1, ROPE, GPU,
            )  # fmt: skip
    place = program - (1 + KEYS) * count
    if place >= 0:
        t = (place % tokens).to(tl.int64)
        if place < tokens:
            kv_latent(
                latent, kv_norm, cos, sin, fresh, window, t, positions, sequences, first, lens, window_pages, window_first,
                latent_stride, window_stride, window_columns, window_tokens, eps, RANK, NOPE, ROPE, ROWS, WINDOW_PLACES, FRESH_ROW,
                GPU,
            )  # fmt: skip
        else:
            query_latent(latent, q_norm, q_codes, q_scales, t, positions, latent_stride, eps, RANK, QUERY_GROUPS, GPU)


def latent_entries_triton(
    latent_TK: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    window: RowStore,
    paging: Paging,
    window_tokens: int,
    projected: Tensor,
    group_cos: Tensor,
    group_sin: Tensor,
    ratio: int,
    ape: Tensor,
    norm: Tensor,
    carry: Tensor,
    entries: RowStore,
    key_ape: Tensor | None,
    key_norm: Tensor | None,
    key_carry: Tensor | None,
    keys: RowStore | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``latent_entries.latent_entries``; entries are packed as rows of the window are, keys in FP4."""
    fmt, (tokens, rank), count = window.format, (latent_TK.shape[0], q_norm.shape[0]), len(paging.slots_S)
    assert isinstance(fmt, Fp8Kv) and entries.format == fmt, (fmt, entries.format)
    q_codes, q_scales, fresh_TB = room_for_latents(latent_TK, rank, fmt)
    for angles in (cos, sin, group_cos, group_sin):
        assert angles.is_contiguous() and angles.shape == (tokens, fmt.rope // 2), angles.shape
    pool, key_width, key_part = entry_sizes(ratio, entries, fmt.rope, False), 0, projected
    assert projected.stride(1) == 1 and ape.shape == (ratio, pool["A"] * fmt.width) and ape.is_contiguous()
    assert carry.shape[2:] == (pool["A"], 3, fmt.width) and carry.is_contiguous()
    if keys is None:
        key_ape, key_norm, key_carry, keys = ape, norm, carry, entries
    else:
        assert key_ape is not None and key_norm is not None and key_carry is not None
        assert isinstance(keys.format, Fp4Key) and keys.rows_per_page == entries.rows_per_page, keys.format
        key_width, key_part = keys.format.width, projected[:, 2 * ape.shape[1] :]
        assert entry_sizes(ratio, keys, fmt.rope, True)["A"] == pool["A"] and key_part.shape[1] >= 2 * key_ape.shape[1]
        assert key_ape.shape == (ratio, pool["A"] * key_width) and key_ape.is_contiguous() and key_carry.is_contiguous()
        assert key_carry.shape == (*carry.shape[:4], key_width), key_carry.shape
    if tokens == 0:
        return q_codes, q_scales, fresh_TB
    _latent_entries_kernel[((2 if key_width else 1) * count + 2 * tokens,)](
        latent_TK, q_norm, kv_norm, cos, sin, q_codes.view(q_scales.dtype), q_scales, fresh_TB, window.memory,
        projected, group_cos, group_sin, ape, norm, carry, memory_of(entries),
        key_part, key_ape, key_norm, key_carry, memory_of(keys),
        paging.positions_T, paging.sequence_T, paging.first_S, paging.lens_S, paging.window_SP, paging.window_first_S,
        paging.slots_S, paging.carry_S, paging.rows_S, paging.drafts_S, paging.grow_SP,
        tokens, count, latent_TK.stride(0), window.memory.stride(0), paging.window_SP.stride(0), window_tokens,
        projected.stride(0), carry.shape[1], entries.memory.stride(0), keys.memory.stride(0), paging.grow_SP.stride(0), eps,
        **_constants(rank, fmt, ratio, pool["A"], key_width),
        WINDOW_PLACES=window.rows_per_page,
        PLACES=entries.rows_per_page,
        GPU=latent_TK.is_cuda,
        num_warps=_NUM_WARPS,
        enable_fp_fusion=False,
        launch_pdl=dependent_launch(latent_TK.device),
    )  # fmt: skip
    return q_codes, q_scales, fresh_TB


def _constants(rank: int, fmt: Fp8Kv, ratio: int, sets: int, key_width: int) -> dict[str, int]:
    return {
        **latent_sizes(rank, fmt),
        "RATIO": ratio,
        "A": sets,
        "KEY_WIDTH": key_width,
        "KEY_LOG": max(key_width.bit_length() - 1, 0),
    }


def variants() -> list[Variant]:
    """Return the launches of layers with and without index keys."""
    signature = {"latent": "*bf16", **dict.fromkeys(("q_norm", "kv_norm", "cos", "sin"), "*fp32")}
    signature |= dict.fromkeys(("q_codes", "q_scales", "fresh", "window"), "*u8")
    signature |= dict.fromkeys(("projected", "group_cos", "group_sin", "ape", "norm", "carry"), "*fp32") | {"entries": "*u8"}
    signature |= dict.fromkeys(("key_projected", "key_ape", "key_norm", "key_carry"), "*fp32") | {"keys": "*u8"}
    signature |= dict.fromkeys(("positions", "sequences", "first", "lens", "window_pages", "window_first"), "*i32")
    signature |= dict.fromkeys(("slots", "copies", "rows", "drafts", "grow"), "*i32")
    signature |= dict.fromkeys(("tokens", "count", "latent_stride", "window_stride", "window_columns", "window_tokens"), "i32")
    sizes = ("projected_stride", "copies_held", "entry_stride", "key_stride", "grow_columns")
    signature |= dict.fromkeys(sizes, "i32") | {"eps": "fp32"}
    return [
        Variant(
            kernel=_latent_entries_kernel,
            signature=signature,
            constants={
                **_constants(rank, Fp8Kv(nope, 64), ratio, sets, key_width),
                "WINDOW_PLACES": 64,
                "PLACES": 256 // ratio,
                "GPU": True,
            },
            num_warps=_NUM_WARPS,
        )
        for rank, nope, ratio, sets, key_width in ((128, 64, 4, 2, 128), (1024, 448, 128, 1, 0), (1024, 448, 4, 2, 128))
    ]
