"""The kernel of the heads' norms against its reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.qk_norm_rope import HeadInputs, head_norms
from dsv4lite.kernels.rope import rope_angles, rope_frequencies

triton = pytest.importorskip("triton")

from dsv4lite.kernels.qk_norm_rope.triton import head_norms_triton  # noqa: E402

pytestmark = pytest.mark.kernel

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
Sizes = tuple[int, int, int, int, int]  # heads, channels, index heads, their channels, rotated channels
PACKED: list[tuple[int, Sizes]] = [
    (1, (8, 128, 0, 128, 64)),
    (3, (3, 512, 16, 128, 64)),
    (2, (5, 192, 17, 64, 64)),
    (0, (2, 128, 2, 128, 64)),
]
UNQUANTIZED: list[tuple[int, Sizes]] = [(3, (5, 32, 12, 16, 8)), (2, (3, 96, 5, 66, 64))]
UNQUANTIZED += [(2, (2, 16, 0, 8, rope)) for rope in (4, 6)]
if CUDA:
    shapes = ((1, 64, 64), (16, 64, 64), (1024, 128, 64), (300, 64, 0))
    PACKED += [(tokens, (heads, 512, index_heads, 128, 64)) for tokens, heads, index_heads in shapes]
    UNQUANTIZED += [(300, (64, 512, 64, 128, 64))]
CASES = [(torch.bfloat16, True, *case) for case in PACKED]
CASES += [(dtype, False, *case) for case in UNQUANTIZED for dtype in (torch.float32, torch.bfloat16)]


def close(got: Tensor, wanted: Tensor, most: float) -> None:
    """Compare float32 to some units in the last place, bfloat16 to one, in at most this part of the heads."""
    assert got.shape == wanted.shape and got.dtype == wanted.dtype and got.is_contiguous()
    if got.dtype == torch.float32:
        torch.testing.assert_close(got, wanted, rtol=2e-6, atol=1e-6)
    elif got.numel():
        assert (got != wanted).any(-1).float().mean() <= most
        assert ((got.float() - wanted.float()).abs() <= 2**-6 * wanted.float().abs() + 1e-5).all()


@pytest.mark.parametrize(("dtype", "fp4", "tokens", "sizes"), CASES)
def test_head_norms_agree(dtype: torch.dtype, fp4: bool, tokens: int, sizes: Sizes) -> None:
    generator = torch.Generator().manual_seed(0)
    heads, channels, index_heads, index_dim, rope = sizes
    columns = heads * channels + index_heads * index_dim
    query = (3 * torch.randn(tokens, columns + 16, generator=generator)).to(dtype).to(DEVICE)[:, :columns]
    angles = rope_angles(torch.arange(900, 900 + tokens, device=DEVICE), rope_frequencies(rope, 10000.0).to(DEVICE))
    given = HeadInputs(query, heads, channels, index_heads, index_dim, *angles, 1e-6, fp4)
    got, index = head_norms_triton(given)
    wanted, wanted_index = head_norms.reference(given)
    close(got, wanted, 1e-3 if CUDA else 0.1 if fp4 else 0.2)  # heads whose mean lies between two numbers of bfloat16
    assert (index is None) == (wanted_index is None)
    if index is not None and wanted_index is not None:
        close(index, wanted_index, 0.0)
        assert not fp4 or torch.equal(index.view(torch.int16), wanted_index.view(torch.int16))


def test_head_norms_do_not_depend_on_other_tokens() -> None:
    query = torch.randn(9, 5 * 128 + 3 * 128, generator=torch.Generator().manual_seed(0)).bfloat16().to(DEVICE)
    angles = rope_angles(torch.arange(9, device=DEVICE), rope_frequencies(64, 10000.0).to(DEVICE))
    everything = head_norms_triton(HeadInputs(query, 5, 128, 3, 128, *angles, 1e-6, fp4=True))
    alone = head_norms_triton(HeadInputs(query[4:5], 5, 128, 3, 128, *(part[4:5] for part in angles), 1e-6, fp4=True))
    for many, one in zip(everything, alone, strict=True):
        assert many is not None and one is not None and torch.equal(many[4:5], one)
