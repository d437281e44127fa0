"""The kernel of the heads' norms against its reference."""

from __future__ import annotations

import pytest
import torch

from dsv4lite.kernels.qk_norm_rope import HeadInputs, head_norms
from dsv4lite.kernels.rope import rope_angles, rope_frequencies

triton = pytest.importorskip("triton")

from dsv4lite.kernels.qk_norm_rope.triton import head_norms_triton  # noqa: E402

pytestmark = pytest.mark.kernel

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
SMALL = [(1, 8, 128, 0, 128), (3, 3, 512, 16, 128), (2, 5, 192, 17, 64), (0, 2, 128, 2, 128)]
REAL = [(1, 64, 512, 64, 128), (16, 64, 512, 64, 128), (1024, 128, 512, 64, 128), (300, 64, 512, 0, 128)]


@pytest.mark.parametrize(("tokens", "heads", "channels", "index_heads", "index_dim"), SMALL + (REAL if CUDA else []))
def test_head_norms_agree(tokens: int, heads: int, channels: int, index_heads: int, index_dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    columns = heads * channels + index_heads * index_dim
    query = (3 * torch.randn(tokens, columns + 16, generator=generator)).bfloat16().to(DEVICE)[:, :columns]
    angles = rope_angles(torch.arange(900, 900 + tokens, device=DEVICE), rope_frequencies(64, 10000.0).to(DEVICE))
    given = HeadInputs(query, heads, channels, index_heads, index_dim, *angles, 1e-6)
    got, index, _ = head_norms_triton(given)
    wanted, wanted_index, _ = head_norms.reference(given)
    assert got.shape == wanted.shape and got.dtype == wanted.dtype and got.is_contiguous()
    if tokens:
        differing = (got != wanted).any(-1).float().mean()
        assert differing <= (1e-3 if CUDA else 0.1)  # heads whose mean lies at a border of bfloat16
        assert ((got.float() - wanted.float()).abs() <= 2**-6 * wanted.float().abs() + 1e-5).all()
    if wanted_index is None:
        assert index is None
    else:
        assert index is not None and torch.equal(index.view(torch.int16), wanted_index.view(torch.int16))


def test_head_norms_do_not_depend_on_other_tokens() -> None:
    query = torch.randn(9, 5 * 128 + 3 * 128, generator=torch.Generator().manual_seed(0)).bfloat16().to(DEVICE)
    angles = rope_angles(torch.arange(9, device=DEVICE), rope_frequencies(64, 10000.0).to(DEVICE))
    everything = head_norms_triton(HeadInputs(query, 5, 128, 3, 128, *angles, 1e-6))
    alone = head_norms_triton(HeadInputs(query[4:5], 5, 128, 3, 128, *(part[4:5] for part in angles), 1e-6))
    for many, one in zip(everything[:2], alone[:2], strict=True):
        assert many is not None and one is not None and torch.equal(many[4:5], one)
