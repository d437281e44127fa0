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
from tests.kernels.tensors import DEVICE, ON_GPU, kernel_test, launch

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
        queries = index_queries(q, cos, sin, store, interleaved=interleaved)[:-1].float()
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


KERNEL_LAYERS: list[tuple[int, RowFormat, int]] = [
    (rank, form, 8)
    for rank in (0, 130)
    for form in (UnquantizedRow(40, torch.float32), UnquantizedRow(40, torch.bfloat16), Fp8Latent(256, 8))
]
KERNEL_LAYERS += [(1536, UnquantizedRow(576, torch.bfloat16), 64), (1536, Fp8Latent(512, 64), 64)] if ON_GPU else []


@kernel_test
@pytest.mark.parametrize(("rank", "form", "rotated"), KERNEL_LAYERS, ids=str)
def test_rows_agree(rank: int, form: RowFormat, rotated: int) -> None:
    paging = make_paging(STEPS, DEVICE, padding=2)
    angles = rope_angles(paging.positions_T, rope_frequencies(rotated, 10000.0).to(DEVICE))
    dtype = form.dtype if isinstance(form, UnquantizedRow) else torch.bfloat16
    latent = (3 * random(12, rank + form.width)).to(dtype).to(DEVICE)
    latent[-2:] = float("nan")
    q_norm, kv_norm = 1 + random(rank, seed=1).to(DEVICE), 1 + random(form.width - rotated, seed=2).to(DEVICE)
    found = []
    for run in (lambda given: launch(store_latent_rows, given), store_latent_rows.reference):
        store = RowStore(form, pages_of(paging.grow_SP), GROW, DEVICE)
        store.memory.fill_(0xA5)
        given = LatentRowInputs(latent, q_norm if rank else None, kv_norm, *angles, 1e-6, store, paging)
        query = run(given)
        assert (query is None) == (rank == 0)
        found.append((latent[:0] if query is None else query[:-2], store))
    (ours, our_store), (theirs, their_store) = found
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    ours, theirs = ours.float(), theirs.float()
    assert ((ours - theirs).abs() <= (2**-6 if dtype == torch.bfloat16 else 2e-6) * theirs.abs() + 1e-6).all()
    if dtype == torch.bfloat16:
        # Numbers differ where the sum of squares moved a rounding to bfloat16.
        assert (our_store.memory != their_store.memory).float().mean() <= 1e-3
        assert not ours.numel() or (ours != theirs).float().mean() <= 1e-2
    else:
        every = torch.arange(len(our_store.memory) * GROW, device=DEVICE)
        torch.testing.assert_close(our_store.read(every, dtype), their_store.read(every, dtype), rtol=2e-6, atol=1e-6)


KEYS: list[RowFormat] = [UnquantizedRow(32, torch.float32), UnquantizedRow(32, torch.bfloat16), Fp8Key(32)]
KEYS += [UnquantizedRow(128, torch.bfloat16), Fp8Key(128)] if ON_GPU else []


@kernel_test
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("form", KEYS, ids=str)
def test_index_keys_and_queries_agree(form: RowFormat, interleaved: bool) -> None:
    paging, width = make_paging(STEPS, DEVICE, padding=2), form.width
    angles = rope_angles(paging.positions_T, rope_frequencies(width // 2, 10000.0).to(DEVICE))
    x, q = random(12, width).bfloat16().to(DEVICE), random(12, 11, width, seed=1).bfloat16().to(DEVICE)
    weight, bias = 1 + random(width, seed=2).to(DEVICE), random(width, seed=3).to(DEVICE)
    ours, theirs = (RowStore(form, pages_of(paging.grow_SP), GROW, DEVICE) for _ in range(2))
    got = launch(store_index_keys, IndexKeyInputs(x, weight, bias, *angles, interleaved, ours, paging))
    wanted = store_index_keys.reference(IndexKeyInputs(x, weight, bias, *angles, interleaved, theirs, paging))
    torch.testing.assert_close(got[:-2], wanted[:-2], rtol=1e-5, atol=1e-5)
    every = torch.arange(len(ours.memory) * GROW, device=DEVICE)
    mine, yours = (store.read(every, torch.float32) for store in (ours, theirs))
    step = {torch.float32: 1e-5, torch.bfloat16: 2**-7}[form.dtype] if isinstance(form, UnquantizedRow) else 2**-3
    assert ((mine - yours).abs() <= step * yours.abs() + 1e-2 * step * yours.abs().amax(-1, keepdim=True)).all()
    assert (mine != yours).float().mean() <= (1.0 if step == 1e-5 else 1e-2)
    rotated = launch(index_queries, q, *angles, ours, interleaved=interleaved)
    expected = index_queries.reference(q, *angles, ours, interleaved=interleaved)
    assert rotated.dtype == expected.dtype and ((rotated - expected).abs() <= step * expected.abs() + 1e-5).all()
    assert (rotated != expected).float().mean() <= 1e-2
