"""Kernel of ``indexer.choose_paged`` for few tokens: index queries as projected, scores and selection in one launch.

Each program of a token turns, transforms and rounds its queries anew, and scores pieces of its keys; the last to arrive chooses.
Of a token that sees no more entries than are wanted nothing is looked at.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.dispatch import Variant
from dsv4lite.kernels.gemm_triton import counters_of
from dsv4lite.kernels.indexer import FEW_ENTRIES, FEW_TOKENS, PAGE_TOKENS
from dsv4lite.kernels.indexer_triton import KEYS, block_for, head_weights, key_piece, score_of, select_best
from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.rows import Fp4Key, RowStore
from dsv4lite.kernels.rows_triton import e2m1_round, fp4_scale, hadamard_rows, rotate_tail

PROGRAMS = 264  # of all tokens at most: preparing queries takes as long as scoring a piece


@triton.jit
def _queries(iq, cos, sin, H: tl.constexpr, HEADS: tl.constexpr, LOG: tl.constexpr, ROPE: tl.constexpr, GPU: tl.constexpr):
    """Return a token's index queries [HEADS, C], bfloat16 (float32 in the interpreter)."""
    # Reference: round_fp4(hadamard(rope(iq_THC, cos, sin)))
    WIDTH: tl.constexpr = 1 << LOG
    head = tl.arange(0, HEADS)[:, None]
    x = tl.load(iq + head * WIDTH + tl.arange(0, WIDTH)[None, :], mask=head < H, other=0.0).to(tl.float32)
    x = rotate_tail(x, cos, sin, HEADS, WIDTH, WIDTH, ROPE, False, GPU)
    x = tl.reshape(hadamard_rows(x, HEADS, LOG, GPU), (HEADS, WIDTH // 32, 32))
    byte, inverse = fp4_scale(x, 2)
    scale = (byte << 23).to(tl.float32, bitcast=True)
    q = tl.reshape(e2m1_round(x * inverse[:, :, None]) * scale[:, :, None], (HEADS, WIDTH))
    return q.to(tl.bfloat16) if GPU else q


@triton.jit(do_not_specialize=["grow_columns", "weight_row", "columns"])
def _choose_kernel(
    iq, cos, sin, weights, keys, positions, sequences, grow, scores, arrivals, selected,
    iq_row, weight_row, grow_columns, columns, weight_scale,
    H: tl.constexpr, HEADS: tl.constexpr, LOG: tl.constexpr, ROPE: tl.constexpr, RATIO: tl.constexpr, TOP_K: tl.constexpr,
    PAGE_BYTES: tl.constexpr, PAGE_ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1)
    visible = (tl.load(positions + n) + 1) // RATIO
    pieces = (visible + KEYS - 1) // KEYS
    if (visible <= TOP_K) | (first >= pieces):
        return
    q = _queries(iq + n * iq_row, cos + n * (ROPE // 2), sin + n * (ROPE // 2), H, HEADS, LOG, ROPE, GPU)
    weight = head_weights(weights + n * weight_row, weight_scale, False, H, HEADS, GPU)
    pages = grow + tl.load(sequences + n).to(tl.int64) * grow_columns
    scores += n * columns
    for piece in range(first, pieces, tl.num_programs(1)):
        k = key_piece(keys, pages, piece, visible, PAGE_BYTES, PAGE_ROWS, 1 << (LOG - 5), KEYS, GPU)
        at = piece * KEYS + tl.arange(0, KEYS)
        tl.store(scores + at, score_of(k, q, weight, False, GPU).to(tl.bfloat16), mask=at < visible)
    tl.debug_barrier()  # all threads have written when one of them says so
    arrived = tl.atomic_add(arrivals + n, 1, sem="acq_rel", scope="gpu")
    if arrived == tl.minimum(pieces, tl.num_programs(1)) - 1:
        select_best(scores, selected + n * TOP_K, visible, TOP_K, BLOCK, ".cg")
        tl.store(arrivals + n, 0)  # as the next kernel finds it


def choose_few_triton(
    iq_THC: Tensor,
    weights_TH: Tensor,
    keys: RowStore,
    paging: Paging,
    top_k: int,
    entries_max: int,
    weight_scale: float,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """See ``indexer.choose_paged``; up to ``FEW_TOKENS`` tokens of as many sequences, up to ``FEW_ENTRIES`` packed keys of each."""
    (tokens, heads, channels), fmt = iq_THC.shape, keys.format
    assert tokens <= FEW_TOKENS and paging.singles and entries_max <= FEW_ENTRIES, (tokens, entries_max)
    assert isinstance(fmt, Fp4Key) and fmt.width == channels and channels & (channels - 1) == 0, (fmt, channels)
    assert iq_THC.dtype == torch.bfloat16 and iq_THC.stride()[1:] == (channels, 1)
    assert weights_TH.shape == (tokens, heads) and weights_TH.stride(1) == 1
    rope = 2 * cos.shape[1]
    assert cos.shape == sin.shape == (tokens, rope // 2) and cos.is_contiguous() and sin.is_contiguous() and rope <= channels
    selected = torch.empty(tokens, top_k, dtype=torch.int32, device=iq_THC.device)
    if tokens == 0 or entries_max <= top_k:
        return selected
    block = block_for(entries_max)
    _choose_kernel[(tokens, min(triton.cdiv(entries_max, KEYS), PROGRAMS // tokens))](
        iq_THC, cos, sin, weights_TH, keys.memory, paging.positions_T, paging.sequence_T, paging.grow_SP,
        torch.empty(tokens, entries_max, dtype=torch.bfloat16, device=iq_THC.device), counters_of(iq_THC.device), selected,
        iq_THC.stride(0), weights_TH.stride(0), paging.grow_SP.stride(0), entries_max, weight_scale,
        H=heads,
        HEADS=max(16, triton.next_power_of_2(heads)),
        LOG=channels.bit_length() - 1,
        ROPE=rope,
        RATIO=PAGE_TOKENS // keys.rows_per_page,
        TOP_K=top_k,
        PAGE_BYTES=keys.memory.shape[1],
        PAGE_ROWS=keys.rows_per_page,
        KEYS=KEYS,
        BLOCK=block,
        GPU=iq_THC.is_cuda,
        num_warps=_warps_for(block),
        num_stages=1,
        enable_fp_fusion=False,
    )  # fmt: skip
    return selected


def _warps_for(block: int) -> int:
    return 4 if block < FEW_ENTRIES // 2 else 8


def variants() -> list[Variant]:
    """Return the launches at V4-Flash's sizes and small ones, for every number of scores."""
    signature = {"iq": "*bf16", **dict.fromkeys(("cos", "sin", "weights"), "*fp32"), "keys": "*u8"}
    signature |= dict.fromkeys(("positions", "sequences", "grow"), "*i32") | {"scores": "*bf16"}
    signature |= dict.fromkeys(("arrivals", "selected"), "*i32")
    signature |= dict.fromkeys(("iq_row", "weight_row", "grow_columns", "columns"), "i32") | {"weight_scale": "fp32"}
    constants = {"LOG": 7, "ROPE": 64, "RATIO": 4, "PAGE_BYTES": 64 * 68, "PAGE_ROWS": 64, "KEYS": KEYS, "GPU": True}
    return [
        Variant(
            kernel=_choose_kernel,
            signature=signature,
            constants={**constants, "H": heads, "HEADS": max(16, heads), "TOP_K": top_k, "BLOCK": block},
            num_warps=_warps_for(block),
            num_stages=1,
        )
        for heads, top_k, block in ((8, 64, 1024), (64, 512, 2048), (64, 512, 8192), (64, 512, 4096))
    ]
