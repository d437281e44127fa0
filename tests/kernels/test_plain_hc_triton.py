"""The kernels of plain hyper-connections against the references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.hc import HcMix, hc_collapse_ref, hc_expand_ref, hc_head_ref, hc_leave_enter_ref
from dsv4lite.kernels.hc import HcWeights as Weights

pytest.importorskip("triton")

from dsv4lite.kernels.hc.unquantized_triton import plain_collapse_triton, plain_leave_enter_triton

pytestmark = pytest.mark.kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPTIONS = {"iters": 20, "eps": 1e-6, "norm_eps": 1e-6}
SHAPES = [(0, 4, 32), (3, 4, 48), (2, 3, 20)] + ([(16, 4, 4096), (300, 2, 1024)] if DEVICE == "cuda" else [])
cases = pytest.mark.parametrize(("tokens", "streams", "width"), SHAPES)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def random(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(DEVICE)


def weights_of(streams: int, width: int, *, head: bool = False) -> Weights:
    rows = streams if head else streams * (streams + 2)
    fn = random(rows, streams * width, seed=1, scale=(streams * width) ** -0.5)
    return Weights(fn, random(rows, seed=2), 1 + random(1 if head else 3, seed=3, scale=0.2))


def close(got: Tensor, wanted: Tensor) -> None:
    assert got.dtype == wanted.dtype and got.shape == wanted.shape
    rtol, atol = (2e-5, 2e-5) if got.dtype == torch.float32 else (2**-6, 2**-8)
    torch.testing.assert_close(got, wanted, rtol=rtol, atol=atol)


@cases
@dtypes
def test_a_sub_layer_leaves_and_the_next_enters(tokens: int, streams: int, width: int, dtype: torch.dtype) -> None:
    x, w, norm = random(tokens, streams, width, seed=4).to(dtype), weights_of(streams, width), 1 + random(width, seed=5, scale=0.2)
    y, mixed = random(tokens, width, seed=6).to(dtype), random(tokens, streams, streams, seed=8).softmax(-1)
    mix = HcMix(random(tokens, streams, seed=7).sigmoid(), mixed)
    left, sums = plain_leave_enter_triton(x, (y, *mix), w.fn)
    close(left, hc_expand_ref(y, x, mix))
    close(sums, hc_leave_enter_ref(left, None, w.fn)[1])
    entered, post, comb = plain_collapse_triton(left, sums, w.base, w.scale, norm, **OPTIONS)
    wanted, returned = hc_collapse_ref(left, sums, w.base, w.scale, norm, **OPTIONS)
    close(entered, wanted)
    close(post, returned.post)
    close(comb, returned.comb)


@cases
@dtypes
def test_head_agrees(tokens: int, streams: int, width: int, dtype: torch.dtype) -> None:
    x, w = random(tokens, streams, width, seed=4).to(dtype), weights_of(streams, width, head=True)
    left, sums = plain_leave_enter_triton(x, None, w.fn)
    assert left is x
    got = plain_collapse_triton(x, sums, w.base, w.scale, None, **OPTIONS)[0]
    close(got, hc_head_ref(x, w, eps=1e-6, norm_eps=1e-6))
