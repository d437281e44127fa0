"""Kernels of quantized experts: four launches, which do not depend on the routing; the host reads nothing back.

    group     rows of each expert -> blocks of ``rows`` rows, and the expert of each block (``grouping_triton.py``)
    gate_up   one program: one block x 32 or 64 columns of ``u``; the last program of 128 columns quantizes them
    down      one program: one block x 64 or 128 columns of the result, one row per token and expert
    combine   sum over k, and the shared expert

Weights are the left operand: 64 of their rows fill the tensor cores whatever the number of tokens. Codes lie in memory in the order
in which threads need them (``Tiles``), so a thread widens four at a time and multiplies them without a layout conversion.
Every block size runs the same additions in the same order. So do Hopper's kernels for many rows, ``prefill_fp4_triton.py`` and
``prefill_fp8_triton.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lite.kernels.dispatch import by_most, ceil_div
from dsv4lite.kernels.e4m3 import as_stored, e4m3_bytes, fp8_scale_bits, fp8_scaled, has_e4m3, native_e4m3, to_bf16
from dsv4lite.kernels.experts import HALF_ROWS, TILE_ROWS, ExpertInputs, ExpertSum, Tiles, prefill_fp4_triton, prefill_fp8_triton
from dsv4lite.kernels.experts.grouping_triton import BlockConfig, BlockTable, Groups, group_triton
from dsv4lite.kernels.experts.weight_only_triton import weight_only_outputs_triton
from dsv4lite.kernels.pdl import dependent_launch, let_successor_in, wait_for_predecessor
from dsv4lite.kernels.quantize import FP8_GROUP
from dsv4lite.kernels.swiglu.triton import swiglu_of
from dsv4lite.kernels.widen_triton import row_exponents, side_by_side, widen_fp4, widen_fp8

_SUM_BLOCK = tl.constexpr(1024)  # columns of the sum that one program computes

# Limits are pairs of token and expert. Few pairs need small tiles, for more programs.
DECODE_BLOCKS: BlockTable = (
    (8, BlockConfig(rows=16, tiles=1, num_warps=4, num_stages=5)),
    (16, BlockConfig(rows=16, tiles=2, num_warps=4, num_stages=4)),
    (24, BlockConfig(rows=16, tiles=1, num_warps=4, num_stages=3, unroll=2)),
    (96, BlockConfig(rows=16, tiles=2, num_warps=4, num_stages=3, unroll=2)),
)
# Limits are pairs per expert.
BLOCKS: BlockTable = (
    (16, BlockConfig(rows=16, tiles=2, num_warps=4, num_stages=4)),
    (32, BlockConfig(rows=32, tiles=2, num_warps=4, num_stages=4)),
    (None, BlockConfig(rows=64, tiles=2, num_warps=4, num_stages=3)),
)


def block_for(pairs: int, experts: int) -> BlockConfig:
    """Return the block for a number of pairs of token and expert, and of experts."""
    return by_most((*DECODE_BLOCKS, (None, by_most(BLOCKS, pairs / experts))), pairs)


@triton.jit
def _inputs(x, valid):
    """Return 128 columns of the inputs, [128, rows]; ``x`` points to e4m3, or to its bytes on chips without e4m3."""
    if has_e4m3():
        numbers = tl.load(x, mask=valid[None, :], other=0.0)
    else:
        numbers = widen_fp8(tl.load(x, mask=valid[None, :], other=0))
    return numbers


@triton.jit
def _tile_product(
    x,
    valid,
    words,
    codes,
    scales,
    tile,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    WORD_STEP: tl.constexpr,
    TILES: tl.constexpr,
    FP4: tl.constexpr,
    STAGES: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Return ``w @ x.T``, float32 [TILES * 64, rows].

    Args:
        x: Pointers to the first 128 columns of the inputs, [128, rows].
        valid: Which rows are used.
        words: Pointers to the bits of the inputs' scales, [rows]; those of the next 128 columns lie ``WORD_STEP`` further.
        codes, scales: Of the stack of matrices.
        tile: The first tile's number in the stack.
    """
    EXPONENT: tl.constexpr = (14 if FP4 else 0) + (0 if has_e4m3() else 8 if FP4 else 16)  # of 2 that widened operands lack
    if FP4:
        tiles = tile + tl.arange(0, TILES) * CHUNKS
        codes += tiles[:, None] * 4096 + tl.arange(0, 2048)[None, :]
        scales += tiles[:, None] * 64 + tl.arange(0, 64)[None, :]
        bits = tl.reshape(tl.load(scales), (TILES * 64,))
        base = row_exponents(bits)
    else:
        i = tl.arange(0, TILES * 64)
        tiles = tile + (i >> 6) * CHUNKS
        codes += (tiles * 8192 + (i & 63) * 128)[:, None] + tl.arange(0, 128)[None, :]
        scales += tiles * 2 + (i >> 3 & 1)
    acc = tl.zeros((TILES * 64, ROWS), tl.float32)
    for c in tl.range(0, CHUNKS, num_stages=STAGES, loop_unroll_factor=UNROLL):
        unit = tl.load(words + c * WORD_STEP).to(tl.float32, bitcast=True)
        numbers = _inputs(x + c * 128, valid)
        if FP4:
            codes_c = codes + c * 4096
            s = tl.reshape(tl.load(scales + c * 64), (TILES * 64,)) & 0x7C7C7C7C
            w = side_by_side(
                widen_fp4(tl.load(codes_c), s & 255, (s >> 8) & 255, TILES),
                widen_fp4(tl.load(codes_c + 2048), (s >> 16) & 255, s >> 24, TILES),
            )
            acc += tl.dot(w, numbers) * unit[None, :]
        else:
            s = tl.load(scales + c * 2).to(tl.float32, bitcast=True)
            part = tl.dot(widen_fp8(tl.load(codes + c * 8192)), numbers)
            acc += part * (s[:, None] * unit[None, :])
    if FP4:
        acc *= ((base + EXPONENT) << 23).to(tl.float32, bitcast=True)[:, None]
    else:
        acc *= 1 << EXPONENT
    return acc


