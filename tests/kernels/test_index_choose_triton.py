"""The kernel that chooses entries for few tokens: it chooses as preparation, scores and selection in launches of their own do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.indexer import FEW_ENTRIES, FEW_TOKENS, choose_paged
from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.rope import rope_angles, rope_frequencies
from dsv4lite.kernels.rows import Fp4Key, RowStore
from tests.kernels.paged import fill_store, make_paging, pages_of

triton = pytest.importorskip("triton")

from dsv4lite.kernels import index_choose_triton  # noqa: E402
from dsv4lite.kernels.gemm_triton import counters_of  # noqa: E402
from dsv4lite.kernels.heads_triton import head_norms_triton  # noqa: E402
from dsv4lite.kernels.index_choose_triton import choose_few_triton, variants  # noqa: E402
from dsv4lite.kernels.indexer_triton import MOST, index_scores_paged_triton, select_paged_triton  # noqa: E402

pytestmark = pytest.mark.kernel

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
SCALE = 0.011

SMALL = [
    (16, 8, [200, 3, 31], 1, 264),
    (12, 300, [1600], 0, 264),
    (16, 64, [700, 1300], 0, 4),
]
REAL = [
    (64, 512, [1023], 0, 264),
    (64, 512, [16383], 0, 264),
    (64, 512, [5000, 32767, 2047, 2051], 3, 264),
    (64, 512, [16383 - 77 * i for i in range(FEW_TOKENS)], 0, 264),
    (64, 1024, [30000 - 999 * i for i in range(8)], 0, 264),
]


def step(heads: int, positions: list[int], padding: int) -> tuple[Tensor, Tensor, RowStore, Paging, tuple[Tensor, Tensor]]:
    """Return index queries and head weights as projected, keys, places and angles; what is padding holds NaN."""
    paging = replace(make_paging([(position, 1) for position in positions], DEVICE, padding=padding), singles=True)
    tokens, generator = len(positions) + padding, torch.Generator().manual_seed(4)
    query = torch.randn(tokens, 96 + heads * 128, generator=generator).bfloat16()
    weights = torch.randn(tokens, 3 * heads, generator=generator)
    query[len(positions) :], weights[len(positions) :] = float("nan"), float("nan")
    keys = fill_store(Fp4Key(128), pages_of(paging.grow_SP), 64, DEVICE, seed=5)
    angles = rope_angles(paging.positions_T, rope_frequencies(64, 10000.0).to(DEVICE))
    return query.to(DEVICE)[:, 96:].unflatten(1, (heads, 128)), weights.to(DEVICE)[:, heads : 2 * heads], keys, paging, angles


def apart(
    iq: Tensor, weights: Tensor, keys: RowStore, paging: Paging, top_k: int, most: int, angles: tuple[Tensor, Tensor]
) -> Tensor:
    heads = iq.shape[1]
    turned = head_norms_triton(iq.nan_to_num().flatten(1), 0, 128, heads, 128, *angles, 0.0)[1]
    assert turned is not None
    scores = index_scores_paged_triton(turned, weights, keys, paging, top_k, most, 0, SCALE)
    return select_paged_triton(scores, paging, 4, 0, torch.empty(len(iq), top_k, dtype=torch.int32, device=DEVICE))


def share_of_others(got: Tensor, wanted: Tensor) -> float:
    both = set(got.tolist()) & set(wanted.tolist())
    assert got.diff().gt(0).all() and got.numel() == wanted.numel()
    return 1 - len(both) / wanted.numel()


@pytest.mark.parametrize(("heads", "top_k", "positions", "padding", "programs"), SMALL + (REAL if CUDA else []))
def test_choice_is_that_of_separate_launches(
    heads: int, top_k: int, positions: list[int], padding: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_choose_triton, "PROGRAMS", programs)
    iq, weights, keys, paging, angles = step(heads, positions, padding)
    most = (max(positions) + 1) // 4
    got = choose_few_triton(iq, weights, keys, paging, top_k, most, SCALE, *angles)
    assert got.shape == (len(iq), top_k) and got.dtype == torch.int32 and not counters_of(DEVICE).any()
    wanted = apart(iq, weights, keys, paging, top_k, most, angles)
    reference = choose_paged(iq.cpu(), weights.cpu(), on_cpu(keys), places_on_cpu(paging), top_k, most, SCALE, angles=cpu(angles))
    for t, position in enumerate(positions):
        if (position + 1) // 4 > top_k:
            assert torch.equal(got[t], wanted[t])
            # Scores have other sums over heads, and many are equal: some at the threshold are others.
            assert share_of_others(got[t].cpu(), reference[t]) <= 0.05


def cpu(tensors: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return tensors[0].cpu(), tensors[1].cpu()


def on_cpu(keys: RowStore) -> RowStore:
    store = RowStore(keys.format, len(keys.memory), keys.rows_per_page, torch.device("cpu"))
    store.memory.copy_(keys.memory)
    return store


def places_on_cpu(paging: Paging) -> Paging:
    tables = ("positions_T", "sequence_T", "grow_SP")
    return replace(paging, **{name: getattr(paging, name).cpu() for name in tables})


def test_no_tokens_choose_nothing() -> None:
    iq, weights, keys, paging, angles = step(16, [100], 0)
    none = (part[:0] for part in angles)
    assert choose_few_triton(iq[:0], weights[:0], keys, paging, 8, 25, SCALE, *none).shape == (0, 8)


def test_every_block_is_listed() -> None:
    assert FEW_ENTRIES == MOST
    for variant in variants():
        assert {*variant.signature, *variant.constants} == set(variant.kernel.arg_names)
    blocks = {v.constants["BLOCK"] for v in variants()}
    assert blocks == {max(1024, triton.next_power_of_2(columns)) for columns in range(1, FEW_ENTRIES + 1)}
