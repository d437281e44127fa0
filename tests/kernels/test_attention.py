"""Sparse attention with a sink against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.attention import BLOCK, AttentionInputs, paged_attention, sparse_attention
from dsv4lite.kernels.rope import rope, rope_angles
from dsv4lite.kernels.rows import Fp8Kv
from tests.kernels.paged import attention_bound, fill_store, make_paging, pages_of, simulate
from tests.kernels.tensors import cpu_random as random


def masks(tokens: int, rows: int, seed: int = 3) -> Tensor:
    """Random validity; every token sees at least one row of the first block, as a window always gives it."""
    generator = torch.Generator().manual_seed(seed)
    valid = torch.rand(tokens, rows, generator=generator) < torch.rand(tokens, 1, generator=generator)
    valid[torch.arange(tokens), torch.randint(min(rows, BLOCK), (tokens,), generator=generator)] = True
    return valid


def attention_of(q: Tensor, rows: Tensor, valid: Tensor, sink: Tensor, scale: float) -> Tensor:
    """One softmax over the valid rows and the sink, in float64, token by token."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for t in range(len(q)):
        seen = (rows if rows.dim() == 2 else rows[t])[valid[t]].double()
        logits = torch.cat([q[t].double() @ seen.T * scale, sink.double()[:, None]], 1)
        out[t] = logits.softmax(-1)[:, :-1] @ seen
    return out


@pytest.mark.parametrize("block", [None, 1, 8, BLOCK])
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 257])
@pytest.mark.parametrize("tokens", [1, 7])
def test_output_equals_the_formula(tokens: int, rows: int, block: int | None) -> None:
    q, kv, sink = 3 * random(tokens, 4, 32), random(tokens, rows, 32, seed=1), 2 * random(4, seed=2)
    valid = masks(tokens, rows)
    if block is not None and block < BLOCK:
        valid[:, 0] = True
    got = sparse_attention(q, kv, valid, sink, 32**-0.5, block=block)
    torch.testing.assert_close(got.double(), attention_of(q, kv, valid, sink, 32**-0.5), rtol=0, atol=3e-6)


@pytest.mark.parametrize("block", [None, BLOCK])
@pytest.mark.parametrize("rows", [1, 64, 65, 257])
def test_shared_rows_equal_the_formula(rows: int, block: int | None) -> None:
    q, kv, sink, valid = 3 * random(9, 4, 32), random(rows, 32, seed=1), 2 * random(4, seed=2), masks(9, rows)
    got = sparse_attention(q, kv, valid, sink, 32**-0.5, block=block)
    torch.testing.assert_close(got.double(), attention_of(q, kv, valid, sink, 32**-0.5), rtol=0, atol=3e-6)


@pytest.mark.parametrize("block", [None, BLOCK])
def test_no_tokens_give_no_output(block: int | None) -> None:
    q, kv, valid = torch.empty(0, 4, 32), torch.empty(0, 65, 32), torch.empty(0, 65, dtype=torch.bool)
    assert sparse_attention(q, kv, valid, torch.zeros(4), 1.0, block=block).shape == (0, 4, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [None, BLOCK])
def test_invalid_rows_may_hold_anything(block: int | None, dtype: torch.dtype) -> None:
    q, kv, sink, valid = random(7, 4, 32).to(dtype), random(7, 200, 32, seed=1).to(dtype), random(4), masks(7, 200)
    clean = sparse_attention(q, kv, valid, sink, 1.0, block=block)
    for poison in (float("nan"), float("inf"), -3e38):
        dirty = kv.masked_fill(~valid[..., None], poison)
        assert torch.equal(sparse_attention(q, dirty, valid, sink, 1.0, block=block), clean)