@triton.jit
def _quantize_last(
    u, u_codes, u_words, arrivals, block, group, pair, valid,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, WRITERS: tl.constexpr, done=None,
):  # fmt: skip
    """Quantize 128 columns of ``u`` if this is the last of the ``WRITERS`` programs that write them; then count it in ``done``."""
    # Reference: u = dequantize_fp8(*quantize_fp8(u, GROUP), GROUP)
    tl.debug_barrier()  # all threads have written before one of them counts the program
    arrived = tl.atomic_add(arrivals + block * (WIDTH // 128) + group, 1, sem="acq_rel", scope="gpu")
    if arrived == WRITERS - 1:
        at = pair[:, None] * WIDTH + group * 128 + tl.arange(0, 128)[None, :]
        y = tl.load(u + at, mask=valid[:, None], other=0.0, cache_modifier=".cg").to(tl.float32)
        bits = fp8_scale_bits(y)
        tl.store(u_codes + at, e4m3_bytes(fp8_scaled(y, bits), has_e4m3()), mask=valid[:, None])
        tl.store(u_words + (block * (WIDTH // 128) + group) * ROWS + tl.arange(0, ROWS), bits)
        if done is not None:
            tl.debug_barrier()  # all threads have written before one of them counts the group
            tl.atomic_add(done + block, 1, sem="release", scope="gpu")


@triton.jit(do_not_specialize=["pairs"])
def gate_up_tile(
    x, x_words, codes, scales, block_pairs, block_expert, num_blocks, weight, u, u_codes, u_words, arrivals, pairs, limit,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, BY_TOKEN: tl.constexpr, TILES: tl.constexpr,
    FP4: tl.constexpr, STAGES: tl.constexpr, UNROLL: tl.constexpr, program=None, done=None,
):  # fmt: skip
    """Compute ``TILES * 32`` columns of ``u`` for one block; ``done`` counts the groups of 128 that are quantized."""
    if program is None:  # it is launched on its own
        program = tl.program_id(0)
    PROGRAMS: tl.constexpr = WIDTH // 32 // TILES
    CHUNKS: tl.constexpr = HIDDEN // 128
    block = (program // PROGRAMS).to(tl.int64)
    program = program % PROGRAMS
    row = tl.arange(0, ROWS)
    count = tl.load(num_blocks)
    expert = tl.load(block_expert + block).to(tl.int64)
    pair = tl.load(block_pairs + block * ROWS + row).to(tl.int64)
    if block < count:
        valid = pair < pairs
        pair = tl.where(valid, pair, 0)
        token = pair // TOP_K
        words = x_words + (token * CHUNKS if BY_TOKEN else block * (CHUNKS * ROWS) + row)
        tile = (expert * (WIDTH // 32) + program * TILES) * CHUNKS
        # Reference: gate, up = ((x @ w13.dequantize(expert, half).T).bfloat16() for half in (0, 1))
        both = to_bf16(
            _tile_product(
                x + token[None, :] * HIDDEN + tl.arange(0, 128)[:, None],
                valid,
                words,
                codes,
                scales,
                tile,
                CHUNKS,
                ROWS,
                1 if BY_TOKEN else ROWS,
                TILES,
                FP4,
                STAGES,
                UNROLL,
            ),
        )
        mix = tl.load(weight + pair, mask=valid, other=0.0)
        # Row bit 3 of a tile separates gate and up. It varies within a thread's registers, so the split moves no data.
        gate, up = tl.split(tl.permute(tl.reshape(both, (TILES * 4, 2, 8, ROWS)), (0, 2, 3, 1)))
        # Reference: u = (swiglu(gate, up, limit) * weight_TK[at][:, None]).bfloat16()
        activated = to_bf16(swiglu_of(gate.to(tl.float32), up.to(tl.float32), limit) * mix[None, None, :])
        activated = tl.reshape(activated, (TILES * 32, ROWS))
        column = program * (TILES * 32) + tl.arange(0, TILES * 32)
        tl.store(u + pair[None, :] * WIDTH + column[:, None], activated, mask=valid[None, :])
        WRITERS: tl.constexpr = 4 // TILES
        _quantize_last(u, u_codes, u_words, arrivals, block, program // WRITERS, pair, valid, WIDTH, ROWS, WRITERS, done)


@triton.jit(do_not_specialize=["pairs"])
def down_tile(
    u_codes, u_words, codes, scales, block_pairs, block_expert, num_blocks, y, pairs,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, FP4: tl.constexpr,
    STAGES: tl.constexpr, UNROLL: tl.constexpr, program=None, done=None,
):  # fmt: skip
    """Compute ``TILES * 64`` columns of the result for one block; with ``done``, wait first until it counts all input groups."""
    if program is None:  # it is launched on its own
        program = tl.program_id(0)
    PROGRAMS: tl.constexpr = HIDDEN // 64 // TILES
    CHUNKS: tl.constexpr = WIDTH // 128
    block = (program // PROGRAMS).to(tl.int64)
    program = program % PROGRAMS
    row = tl.arange(0, ROWS)
    count = tl.load(num_blocks)
    expert = tl.load(block_expert + block).to(tl.int64)
    pair = tl.load(block_pairs + block * ROWS + row).to(tl.int64)
    if block < count:
        valid = pair < pairs
        pair = tl.where(valid, pair, 0)
        tile = (expert * (HIDDEN // 64) + program * TILES) * CHUNKS
        if done is not None:
            counted = tl.atomic_add(done + block, 0, sem="acquire", scope="gpu")  # a load with acquire semantics
            while counted < CHUNKS:
                counted = tl.atomic_add(done + block, 0, sem="acquire", scope="gpu")
        # Reference: y = u @ w2.dequantize(expert).T;  outputs[at] = y.bfloat16()
        out = _tile_product(
            u_codes + pair[None, :] * WIDTH + tl.arange(0, 128)[:, None],
            valid,
            u_words + block * (CHUNKS * ROWS) + row,
            codes,
            scales,
            tile,
            CHUNKS,
            ROWS,
            ROWS,
            TILES,
            FP4,
            STAGES,
            UNROLL,
        )
        let_successor_in()
        out = as_stored(out, y)
        column = program * (TILES * 64) + tl.arange(0, TILES * 64)
        tl.store(y + pair[None, :] * HIDDEN + column[:, None], out, mask=valid[None, :])


@triton.jit
def sum_of_token(y, chosen, token, column, EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, TOP_K: tl.constexpr):
    """Return columns of the sum over a token's experts, float32."""
    # Reference: total = total + outputs[:, k]
    total = tl.zeros(column.shape, tl.float32)
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        end = tl.where(tl.load(chosen + pair) < EXPERTS, HIDDEN, 0)  # outputs without an expert are not written
        total += tl.load(y + pair * HIDDEN + column, mask=column < end, other=0.0).to(tl.float32)
    return total


@triton.jit
def _combine_kernel(
    y,
    chosen,
    shared,
    out,
    EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
):
    wait_for_predecessor()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * _SUM_BLOCK + tl.arange(0, _SUM_BLOCK)
    inside = column < HIDDEN
    total = sum_of_token(y, chosen, token, column, EXPERTS, HIDDEN, TOP_K)
    if SHARED:
        # Reference: (total + shared_TD.float()).to(shared_TD.dtype)
        total += tl.load(shared + token * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
    total = as_stored(total, out)
    let_successor_in()
    tl.store(out + token * HIDDEN + column, total, mask=inside)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Sizes of one call, and buffers between its kernels.

    Attributes:
        native: The chip converts e4m3 in hardware. False in the interpreter, which widens codes as older chips do.
        groups: The pairs of token and expert of each block.
        u_words: Bits of the scales of ``u`` by block, int32 [blocks, I / 128, rows].
    """

    block: BlockConfig
    top_k: int
    w2: Tiles
    native: bool
    groups: Groups
    u_words: Tensor

    @classmethod
    def allocate(cls, tokens: int, top_k: int, w2: Tiles, block: BlockConfig, *, by_token: bool = False) -> Work:
        """Allocate for some tokens; ``by_token`` stores the inputs' scales by token instead of by block."""
        (experts, hidden, width), device = w2.shape, w2.codes.device
        groups = Groups.allocate(tokens, top_k, experts, (hidden, width), block.rows, device, by_token=by_token)
        return cls(
            block=block,
            top_k=top_k,
            w2=w2,
            native=native_e4m3(w2.codes),
            groups=groups,
            u_words=torch.empty(groups.max_blocks, width // FP8_GROUP, block.rows, dtype=torch.int32, device=device),
        )

    @property
    def gate_up_programs(self) -> int:
        """Number of programs of the first product."""
        return self.groups.max_blocks * (self.w2.shape[2] // HALF_ROWS // self.block.tiles)

    def down_programs(self, block: BlockConfig) -> int:
        """Return the number of programs of the second product."""
        return self.groups.max_blocks * (self.w2.shape[1] // TILE_ROWS // block.tiles)

    def empty_rows(self, columns: int, dtype: torch.dtype) -> Tensor:
        """Allocate one row for each pair, [pairs, columns]."""
        return torch.empty(self.groups.pairs, columns, dtype=dtype, device=self.u_words.device)

    def as_operand(self, codes: Tensor) -> Tensor:
        """Return FP8 codes in the dtype in which the products read them."""
        return codes.view(torch.float8_e4m3fn if self.native else torch.uint8)

    def gate_up_arguments(
        self, x_codes: Tensor, weight_TK: Tensor, w13: Tiles, limit: float, u_codes: Tensor
    ) -> tuple[Tensor | int | float, ...]:
        """Return the arguments of ``gate_up_tile``; it writes ``u`` to ``u_codes`` and ``u_words``."""
        groups, u = self.groups, self.empty_rows(self.w2.shape[2], torch.bfloat16)
        blocks = (groups.block_pairs, groups.block_expert, groups.num_blocks)
        results = (weight_TK, u, u_codes, self.u_words, groups.arrivals, groups.pairs, limit)
        return (self.as_operand(x_codes), groups.x_words, w13.codes, w13.scales, *blocks, *results)

    def constants(self, weights: Tiles) -> dict[str, int | bool | None]:
        """Return constants and launch options of a product with ``weights``."""
        return {
            "HIDDEN": self.w2.shape[1],
            "WIDTH": self.w2.shape[2],
            "ROWS": self.block.rows,
            "TILES": self.block.tiles,
            "STAGES": self.block.num_stages,
            "UNROLL": self.block.unroll_of(weights.fp4, self.native),
            "FP4": weights.fp4,
            "num_warps": self.block.num_warps,
            "num_stages": self.block.num_stages,
            "enable_fp_fusion": True,
        }


def experts_outputs_triton(given: ExpertInputs, *, block: BlockConfig | None = None) -> Tensor:
    """Launch ``experts_outputs``; ``block`` is for measurements."""
    if not isinstance(given.w2, Tiles):
        return weight_only_outputs_triton(given, block=block)
    (tokens, hidden), top_k, (experts, _, width) = given.x.shape, given.slots_TK.shape[1], given.sizes
    w13, w2, shape = given.w13, given.w2, (tokens, top_k, hidden)
    assert isinstance(w13, Tiles) and given.x_scales is not None
    assert w13.shape == (experts, 2 * width, hidden) and given.sizes[1] == hidden, (w13.shape, given.sizes)
    assert hidden % FP8_GROUP == width % FP8_GROUP == 0 and w13.fp4 == w2.fp4
    assert given.x.dtype == torch.float8_e4m3fn and given.x.is_contiguous() and given.x_scales.is_contiguous()
    assert given.slots_TK.dtype == torch.int64 and given.slots_TK.is_contiguous() and given.weight_TK.is_contiguous()
    if tokens == 0:
        return torch.empty(shape, dtype=given.dtype, device=given.x.device)
    block = block or block_for(tokens * top_k, experts)
    hopper = prefill_fp4_triton if w2.fp4 else prefill_fp8_triton  # in place of the largest blocks
    if block == BLOCKS[-1][1] and hopper.takes_blocks(given):
        outputs: Tensor = hopper.outputs_of_blocks(given)
        return outputs.view(shape)
    work = Work.allocate(tokens, top_k, w2, block)
    groups, u_codes = work.groups, work.empty_rows(width, torch.uint8)
    group_triton(given.slots_TK, given.x_scales, experts, groups)
    arguments = work.gate_up_arguments(given.x, given.weight_TK, w13, given.limit, u_codes)
    gate_up_tile[(work.gate_up_programs,)](*arguments, TOP_K=top_k, BY_TOKEN=False, **work.constants(w13))
    del arguments  # frees ``u``, so that ``y`` can reuse its memory
    y, blocks = work.empty_rows(hidden, given.dtype), (groups.block_pairs, groups.block_expert, groups.num_blocks)
    down = (work.as_operand(u_codes), work.u_words, w2.codes, w2.scales, *blocks, y, groups.pairs)
    down_tile[(work.down_programs(work.block),)](*down, **work.constants(w2))
    return y.view(shape)


def combine_triton(parts: ExpertSum) -> Tensor:
    """Launch ``sum_experts``."""
    shared, (tokens, top_k, hidden) = parts.shared_TD, parts.outputs_TKD.shape
    assert parts.outputs_TKD.is_contiguous() and parts.slots_TK.is_contiguous() and (shared is None or shared.is_contiguous())
    dtype = torch.float32 if shared is None else shared.dtype
    out = torch.empty(tokens, hidden, dtype=dtype, device=parts.outputs_TKD.device)
    if tokens:
        _combine_kernel[(tokens, ceil_div(hidden, _SUM_BLOCK.value))](
            parts.outputs_TKD,
            parts.slots_TK,
            out if shared is None else shared,
            out,
            EXPERTS=parts.experts,
            HIDDEN=hidden,
            TOP_K=top_k,
            SHARED=shared is not None,
            num_warps=4,
            enable_fp_fusion=True,
            launch_pdl=dependent_launch(out.device),
        )
    return out
