"""The kernel of the latents' norms against its reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.latent_norm_store import latent_norms_ref
from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.quantize import dequantize_fp8
from dsv4lite.kernels.rope import rope_angles, rope_frequencies
from dsv4lite.kernels.rows import Fp8Kv, RowStore
from tests.kernels.steps import step_of

triton = pytest.importorskip("triton")

from dsv4lite.kernels.latent_norm_store.triton import latent_norms_triton, latent_sizes, room_for_latents  # noqa: E402

pytestmark = pytest.mark.kernel

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
SMALL = [(128, Fp8Kv(64, 64)), (256, Fp8Kv(192, 64)), (384, Fp8Kv(448, 64))]
WINDOW_TOKENS = 128 if CUDA else 6
SHAPES = SMALL + ([(1024, Fp8Kv(448, 64)), (1536, Fp8Kv(448, 64))] if CUDA else [])
STEPS = [([0, 63, 300], [1, 1, 1], True, 2), ([3, 60], [2, 9], False, 1), ([], [], False, 0)]
STEPS += [([0, 100, 3000], [1000, 900, 70], False, 5)] if CUDA else []


def run(rank: int, fmt: Fp8Kv, paging: Paging, reference: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = len(paging.positions_T)
    weights = [(torch.rand(size, generator=generator) + 0.5).to(DEVICE) for size in (rank, fmt.width)]
    latent = (3 * torch.randn(tokens, rank + fmt.width, generator=generator)).bfloat16().to(DEVICE)
    latent[paging.positions_T < 0] = float("nan")
    angles = rope_angles(paging.positions_T, rope_frequencies(64, 10000.0).to(DEVICE))
    store = RowStore(fmt, 512, 64, DEVICE)
    store.memory.fill_(0xA5)
    op = latent_norms_ref if reference else latent_norms_triton
    return *op(latent, *weights, *angles, 1e-6, store, paging, WINDOW_TOKENS), store.memory


@pytest.mark.parametrize(("starts", "lens", "singles", "padding"), STEPS)
@pytest.mark.parametrize(("rank", "fmt"), SHAPES)
def test_latent_norms_agree(rank: int, fmt: Fp8Kv, starts: list[int], lens: list[int], singles: bool, padding: int) -> None:
    paging = step_of(starts, lens, singles=singles, padding=padding, device=DEVICE)
    got, wanted = run(rank, fmt, paging, False), run(rank, fmt, paging, True)
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        # Bytes differ where the sum of squares moved a rounding to bfloat16.
        differing = (ours.view(torch.uint8) != theirs.view(torch.uint8)).float().mean() if ours.numel() else 0.0
        assert differing <= 1e-3, differing
    ours, theirs = dequantize_fp8(*got[:2], 128), dequantize_fp8(*wanted[:2], 128)
    assert ((ours - theirs).abs() <= 2**-3 * theirs.abs() + 2**-9).all()


def test_latent_norms_do_not_depend_on_other_tokens() -> None:
    rank, fmt = SHAPES[-1]
    everything = run(rank, fmt, step_of([0], [4], device=DEVICE), False)
    alone = run(rank, fmt, step_of([0], [1], device=DEVICE), False)
    for many, one in zip(everything[:3], alone[:3], strict=True):
        assert torch.equal(many[:1].view(torch.uint8), one.view(torch.uint8))


def test_rows_have_room_to_begin_at_sixteen_bytes() -> None:
    fmt = Fp8Kv(448, 64)
    assert latent_sizes(1024, fmt) == {"RANK": 1024, "QUERY_GROUPS": 8, "NOPE": 448, "ROPE": 64, "ROWS": 8, "FRESH_ROW": 592}
    codes, scales, fresh = room_for_latents(torch.empty(3, 1000 + 512, dtype=torch.bfloat16), 1000, fmt)
    assert codes.shape == (3, 1000) and scales.shape == (3, 8) and fresh.shape == (3, 584) and fresh.stride() == (592, 1)
