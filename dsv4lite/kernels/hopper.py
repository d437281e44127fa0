"""What the warp-specialized kernels for Hopper share. Gluon, in which they are written, lets a program say which warps do what."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma
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
def give_item(taken, items, next_item, full, empty, phase, WARPS: gl.constexpr):
    """Producer of ``WARPS`` warps: take the next item that no program has, tell the consumers, and return it.

    ``taken`` counts the items that were taken after each program's first; the last program to ask sets it to zero.
    """
    before = gl.atomic_add(taken, 1, sem="relaxed")
    if before == items - 1:
        gl.store(taken, 0)
    item = before + gl.num_programs(0)
    mbarrier.wait(empty, phase)
    next_item.store(gl.full((1,), item, gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0])))
    mbarrier.arrive(full, count=1)
    return item


@gluon.jit
def take_item(next_item, full, empty, phase):
    """Consumer of four warps: return the item that the producer has given."""
    mbarrier.wait(full, phase)
    item = gl.max(next_item.load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    mbarrier.arrive(empty, count=1)
    return item


def described(x: Tensor, tile: Sequence[int], layout: gl.NVMMASharedLayout) -> TensorDescriptor:
    """Return the descriptor of a tensor, of which parts of size ``tile`` are copied to shared memory in a layout."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(tile), layout)