def test_sink_takes_what_it_is_worth() -> None:
    q, kv, valid = random(3, 2, 16), random(3, 10, 16, seed=1), torch.ones(3, 10, dtype=torch.bool)
    plain = torch.softmax(q @ kv.transpose(1, 2), -1) @ kv
    for block in (None, BLOCK):
        without = sparse_attention(q, kv, valid, torch.full((2,), float("-inf")), 1.0, block=block)
        torch.testing.assert_close(without, plain, rtol=0, atol=2e-6)
        assert sparse_attention(q, kv, valid, torch.full((2,), 1e4), 1.0, block=block).eq(0).all()


def test_huge_logits_do_not_overflow() -> None:
    q, kv, valid = 1e4 * random(3, 2, 16), random(3, 130, 16, seed=1), torch.ones(3, 130, dtype=torch.bool)
    for block in (None, BLOCK):
        got = sparse_attention(q, kv, valid, torch.zeros(2), 1.0, block=block)
        assert torch.isfinite(got).all()
        torch.testing.assert_close(got.double(), attention_of(q, kv, valid, torch.zeros(2), 1.0), rtol=0, atol=2e-3)


def test_bfloat16_rounds_probabilities_block_by_block() -> None:
    """What the official kernel does, in float64 but for its two roundings."""
    q, kv, sink = random(5, 4, 32).to(torch.bfloat16), random(5, 200, 32, seed=1).to(torch.bfloat16), random(4)
    valid = masks(5, 200)
    expected = torch.zeros(5, 4, 32, dtype=torch.float64)
    for t in range(5):
        for h in range(4):
            logits = kv[t].double() @ q[t, h].double() * 32**-0.5
            logits[~valid[t]] = float("-inf")
            peak = total = 0.0
            out = torch.zeros(32, dtype=torch.float64)
            for begin in range(0, 200, BLOCK):
                part = logits[begin : begin + BLOCK]
                new_peak = max(peak, part.max().item()) if begin else part.max().item()
                shrink = 2.718281828459045 ** (peak - new_peak) if begin else 0.0
                p = (part - new_peak).exp()
                total = total * shrink + p.sum().item()
                out = out * shrink + p.float().to(torch.bfloat16).double() @ kv[t, begin : begin + BLOCK].double()
                peak = new_peak
            expected[t, h] = out / (total + torch.exp(sink[h].double() - peak))
    got = sparse_attention(q, kv, valid, sink, 32**-0.5)
    assert got.dtype == torch.bfloat16
    assert (got == expected.to(torch.bfloat16)).float().mean() > 0.98
    assert ((got.double() - expected).norm() / expected.norm()) < 2.5e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "width"), [(1, 24), (4, 32), (16, 512)])
def test_a_token_does_not_depend_on_the_others(heads: int, width: int, dtype: torch.dtype) -> None:
    q, kv = random(24, heads, width).to(dtype), random(24, 192, width, seed=1).to(dtype)
    sink, valid = random(heads), masks(24, 192)
    everything = sparse_attention(q, kv, valid, sink, width**-0.5)
    for a in range(0, 24, 5):
        for count in (1, 2, 3, 7):
            part = slice(a, a + count)
            assert torch.equal(sparse_attention(q[part], kv[part], valid[part], sink, width**-0.5), everything[part])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "count", "width"), [(4, 128, 32), (1, 8, 8), (2, 12, 16), (4, 70, 32)])
def test_rows_that_do_not_count_change_no_bit(dtype: torch.dtype, heads: int, count: int, width: int) -> None:
    """Where rows fill no block, as those of a short window do, a library may add up otherwise with more of them."""
    q, kv, sink = random(7, heads, width).to(dtype), random(7, count, width, seed=1).to(dtype), random(heads)
    valid = masks(7, count)
    longer = torch.cat([kv, torch.full((7, 3 * BLOCK, width), float("nan"), dtype=dtype)], 1)
    more = torch.cat([valid, torch.zeros(7, 3 * BLOCK, dtype=torch.bool)], 1)
    assert torch.equal(sparse_attention(q, longer, more, sink, 0.2), sparse_attention(q, kv, valid, sink, 0.2))


