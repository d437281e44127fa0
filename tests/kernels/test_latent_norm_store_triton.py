"""The kernel of the latents' norms against its reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.latent_norm_store import LatentInputs, latent_norms
from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.quantize import dequantize_fp8
from dsv4lite.kernels.rope import rope_angles, rope_frequencies
from dsv4lite.kernels.rows import Fp8Kv, RowFormat, RowStore, UnquantizedRow
from tests.kernels.steps import step_of

triton = pytest.importorskip("triton")

from dsv4lite.kernels.latent_norm_store.triton import latent_norms_triton  # noqa: E402

pytestmark = pytest.mark.kernel

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
PACKED: list[tuple[int, RowFormat, int]] = [(128, Fp8Kv(64, 64), 64), (256, Fp8Kv(192, 64), 64), (384, Fp8Kv(448, 64), 64)]
PACKED += [(1024, Fp8Kv(448, 64), 64), (1536, Fp8Kv(448, 64), 64)] if CUDA else []
UNQUANTIZED: list[tuple[int, RowFormat, int]] = [
    (rank, UnquantizedRow(width, dtype), rope)
    for rank, width, rope in ((24, 32, 8), (130, 96, 64), (24, 66, 6), *([(1024, 512, 64)] if CUDA else []))
    for dtype in (torch.float32, torch.bfloat16)
]
WINDOW_TOKENS = 128 if CUDA else 6
STEPS = [([0, 63, 300], [1, 1, 1], True, 2), ([3, 60], [2, 9], False, 1), ([], [], False, 0)]
STEPS += [([0, 100, 3000], [1000, 900, 70], False, 5)] if CUDA else []


def run(rank: int, fmt: RowFormat, rope: int, paging: Paging, *, reference: bool = False) -> tuple[Tensor, ...]:
    """Return the query latents, their scales, if any, the step's rows and the window's memory."""
    generator = torch.Generator().manual_seed(0)
    tokens, dtype = len(paging.positions_T), fmt.dtype if isinstance(fmt, UnquantizedRow) else torch.bfloat16
    weights = [(torch.rand(size, generator=generator) + 0.5).to(DEVICE) for size in (rank, fmt.width)]
    latent = (3 * torch.randn(tokens, rank + fmt.width, generator=generator)).to(dtype).to(DEVICE)
    latent[paging.positions_T < 0] = float("nan")
    angles = rope_angles(paging.positions_T, rope_frequencies(rope, 10000.0).to(DEVICE))
    store = RowStore(fmt, 512, 64, DEVICE)
    store.memory.fill_(0xA5)
    op = latent_norms.reference if reference else latent_norms_triton
    query, scales, fresh = op(LatentInputs(latent, *weights, *angles, 1e-6, store, paging, WINDOW_TOKENS))
    return query, *([] if scales is None else [scales]), fresh, store.memory


@pytest.mark.parametrize(("starts", "lens", "singles", "padding"), STEPS)
@pytest.mark.parametrize(("rank", "fmt", "rope"), PACKED + UNQUANTIZED, ids=str)
def test_latent_norms_agree(
    rank: int, fmt: RowFormat, rope: int, starts: list[int], lens: list[int], singles: bool, padding: int
) -> None:
    paging = step_of(starts, lens, singles=singles, padding=padding, device=DEVICE)
    got, wanted = run(rank, fmt, rope, paging), run(rank, fmt, rope, paging, reference=True)
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        if isinstance(fmt, UnquantizedRow):
            ours, theirs = ours.view(fmt.dtype), theirs.view(fmt.dtype)
        if ours.dtype == torch.float32:
            torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-6)
            continue
        if ours.dtype == torch.bfloat16:
            assert ((ours.float() - theirs.float()).abs() <= 2**-6 * theirs.float().abs() + 1e-5).all()
        else:
            ours, theirs = ours.view(torch.uint8), theirs.view(torch.uint8)
        # Numbers differ where the sum of squares moved a rounding to bfloat16.
        assert not ours.numel() or (ours != theirs).float().mean() <= (1e-2 if isinstance(fmt, UnquantizedRow) else 1e-3)
    assert len(got) == (3 if isinstance(fmt, UnquantizedRow) else 4)
    if len(got) == 4:
        ours, theirs = dequantize_fp8(*got[:2], 128), dequantize_fp8(*wanted[:2], 128)
        assert ((ours - theirs).abs() <= 2**-3 * theirs.abs() + 2**-9).all()


def test_packed_rows_start_at_multiples_of_sixteen_bytes() -> None:
    """Aligned rows are read faster."""
    _, _, fresh, _ = run(128, Fp8Kv(448, 64), 64, step_of([0], [3], device=DEVICE))
    assert fresh.shape == (3, 584) and fresh.stride() == (592, 1) and fresh.data_ptr() % 16 == 0


def test_latent_norms_do_not_depend_on_other_tokens() -> None:
    everything = run(*PACKED[-1], step_of([0], [4], device=DEVICE))
    alone = run(*PACKED[-1], step_of([0], [1], device=DEVICE))
    for many, one in zip(everything[:3], alone[:3], strict=True):
        assert torch.equal(many[:1].view(torch.uint8), one.view(torch.uint8))
