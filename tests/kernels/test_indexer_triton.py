"""Index scores and the selection on packed pages: kernels against references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4lite.kernels.indexer import IndexInputs, index_scores_paged, select_paged
from dsv4lite.kernels.quantize import round_fp8
from dsv4lite.kernels.rows import Fp4Key, Fp8Key, RowFormat, UnquantizedRow
from tests.kernels.paged import fill_store, make_paging, pages_of, simulate
from tests.kernels.tensors import DEVICE, ON_GPU

triton = pytest.importorskip("triton")

from dsv4lite.kernels.indexer.triton import ALIGNED, FEW, MOST, MOST_OF_FEW, index_scores_paged_triton, select_paged_triton  # noqa: E402

pytestmark = pytest.mark.kernel


Steps = list[tuple[int, int]]
SMALL: list[tuple[int, int, Steps, int]] = [
    (16, 8, [(200, 1), (3, 1), (31, 1)], 0),
    (16, 8, [(100, 37), (600, 2), (0, 3)], 2),
    (64, 40, [(1000, 3)], 0),
    (12, 1, [(5, 12)], 0),
]
REAL: list[tuple[int, int, Steps, int]] = [
    (64, 512, [(2040, 70), (1 << 14, 40), (100, 30)], 3),
    (64, 512, [(5000, 1), (70001, 1), (1 << 20, 1), (900, 1)], 0),
    (64, 1024, [(4000, 1000)], 0),
]


def queries(tokens: int, heads: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    iq = simulate(Fp4Key(128), torch.randn(tokens, heads, 128, generator=generator).to(torch.bfloat16))
    weights = torch.randn(tokens, 3 * heads, generator=generator)[:, heads : 2 * heads]
    return iq.to(DEVICE), weights.to(DEVICE)


def visible_of(positions_T: Tensor) -> list[int]:
    return ((positions_T + 1) // 4).tolist()


@pytest.mark.parametrize(("heads", "top_k", "steps", "padding"), SMALL + (REAL if ON_GPU else []))
def test_scores_equal_the_reference(heads: int, top_k: int, steps: Steps, padding: int) -> None:
    paging = make_paging(steps, DEVICE, padding=padding)
    visible = visible_of(paging.positions_T)
    keys = fill_store(Fp4Key(128), pages_of(paging.grow_SP), 64, DEVICE, seed=5)
    given = IndexInputs(*queries(len(visible), heads), keys, paging, top_k, max(visible), 0.011)
    got = index_scores_paged_triton(given, 0, len(visible))
    wanted = index_scores_paged.reference(given._replace(top_k=0), 0, len(visible))
    assert got.shape == wanted.shape and got.dtype == wanted.dtype == torch.bfloat16
    for t, count in enumerate(visible):
        if count > top_k:
            a, b = got[t, :count].float(), wanted[t, :count].float()
            # The order of the sums over channels and heads: a few dots round to the other neighbour, and so does the result.
            assert ((a - b).abs() <= 2**-7 * b.abs() + 2**-7 * b.abs().max()).all()
            assert (a == b).float().mean() > 0.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "width", "steps"), [(12, 16, [(100, 5), (300, 2)]), (4, 8, [(200, 1), (3, 1), (331, 1)])])
def test_scores_of_unquantized_keys_equal_the_reference(heads: int, width: int, steps: Steps, dtype: torch.dtype) -> None:
    paging, generator = make_paging(steps, DEVICE), torch.Generator().manual_seed(4)
    visible = visible_of(paging.positions_T)
    keys = fill_store(UnquantizedRow(width, dtype), pages_of(paging.grow_SP), 64, DEVICE, seed=5)
    iq = torch.randn(len(visible), heads, width, generator=generator).to(dtype).to(DEVICE)
    weights = torch.randn(len(visible), heads, generator=generator).to(dtype).to(DEVICE)
    given = IndexInputs(iq, weights, keys, paging, 8, max(visible))
    got = index_scores_paged_triton(given, 0, len(visible))
    wanted = index_scores_paged.reference(given._replace(top_k=0), 0, len(visible))
    assert got.shape == wanted.shape and got.dtype == wanted.dtype == dtype
    for t, count in enumerate(visible):
        if count > 8:
            bound = 2**-14 if dtype == torch.float32 else 2**-6
            a, b = got[t, :count].float(), wanted[t, :count].float()
            assert ((a - b).abs() <= bound * (b.abs() + b.abs().max())).all()


@pytest.mark.parametrize(("first", "last"), [(0, 5), (5, 39), (38, 42)])
def test_scores_of_some_tokens_are_those_of_all(first: int, last: int) -> None:
    paging = make_paging([(100, 37), (600, 2), (0, 3)], DEVICE)
    visible = visible_of(paging.positions_T)
    keys = fill_store(Fp4Key(128), pages_of(paging.grow_SP), 64, DEVICE, seed=5)
    given = IndexInputs(*queries(len(visible), 16), keys, paging, 8, max(visible))
    every, some = index_scores_paged_triton(given, 0, len(visible)), index_scores_paged_triton(given, first, last)
    for t in range(first, last):
        if visible[t] > 8:
            assert torch.equal(some[t - first, : visible[t]], every[t, : visible[t]])


@pytest.mark.parametrize(("heads", "first", "top_k"), [(16, 300, 8), *([(64, 9000, 512)] if ON_GPU else [])])
def test_scores_of_a_token_are_the_same_in_a_prompt_and_alone(heads: int, first: int, top_k: int) -> None:
    prompt, alone = make_paging([(first, 7)], DEVICE), make_paging([(first + i, 1) for i in range(7)], DEVICE)
    alone.grow_SP.copy_(prompt.grow_SP.expand(7, -1))
    assert alone.singles and not prompt.singles
    visible = visible_of(prompt.positions_T)
    keys = fill_store(Fp4Key(128), pages_of(prompt.grow_SP), 64, DEVICE, seed=5)
    iq, weights = queries(7, heads)
    a, b = (
        index_scores_paged_triton(IndexInputs(iq, weights, keys, paging, top_k, max(visible)), 0, 7) for paging in (prompt, alone)
    )
    for t, count in enumerate(visible):
        assert count > top_k and torch.equal(a[t, :count], b[t, :count])


def numbers(kind: str, tokens: int, count: int) -> Tensor:
    """Return scores: distinct, many equal, all equal, both zeros, infinities."""
    generator = torch.Generator().manual_seed(6)
    scores = torch.randn(tokens, count, generator=generator)
    if kind == "equal":
        scores = scores.round()
    elif kind == "constant":
        scores.fill_(-3.0)
    elif kind == "zeros":
        scores = torch.where(scores > 0, 0.0, -0.0)
    elif kind == "infinite":
        scores = torch.where(scores > 0.5, float("inf"), torch.where(scores < -0.5, float("-inf"), scores))
    return scores.to(torch.bfloat16)


def aligned(scores: Tensor) -> Tensor:
    """Return scores whose rows begin where the kernel wants them, NaN between them."""
    columns = scores.shape[1]
    return pad(scores, (0, -columns % ALIGNED.value), value=float("nan"))[:, :columns]


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        *((torch.bfloat16, kind) for kind in ("distinct", "equal", "constant", "zeros", "infinite")),
        *((torch.float32, kind) for kind in ("distinct", "equal", "zeros", "infinite")),
    ],
)
@pytest.mark.parametrize(
    ("columns", "top_k", "positions"),
    [
        (70, 64, [279, 260, 259, 258, 3]),
        (1300, 64, [5199, 4000, 300]),
        (1300, 1, [5199, -1, 3, 7]),
        (3000, 512, [11999, 2051]),
        (MOST_OF_FEW, 2048, [4 * MOST_OF_FEW - 1, 4 * 4096 + 3, 4 * 2048 - 1, 4 * 2048]),
        (MOST_OF_FEW + 1, 512, [4 * MOST_OF_FEW + 3, 4 * 4096 - 1, 4 * 4096 + 3, 2047]),
        (MOST, 512, [-1] * FEW + [4 * MOST - 1, 4 * 20000]),
        *([(1 << 18, 512, [(1 << 20) - 1, 1 << 19, 50000, 2000]), (1 << 18, 1024, [(1 << 20) - 1, 4099])] if ON_GPU else []),
    ],
)
def test_selection_equals_the_reference(columns: int, top_k: int, positions: list[int], kind: str, dtype: torch.dtype) -> None:
    paging = make_paging([(max(p, 0), 1) for p in positions], DEVICE)
    paging.positions_T.copy_(torch.tensor(positions))
    scores = numbers(kind, len(positions), columns).to(DEVICE).to(dtype)
    if dtype == torch.float32 and kind == "distinct":
        scores *= 1 + torch.rand(scores.shape, generator=torch.Generator(DEVICE).manual_seed(1), device=DEVICE)
    for t, count in enumerate(visible_of(paging.positions_T)):
        scores[t, count:] = float("nan")
    got, wanted = (torch.full((len(positions), top_k + 1), -7, dtype=torch.int32, device=DEVICE) for _ in range(2))
    got, wanted = got[:, :-1].contiguous(), wanted[:, :-1].contiguous()
    select_paged_triton(aligned(scores), paging, 4, 0, got)
    select_paged.reference(scores, paging, 4, 0, wanted)
    for t, count in enumerate(visible_of(paging.positions_T)):
        assert torch.equal(got[t], wanted[t]) if count > top_k else got[t].eq(-7).all()


def test_selection_of_later_tokens_uses_their_positions() -> None:
    paging = make_paging([(100, 1), (400, 1), (800, 1)], DEVICE)
    scores = numbers("distinct", 2, 300).to(DEVICE)
    got, wanted = (torch.zeros(2, 16, dtype=torch.int32, device=DEVICE) for _ in range(2))
    select_paged_triton(aligned(scores), paging, 4, 1, got)
    select_paged.reference(scores, paging, 4, 1, wanted)
    assert torch.equal(got, wanted) and got.max() > 150


def test_no_tokens_give_nothing() -> None:
    paging = make_paging([(100, 0)], DEVICE)
    keys = fill_store(Fp4Key(128), 1, 64, DEVICE)
    scores = index_scores_paged_triton(IndexInputs(*queries(0, 16), keys, paging, 8, 50), 0, 0)
    assert scores.shape == (0, 50)
    out = torch.empty(0, 8, dtype=torch.int32, device=DEVICE)
    assert select_paged_triton(scores, paging, 4, 0, out).shape == (0, 8)


KEYS: list[RowFormat] = [UnquantizedRow(32, torch.bfloat16), Fp8Key(32)]
KEYS += [UnquantizedRow(128, torch.bfloat16), Fp8Key(128)] if ON_GPU else []


@pytest.mark.parametrize("fmt", KEYS, ids=str)
@pytest.mark.parametrize(("top_k", "steps", "padding"), [(8, [(200, 1), (3, 1)], 0), (8, [(100, 3), (255, 2), (0, 3)], 2)])
def test_scores_in_float32_equal_the_reference(fmt: RowFormat, top_k: int, steps: Steps, padding: int) -> None:
    """As in DSA: a key for each token, and queries that are rounded as the keys."""
    paging = make_paging(steps, DEVICE, padding=padding)
    visible = (paging.positions_T + 1).tolist()
    keys = fill_store(fmt, pages_of(paging.grow_SP), 256, DEVICE, seed=5)
    generator = torch.Generator().manual_seed(4)
    iq = torch.randn(len(visible), 24, fmt.width, generator=generator).to(DEVICE)
    iq = (round_fp8(iq, fmt.width) if isinstance(fmt, Fp8Key) else iq).bfloat16()
    weights = torch.randn(len(visible), 24, generator=generator).to(DEVICE)
    given = IndexInputs(iq, weights, keys, paging, top_k, max(visible), 0.011, float32=True)
    assert given.has_kernel and given.ratio == 1
    got = index_scores_paged_triton(given, 0, len(visible))
    wanted = index_scores_paged.reference(given._replace(top_k=0), 0, len(visible))
    assert got.dtype == wanted.dtype == torch.float32
    for t, count in enumerate(visible):
        if count > top_k:
            assert ((got[t, :count] - wanted[t, :count]).abs() <= 1e-4 * wanted[t, :count].abs().max()).all()
