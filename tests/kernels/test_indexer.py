"""Index scores and the selection of entries."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsv4lite.kernels import indexer
from dsv4lite.kernels.attention import union_of
from dsv4lite.kernels.gemm import ROW_TILE
from dsv4lite.kernels.indexer import IndexInputs, choose_paged, index_scores, index_scores_paged, select_entries, select_paged
from dsv4lite.kernels.rows import Fp4Key
from tests.kernels.paged import fill_store, make_paging, pages_of, simulate
from tests.kernels.tensors import cpu_random as random


def scores_of(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """The formula in float64, entry by entry."""
    keys = keys if keys.dim() == 3 else keys.expand(len(queries), -1, -1)
    out = torch.zeros(len(queries), keys.shape[1], dtype=torch.float64)
    for head in range(queries.shape[1]):
        dots = torch.einsum("nc,nec->ne", queries[:, head].double(), keys.double())
        out += weights[:, head, None].double() * dots.clamp_min(0)
    return out


@pytest.mark.parametrize("row_tile", [None, ROW_TILE])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("tokens", "entries"), [(1, 1), (7, 63), (5, 64), (3, 65), (2, 257)])
def test_scores_equal_the_formula(tokens: int, entries: int, shared: bool, row_tile: int | None) -> None:
    queries, weights = random(tokens, 12, 16), random(tokens, 12, seed=1)
    keys = random(entries, 16, seed=2) if shared else random(tokens, entries, 16, seed=2)
    got = index_scores(queries, weights, keys, row_tile=row_tile)
    assert got.dtype == torch.float32 and (weights < 0).any()
    torch.testing.assert_close(got.double(), scores_of(queries, weights, keys), rtol=0, atol=3e-5)


def test_bfloat16_scores_round_at_every_step() -> None:
    queries, weights, keys = (
        random(*shape, seed=i).to(torch.bfloat16) for i, shape in enumerate([(9, 32, 128), (9, 32), (70, 128)])
    )

    def rounded(x: Tensor) -> Tensor:
        return x.float().to(torch.bfloat16).double()

    dots = rounded(torch.einsum("nhc,ec->nhe", queries.double(), keys.double())).clamp_min(0)
    expected = rounded(rounded(dots * weights.double()[..., None]).sum(1))
    for row_tile in (None, ROW_TILE):
        got = index_scores(queries, weights, keys, row_tile=row_tile).double()
        assert torch.equal(got, got.to(torch.bfloat16).double())
        assert (got == expected).float().mean() > 0.97
        assert ((got - expected).abs() <= expected.abs() * 2.0**-6 + 1e-2).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [4, 12, 32])
def test_score_depends_on_its_query_and_key_only(heads: int, dtype: torch.dtype) -> None:
    """Not on other tokens, nor on the number of entries, nor on whether the keys are shared."""
    queries, weights, keys = random(20, heads, 16).to(dtype), random(20, heads, seed=1).to(dtype), random(150, 16, seed=2).to(dtype)
    everything = index_scores(queries, weights, keys, row_tile=ROW_TILE)
    for a, count, entries in ((0, 1, 150), (3, 2, 1), (7, 5, 63), (11, 9, 65), (19, 1, 128)):
        part = slice(a, a + count)
        got = index_scores(queries[part], weights[part], keys[:entries], row_tile=ROW_TILE)
        assert torch.equal(got, everything[part, :entries])
        own = keys[:entries].expand(count, -1, -1)
        assert torch.equal(index_scores(queries[part], weights[part], own, row_tile=ROW_TILE), got)


@given(data=st.data())
@settings(max_examples=100)
def test_selection_takes_the_best_and_of_equals_the_older(data: st.DataObject) -> None:
    tokens, entries, top_k = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 20)), data.draw(st.integers(1, 24))
    number = st.sampled_from([-2.0, -1.0, -0.0, 0.0, 0.5, 1.0, float("-inf")])
    scores = torch.tensor([[data.draw(number) for _ in range(entries)] for _ in range(tokens)]).view(tokens, entries)
    visible = [data.draw(st.integers(0, entries)) for _ in range(tokens)]
    for t, count in enumerate(visible):
        scores[t, count:] = float("nan")  # what is not visible may hold anything
    chosen, valid = select_entries(scores, torch.tensor(visible, dtype=torch.int64), top_k)
    assert chosen.shape == valid.shape == (tokens, min(top_k, entries))
    for t, count in enumerate(visible):
        row = scores[t].tolist()
        best = sorted(sorted(range(count), key=lambda e: (-row[e], e))[:top_k])
        assert chosen[t][valid[t]].tolist() == best
        assert valid[t].tolist() == [True] * len(best) + [False] * (chosen.shape[1] - len(best))


def test_no_token_sees_an_entry_that_is_not_there() -> None:
    chosen, valid = select_entries(random(3, 10), torch.zeros(3, dtype=torch.int64), 4)
    assert not valid.any() and chosen.shape == (3, 4)


@given(data=st.data())
@settings(max_examples=50)
def test_union_holds_every_choice(data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.sets(st.integers(0, 15), max_size=4), min_size=1, max_size=5))
    chosen = torch.full((len(rows), 4), 99)
    seen = torch.zeros(len(rows), 4, dtype=torch.bool)
    for i, row in enumerate(rows):
        for j, entry in enumerate(sorted(row)):
            chosen[i, j], seen[i, j] = entry, True
    union, mask = union_of(chosen, seen)
    assert union.tolist() == sorted(set().union(*rows))
    assert [{int(e) for e in union[row]} for row in mask] == rows


@pytest.mark.parametrize("score_bytes", [1, 1000, 1 << 20])
def test_choice_on_pages_is_that_of_gathered_keys(score_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer, "SCORE_BYTES", score_bytes)
    paging = make_paging([(70, 9), (300, 1), (0, 2)], torch.device("cpu"), padding=2)
    keys = fill_store(Fp4Key(128), pages_of(paging.grow_SP), 64, torch.device("cpu"), seed=7)
    queries = simulate(Fp4Key(128), random(14, 8, 128).to(torch.bfloat16))
    weights = random(14, 8, seed=1).to(torch.bfloat16)
    got = choose_paged(IndexInputs(queries, weights, keys, paging, 6, 80))
    assert got.shape == (14, 6) and got.dtype == torch.int32
    for t in range(12):
        visible = (int(paging.positions_T[t]) + 1) // 4
        if visible > 6:
            addresses = [int(paging.grow_SP[paging.sequence_T[t], e // 64]) * 64 + e % 64 for e in range(visible)]
            rows = keys.read(torch.tensor(addresses), torch.bfloat16)
            scores = index_scores(queries[t : t + 1], weights[t : t + 1], rows)
            assert torch.equal(got[t], select_entries(scores, torch.tensor([visible]), 6)[0][0].int())


def test_scores_and_selection_of_some_tokens_are_those_of_all() -> None:
    paging = make_paging([(70, 9), (300, 1)], torch.device("cpu"))
    keys = fill_store(Fp4Key(128), pages_of(paging.grow_SP), 64, torch.device("cpu"), seed=7)
    queries, weights = random(10, 8, 128).to(torch.bfloat16), random(10, 8, seed=1).to(torch.bfloat16)
    given = IndexInputs(queries, weights, keys, paging, 6, 80)
    every = index_scores_paged(given, 0, 10)
    assert every[9, :75].isfinite().all() and every[9, 75:].isinf().all()
    assert torch.equal(index_scores_paged(given, 4, 10), every[4:])
    chosen, some = (torch.zeros(n, 6, dtype=torch.int32) for n in (10, 6))
    select_paged(every, paging, 4, 0, chosen)
    assert torch.equal(select_paged(every[4:].contiguous(), paging, 4, 4, some), chosen[4:])
