"""The latents' norms against the model's own composition of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.latent_norm_store import LatentInputs, latent_norms
from dsv4lite.kernels.norm import rms_norm
from dsv4lite.kernels.quantize import dequantize_fp8, round_fp8
from dsv4lite.kernels.rope import rope, rope_angles, rope_frequencies
from dsv4lite.kernels.rows import Fp8Kv, RowStore
from tests.kernels.paged import simulate
from tests.kernels.steps import step_of

RANK, FORMAT, EPS = 256, Fp8Kv(64, 64), 1e-6
STEPS = {
    "singles": step_of([0, 63, 64, 300], [1, 1, 1, 1], singles=True),
    "padded singles": step_of([5, 200], [1, 1], singles=True, padding=2),
    "chunks": step_of([0, 70, 3], [300, 2, 130], padding=3),
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
    store = RowStore(FORMAT, 256, 64, torch.device("cpu"))
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
        if p < int(paging.first_S[s] + paging.lens_S[s]) - 128:
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
    store = RowStore(FORMAT, 256, 64, torch.device("cpu"))
    latent_norms(LatentInputs(latent, q_norm, kv_norm, cos, sin, EPS, store, paging))
    assert not store.memory.any()
