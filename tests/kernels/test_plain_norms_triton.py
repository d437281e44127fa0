"""The kernels of plain latents and heads against the references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.latent_norm_store import latent_norms_ref
from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.qk_norm_rope import HeadInputs, head_norms
from dsv4lite.kernels.rope import rope_angles, rope_frequencies
from dsv4lite.kernels.rows import PlainRow, RowStore
from tests.kernels.steps import step_of

triton = pytest.importorskip("triton")

from dsv4lite.kernels.norm.unquantized_triton import plain_head_norms_triton, plain_latent_norms_triton  # noqa: E402

pytestmark = pytest.mark.kernel

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
WINDOW_TOKENS = 6


def close(got: Tensor, wanted: Tensor, share: float) -> None:
    """Compare float32 to some units in the last place, bfloat16 to one, and that only where a sum lies at a border."""
    assert got.dtype == wanted.dtype and got.shape == wanted.shape
    if got.dtype == torch.float32:
        torch.testing.assert_close(got, wanted, rtol=2e-6, atol=1e-6)
    else:
        assert ((got.float() - wanted.float()).abs() <= 2**-6 * wanted.float().abs() + 1e-5).all()
        assert not got.numel() or (got != wanted).float().mean() <= share


def latents(rank: int, fmt: PlainRow, rope: int, paging: Paging, *, reference: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = len(paging.positions_T)
    weights = [(torch.rand(size, generator=generator) + 0.5).to(DEVICE) for size in (rank, fmt.width)]
    latent = (3 * torch.randn(tokens, rank + fmt.width, generator=generator)).to(fmt.dtype).to(DEVICE)
    latent[paging.positions_T < 0] = float("nan")
    angles = rope_angles(paging.positions_T, rope_frequencies(rope, 10000.0).to(DEVICE))
    store = RowStore(fmt, 512, 64, DEVICE)
    op = latent_norms_ref if reference else plain_latent_norms_triton
    q, scales, fresh = op(latent, *weights, *angles, 1e-6, store, paging, WINDOW_TOKENS)
    assert scales is None
    return q, fresh.view(fmt.dtype), store.memory.view(fmt.dtype)


@DTYPES
@pytest.mark.parametrize(
    ("rank", "width", "rope", "starts", "lens", "singles", "padding"),
    [
        (24, 32, 8, [0, 63, 300], [1, 1, 1], True, 1),
        (130, 96, 64, [3, 60], [1, 8], False, 1),
        (24, 32, 8, [], [], False, 0),
        *([(1024, 512, 64, [0, 63, 3000], [300, 70, 1], False, 5)] if CUDA else []),
    ],
)
def test_latent_norms_agree(
    rank: int, width: int, rope: int, starts: list[int], lens: list[int], singles: bool, padding: int, dtype: torch.dtype
) -> None:
    paging, fmt = step_of(starts, lens, singles=singles, padding=padding, device=DEVICE), PlainRow(width, dtype)
    got, wanted = latents(rank, fmt, rope, paging), latents(rank, fmt, rope, paging, reference=True)
    for ours, theirs in zip(got, wanted, strict=True):
        close(ours, theirs, 0.01)


@DTYPES
@pytest.mark.parametrize(
    ("tokens", "heads", "channels", "index_heads", "index_dim", "rope"),
    [(3, 5, 32, 12, 16, 8), (2, 3, 96, 5, 66, 64), (2, 2, 16, 0, 8, 4), *([(300, 64, 512, 64, 128, 64)] if CUDA else [])],
)
def test_head_norms_agree(
    tokens: int, heads: int, channels: int, index_heads: int, index_dim: int, rope: int, dtype: torch.dtype
) -> None:
    generator, columns = torch.Generator().manual_seed(0), heads * channels + index_heads * index_dim
    query = (3 * torch.randn(tokens, columns + 16, generator=generator)).to(dtype).to(DEVICE)[:, :columns]
    angles = rope_angles(torch.arange(900, 900 + tokens, device=DEVICE), rope_frequencies(rope, 10000.0).to(DEVICE))
    sizes = heads, channels, index_heads, index_dim
    given = HeadInputs(query, *sizes, *angles, 1e-6, fp4=False)
    got, index, _ = plain_head_norms_triton(given)
    wanted, wanted_index, _ = head_norms.reference(given)
    close(got, wanted, 0.2)  # all of a head whose mean lies at a border
    assert (index is None) == (wanted_index is None)
    if index is not None and wanted_index is not None:
        close(index, wanted_index, 0.0)
