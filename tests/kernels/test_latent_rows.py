"""Latent rows and index keys: what is stored, where, and what comes back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.index_keys import IndexKeyInputs, index_queries, store_index_keys
from dsv4lite.kernels.latent_rows import LatentRowInputs, store_latent_rows
from dsv4lite.kernels.rope import rope_angles, rope_frequencies
from dsv4lite.kernels.rows import Fp8Key, Fp8Latent, RowFormat, RowStore, UnquantizedRow
from tests.kernels.paged import GROW, make_paging, pages_of

CPU = torch.device("cpu")
RANK, LATENT, ROPE = 12, 32, 8
STEPS = [(0, 5), (254, 4), (600, 1)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def places(table: Tensor) -> Tensor:
    """Addresses of the steps' rows."""
    at = [(s, first + i) for s, (first, count) in enumerate(STEPS) for i in range(count)]
    return torch.tensor([int(table[s, p // GROW]) * GROW + p % GROW for s, p in at])


@pytest.mark.parametrize("rank", [0, RANK])
@pytest.mark.parametrize("form", [UnquantizedRow(LATENT + ROPE, torch.float32), Fp8Latent(LATENT, ROPE)], ids=["plain", "fp8"])
def test_rows_are_normed_latents_and_rotated_keys(rank: int, form: RowFormat) -> None:
    paging = make_paging(STEPS, CPU, padding=2)
    cos, sin = rope_angles(paging.positions_T, rope_frequencies(ROPE, 10000.0))
    store = RowStore(form, pages_of(paging.grow_SP), GROW, CPU)
    latent = random(12, rank + LATENT + ROPE)
    latent[-2:] = float("nan")
    q_norm, kv_norm = 1 + random(rank, seed=1) if rank else None, 1 + random(LATENT, seed=2)
    query = store_latent_rows(LatentRowInputs(latent, q_norm, kv_norm, cos, sin, 1e-6, store, paging))
    real = latent[:-2].double()

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    assert (query is None) == (rank == 0)
    if query is not None and q_norm is not None:
        torch.testing.assert_close(query[:-2].double(), normed(real[:, :rank], q_norm), rtol=1e-5, atol=1e-6)
    pairs = torch.view_as_complex(real[:, -ROPE:].unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(pairs * torch.complex(cos[:-2].double(), sin[:-2].double())).flatten(-2)
    wanted = torch.cat([normed(real[:, rank : rank + LATENT], kv_norm), turned], 1)
    got = store.read(places(paging.grow_SP), torch.float64)
    bound = wanted.abs() * 2**-4 + 2e-3 if isinstance(form, Fp8Latent) else wanted.abs() * 1e-5 + 1e-6
    assert ((got - wanted).abs() <= bound).all()
    written = torch.zeros(len(store.memory) * GROW, dtype=torch.bool).index_fill_(0, places(paging.grow_SP), True)
    assert store.read((~written).nonzero()[:, 0], torch.float32).eq(0).all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_of_index_keys_are_those_of_rotated_vectors(interleaved: bool) -> None:
    """FP8 keys are transformed with their queries, so that products stay."""
    paging = make_paging(STEPS, CPU, padding=1)
    cos, sin = rope_angles(paging.positions_T, rope_frequencies(ROPE, 10000.0))
    x, q, weight, bias = random(11, 32), random(11, 2, 32, seed=1), 1 + random(32, seed=2), random(32, seed=3)
    x[-1] = float("nan")
    dots = []
    for form in (UnquantizedRow(32, torch.float32), Fp8Key(32)):
        store = RowStore(form, pages_of(paging.grow_SP), GROW, CPU)
        store_index_keys(IndexKeyInputs(x, weight, bias, cos, sin, interleaved, store, paging))
        queries = index_queries(q, cos, sin, store, interleaved=interleaved)[:-1]
        dots.append(torch.einsum("thc,kc->thk", queries, store.read(places(paging.grow_SP), torch.float32)))
    k = torch.nn.functional.layer_norm(x[:-1].double(), (32,), weight.double(), bias.double(), 1e-6)
    turn = torch.complex(cos[:-1].double(), sin[:-1].double())

    def rotated(v: Tensor, angle: Tensor) -> Tensor:
        head = v[..., :ROPE].double()
        a, b = (head[..., 0::2], head[..., 1::2]) if interleaved else (head[..., : ROPE // 2], head[..., ROPE // 2 :])
        z = torch.complex(a, b) * angle
        return torch.cat([z.real, z.imag, v[..., ROPE:].double()], -1)

    wanted = torch.einsum("thc,kc->thk", rotated(q[:-1], turn[:, None]), rotated(k, turn))
    torch.testing.assert_close(dots[0].double(), wanted, rtol=1e-5, atol=1e-5)
    assert 0 < (dots[1] - dots[0]).abs().max() < 0.1 * dots[0].abs().max()
