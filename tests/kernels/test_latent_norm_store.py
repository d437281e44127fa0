"""The latents' norms against the model's own composition of them, and their kernel against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.latent_norm_store import LatentInputs, latent_norms
from dsv4lite.kernels.norm import rms_norm
from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.quantize import dequantize_fp8, round_fp8
from dsv4lite.kernels.rope import rope, rope_angles, rope_frequencies
from dsv4lite.kernels.rows import Fp8Kv, RowFormat, RowStore, UnquantizedRow
from tests.kernels.paged import simulate
from tests.kernels.steps import step_of
from tests.kernels.tensors import CPU, DEVICE, ON_GPU, launch

RANK, FORMAT, EPS = 256, Fp8Kv(64, 64), 1e-6
STEPS = {
    "singles": step_of([0, 63, 64, 300], [1, 1, 1, 1], width=1),
    "padded singles": step_of([5, 200], [1, 1], width=1, padding=2),
    "chunks": step_of([0, 70, 3], [300, 2, 130], padding=3),
    "drafts": step_of([200, 70], [140, 3], drafts=[12, 2]),
    "nothing": step_of([], []),
}


def inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    latent = torch.randn(tokens, RANK + FORMAT.width, generator=generator).bfloat16()
    return latent, torch.rand(RANK, generator=generator) + 0.5, torch.rand(FORMAT.width, generator=generator) + 0.5


@pytest.mark.parametrize("name", STEPS)
def test_latents_are_those_of_the_model(name: str) -> None:
    paging = STEPS[name]
    real = paging.positions_T >= 0
    latent, q_norm, kv_norm = inputs(len(real))
    cos, sin = rope_angles(paging.positions_T, rope_frequencies(64, 10000.0))
    store = RowStore(FORMAT, 256, 64, CPU)
    codes, scales, fresh = latent_norms(LatentInputs(latent, q_norm, kv_norm, cos, sin, EPS, store, paging))
    assert scales is not None
    wanted = round_fp8(rms_norm(latent[:, :RANK], q_norm, EPS), 128)
    assert torch.equal(dequantize_fp8(codes, scales, 128).bfloat16()[real], wanted[real])
    kv = simulate(FORMAT, rope(rms_norm(latent[:, RANK:], kv_norm, EPS), cos, sin))
    rows = FORMAT.unpack(fresh[:, : FORMAT.data_bytes], fresh[:, FORMAT.data_bytes :], torch.bfloat16)
    assert torch.equal(rows[real], kv[real])
    assert not rows[~real].any() and not codes.float()[~real].any()

    written = 0
    for row in real.nonzero()[:, 0].tolist():
        s, p = int(paging.sequence_T[row]), int(paging.positions_T[row])
        if p < int(paging.first_S[s] + paging.lens_S[s] - paging.drafts_S[s]) - 128:
            continue
        address = int(paging.window_SP[s, p // 64 - int(paging.window_first_S[s])]) * 64 + p % 64
        assert torch.equal(store.read(torch.tensor([address]), torch.bfloat16)[0], kv[row])
        written += 1
    assert int(store.memory.view(256, -1)[:, : 64 * FORMAT.data_bytes].unflatten(1, (64, -1)).any(-1).sum()) == written


def test_row_without_a_page_is_not_kept() -> None:
    paging = step_of([0], [4])
    paging.window_SP.fill_(-1)
    latent, q_norm, kv_norm = inputs(4)
    cos, sin = rope_angles(paging.positions_T, rope_frequencies(64, 10000.0))
    store = RowStore(FORMAT, 256, 64, CPU)
    latent_norms(LatentInputs(latent, q_norm, kv_norm, cos, sin, EPS, store, paging))
    assert not store.memory.any()


PACKED: list[tuple[int, RowFormat, int]] = [(128, Fp8Kv(64, 64), 64), (256, Fp8Kv(192, 64), 64), (384, Fp8Kv(448, 64), 64)]
PACKED += [(1024, Fp8Kv(448, 64), 64), (1536, Fp8Kv(448, 64), 64)] if ON_GPU else []
UNQUANTIZED: list[tuple[int, RowFormat, int]] = [
    (rank, UnquantizedRow(width, dtype), rope)
    for rank, width, rope in ((24, 32, 8), (130, 96, 64), (24, 66, 6), *([(1024, 512, 64)] if ON_GPU else []))
    for dtype in (torch.float32, torch.bfloat16)
]
WINDOW_TOKENS = 128 if ON_GPU else 6
KERNEL_STEPS = [([0, 63, 300], [1, 1, 1], True, 2), ([3, 60], [2, 9], False, 1), ([], [], False, 0)]
KERNEL_STEPS += [([0, 100, 3000], [1000, 900, 70], False, 5)] if ON_GPU else []


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
    given = LatentInputs(latent, *weights, *angles, 1e-6, store, paging, WINDOW_TOKENS)
    query, scales, fresh = latent_norms.reference(given) if reference else launch(latent_norms, given)
    return query, *([] if scales is None else [scales]), fresh, store.memory


@pytest.mark.kernel
@pytest.mark.parametrize(("starts", "lens", "singles", "padding"), KERNEL_STEPS)
@pytest.mark.parametrize(("rank", "fmt", "rope"), PACKED + UNQUANTIZED, ids=str)
def test_latent_norms_agree(
    rank: int, fmt: RowFormat, rope: int, starts: list[int], lens: list[int], singles: bool, padding: int
) -> None:
    drafts = [length // 3 for length in lens]
    paging = step_of(starts, lens, width=int(singles), padding=padding, drafts=drafts, device=DEVICE)
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


@pytest.mark.kernel
def test_packed_rows_start_at_multiples_of_sixteen_bytes() -> None:
    """Aligned rows are read faster."""
    _, _, fresh, _ = run(128, Fp8Kv(448, 64), 64, step_of([0], [3], device=DEVICE))
    assert fresh.shape == (3, 584) and fresh.stride() == (592, 1) and fresh.data_ptr() % 16 == 0


@pytest.mark.kernel
def test_latent_norms_do_not_depend_on_other_tokens() -> None:
    everything = run(*PACKED[-1], step_of([0], [4], device=DEVICE))
    alone = run(*PACKED[-1], step_of([0], [1], device=DEVICE))
    for many, one in zip(everything[:3], alone[:3], strict=True):
        assert torch.equal(many[:1].view(torch.uint8), one.view(torch.uint8))
