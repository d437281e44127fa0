"""What the warp-specialized kernels for Hopper share. Gluon, in which they are written, lets a program say which warps do what."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Copies to shared memory, by threads and by the hardware; Triton 3.6 has the older names.
copy_by_threads = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
# How four warps store results [64, 128]: a thread has 8 side by side, and its neighbours those beside them. From the layout of
# products, numbers change threads within their warp only.
STORED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 128],
    )
)


@gluon.jit
def next_item(taken, items):
    """Take the next item that no program has, and return it.

    ``taken`` counts the items that were taken after each program's first; the last program to ask sets it to zero.
    """
    before = gl.atomic_add(taken, 1, sem="relaxed")
    if before == items - 1:
        gl.store(taken, 0)
    return before + gl.num_programs(0)


@gluon.jit
def tell(value, buffer, WARPS: gl.constexpr):
    """Store a number to shared memory, int32 [1], by ``WARPS`` warps."""
    buffer.store(gl.full((1,), value, gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0])))


@gluon.jit
def told(buffer):
    """Return the number that ``tell`` has stored; for four warps."""
    return gl.max(buffer.load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def pairs_to_bfloat16(x):
    """Round float32 to the nearest bfloat16, two numbers of a thread at once; the compiler's own conversion may take one."""
    return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2)


def described(x: Tensor, tile: Sequence[int], layout: gl.NVMMASharedLayout) -> TensorDescriptor:
    """Return the descriptor of a tensor, of which parts of size ``tile`` are copied to shared memory in a layout."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(tile), layout)
