"""Two products in one launch against each by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.gemm import PAIR_ROWS
from dsv4lite.kernels.quantize import quantize_fp8

triton = pytest.importorskip("triton")

from dsv4lite.kernels.gemm.pair_triton import pair_linear_triton  # noqa: E402
from dsv4lite.kernels.gemm.triton import counters_of, float_linear_triton, fp8_linear_triton  # noqa: E402

pytestmark = pytest.mark.kernel

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
SHAPES = [(1, 70, 130, 1100), (5, 65, 40, 256), (PAIR_ROWS, 24, 70, 1024), (3, 130, 3, 60)]  # one or several parts of each
# V4-Flash: the hidden layer of the shared expert and the router, latents and the inputs of both kinds of compressors.
REAL = [(rows, *outs, 4096) for outs in ((4096, 256), (1536, 2624), (1536, 1024)) for rows in (1, 8, 16)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def case(rows: int, fp8_outs: int, outs: int, inputs: int, *, per_row: bool = False) -> tuple[Tensor, ...]:
    """Rows, plain and quantized, and both weights; scales differ from block to block."""
    x = random(rows, inputs).bfloat16()
    scales = (fp8_outs if per_row else -(-fp8_outs // 128), -(-inputs // 128))
    bytes_ = torch.randint(117, 124, scales, generator=torch.Generator().manual_seed(1), dtype=torch.uint8).to(DEVICE)
    codes = random(fp8_outs, inputs, seed=2).to(torch.float8_e4m3fn)
    return x, *quantize_fp8(x, 128), codes, bytes_, random(outs, inputs, seed=3).bfloat16()


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize(("rows", "fp8_outs", "outs", "inputs"), SHAPES + (REAL if CUDA else []))
def test_both_have_the_bits_of_products_alone(rows: int, fp8_outs: int, outs: int, inputs: int, per_row: bool) -> None:
    x, x_codes, x_scales, w_codes, w_scales, w = case(rows, fp8_outs, outs, inputs, per_row=per_row)
    for _ in range(2):  # the second finds the counters as the first has left them
        quantized, plain = pair_linear_triton(x, x_codes, x_scales, w_codes, w_scales, w)
        assert torch.equal(quantized, fp8_linear_triton(x_codes, x_scales, w_codes, w_scales))
        assert torch.equal(plain, float_linear_triton(x[:, None], w[None], torch.float32)[:, 0])
    assert not counters_of(DEVICE).any()