@pytest.mark.parametrize(
    ("ratio", "top_k", "steps"),
    [(0, None, [(5, 3), (200, 2)]), (128, None, [(127, 2), (700, 1), (3, 1)]), (4, 9, [(30, 12), (500, 1), (0, 2)])],
)
def test_pages_are_read_as_the_formula_says(ratio: int, top_k: int | None, steps: list[tuple[int, int]]) -> None:
    """Row by row in plain Python: which rows a token sees, and where they are."""
    cpu, fmt, limit = torch.device("cpu"), Fp8Kv(64, 64), 128
    paging = make_paging(steps, cpu, padding=1)
    window = fill_store(fmt, pages_of(paging.window_SP), 64, cpu, seed=2)
    entries = fill_store(fmt, pages_of(paging.grow_SP), 256 // ratio, cpu, seed=3) if ratio else None
    tokens = len(paging.positions_T)
    new = random(tokens, 128, seed=4).to(torch.bfloat16)
    q, sink = random(tokens, 4, 128, seed=5).to(torch.bfloat16), random(4, seed=6)
    cos, sin = rope_angles(paging.positions_T, torch.rand(32))
    chosen = {t: sorted(range(0, 3 * (top_k or 0), 3)) for t in range(tokens)}
    selected = None if top_k is None else torch.tensor([chosen[t] for t in range(tokens)], dtype=torch.int32)
    fresh = torch.cat(fmt.pack(new), -1)
    got = paged_attention(AttentionInputs(q, fresh, window, entries, paging, sink, 0.1, cos, sin, ratio, selected))
    assert got[-1].eq(0).all()
    t = 0
    for s, (first, length) in enumerate(steps):
        for position in range(first, first + length):
            rows = []
            for at in range(max(0, position - limit + 1), position + 1):
                page = int(paging.window_SP[s, at // 64 - int(paging.window_first_S[s])]) if at < first else 0
                stored = window.read(torch.tensor(page * 64 + at % 64), torch.bfloat16)
                rows.append(stored if at < first else simulate(fmt, new[t + at - position]))
            visible = (position + 1) // ratio if ratio else 0
            for e in chosen[t] if top_k is not None and visible > top_k else range(visible):
                assert entries is not None
                address = int(paging.grow_SP[s, e * ratio // 256]) * (256 // ratio) + e % (256 // ratio)
                rows.append(entries.read(torch.tensor(address), torch.bfloat16))
            every = torch.stack(rows)[None]
            wanted = attention_of(q[t : t + 1], every, torch.ones(1, len(rows), dtype=torch.bool), sink, 0.1)
            turned = rope(wanted.to(torch.bfloat16), cos[t : t + 1], sin[t : t + 1], inverse=True)
            bound = 2**-7 * float(turned.abs().max())
            torch.testing.assert_close(got[t : t + 1].float(), turned.float(), rtol=2**-7, atol=bound)
            t += 1


def test_bound_holds_however_rows_are_cut() -> None:
    """Other blocks round other probabilities and come no closer, but what a pair turns to may be little, and its error is not."""
    q, rows, sink = random(16, 64, 512).bfloat16(), random(16, 384, 512, seed=1).bfloat16(), random(64, seed=2)
    valid = torch.ones(16, 384, dtype=torch.bool)
    angles = rope_angles(torch.arange(16), random(32, seed=3).abs())
    one, cut = (rope(sparse_attention(q, rows, valid, sink, 512**-0.5, block=n), *angles, inverse=True) for n in (None, 64))
    exact = rope(attention_of(q, rows, valid, sink, 512**-0.5).float(), *angles, inverse=True)
    for got, wanted in ((one, cut), (one, exact), (cut, exact)):
        assert ((got.float() - wanted.float()).abs() <= attention_bound(wanted)).all()
