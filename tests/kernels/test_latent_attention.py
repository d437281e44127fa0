"""Latent attention in both forms against a plain one in float64, on shuffled pages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.attention import entry_addresses
from dsv4lite.kernels.latent_attention import (
    LatentAttentionInputs,
    absorbed,
    absorbs,
    attend,
    by_head,
    captured_rows,
    empty_part,
    latent_attention,
    merged,
    up_projected,
)
from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.rows import Fp8Latent, RowFormat, UnquantizedRow
from tests.kernels.paged import GROW, fill_store, make_paging, pages_of

CPU = torch.device("cpu")
HEADS, NOPE, ROPE, VALUE, LATENT = 3, 16, 8, 12, 32
SCALE = 0.2
PLAIN, FP8 = UnquantizedRow(LATENT + ROPE, torch.float32), Fp8Latent(LATENT, ROPE)
STEPS = [(0, 5), (254, 3), (300, 40), (70, 1), (0, 1), (513, 200)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs(
    steps: list[tuple[int, int]] = STEPS,
    *,
    padding: int = 0,
    form: RowFormat = PLAIN,
    any_order: bool = True,
    top_k: int = 0,
    chunk: int = 100,
) -> LatentAttentionInputs:
    paging = make_paging(steps, CPU, padding=padding)
    tokens = len(paging.positions_T)
    selected: Tensor | None = None
    if top_k:
        scores = random(tokens, 1024, seed=3).masked_fill(torch.arange(1024) > paging.positions_T[:, None], float("-inf"))
        selected = scores.topk(top_k).indices.sort(-1).values.int()
    return LatentAttentionInputs(
        0.3 * random(tokens, HEADS, NOPE + ROPE, seed=1),  # whose logits are of order one
        fill_store(form, pages_of(paging.grow_SP), GROW, CPU),
        paging,
        random(HEADS, NOPE + VALUE, LATENT, seed=2) * LATENT**-0.5,
        ROPE,
        SCALE,
        selected,
        any_order,
        chunk,
    )


def plainly(given: LatentAttentionInputs) -> Tensor:
    """Multi-head attention of each token by itself, with keys and values of every row."""
    paging: Paging = given.paging
    out = torch.zeros(len(given.q_THC), HEADS, VALUE, dtype=torch.float64)
    up = given.up_HCL.double()
    for row, position in enumerate(paging.positions_T.tolist()):
        if position < 0:
            continue
        at = torch.arange(position + 1)
        if given.selected_TK is not None and position + 1 > given.selected_TK.shape[1]:
            at = given.selected_TK[row].long()
        page = paging.grow_SP[paging.sequence_T[row]].long()[at // GROW]
        rows = given.rows.read(page * GROW + at % GROW, torch.float64)
        kv = torch.einsum("rl,hcl->hrc", rows[:, :LATENT], up)
        keys = torch.cat([kv[..., :NOPE], rows[None, :, LATENT:].expand(HEADS, -1, -1)], -1)
        weights = (torch.einsum("hc,hrc->hr", given.q_THC[row].double(), keys) * SCALE).softmax(-1)
        out[row] = torch.einsum("hr,hrv->hv", weights, kv[..., NOPE:])
    return out


@pytest.mark.parametrize("any_order", [False, True])
@pytest.mark.parametrize("form", [PLAIN, FP8], ids=["plain", "fp8"])
@pytest.mark.parametrize("top_k", [0, 7])
def test_every_token_attends_to_its_sequence_or_its_selection(any_order: bool, form: RowFormat, top_k: int) -> None:
    given = inputs(form=form, any_order=any_order, top_k=top_k, padding=3)
    got, wanted = latent_attention(given), plainly(given)
    assert (got - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert got[-3:].eq(0).all() and got[:-3].abs().amax((1, 2)).min() > 0


@pytest.mark.parametrize("step", [(0, 1), (0, 2), (0, 130), (255, 2), (300, 40), (513, 200)])
@pytest.mark.parametrize("chunk", [1, 7, 64, 100, 4096])
def test_forms_agree_however_the_context_is_cut(step: tuple[int, int], chunk: int) -> None:
    given = inputs([(3, 2), step], chunk=chunk)
    first, new = step
    wide = up_projected(given, 1, 2, new, first)
    blocks = [block for block in given.paging.blocks(64, 2) if block.sequence != 0]
    narrow, wanted = torch.cat([absorbed(given, block) for block in blocks])[-new:], plainly(given)[2:]
    bound = 1e-5 * wanted.abs().max()
    assert (wide - narrow).abs().max() < bound and (wide - wanted).abs().max() < bound


def test_deterministic_results_depend_on_the_token_alone() -> None:
    every = inputs(any_order=False)
    out, row = latent_attention(every), 0
    for sequence, (first, new) in enumerate(STEPS):
        for count in {1, min(2, new), new}:
            steps = [(0, 1)] * sequence + [(first, count)]
            paging = replace(make_paging(steps, CPU), grow_SP=every.paging.grow_SP[[0] * sequence + [sequence]])
            alone = every._replace(q_THC=torch.cat([every.q_THC[:sequence], every.q_THC[row : row + count]]), paging=paging)
            assert torch.equal(latent_attention(alone)[sequence:], out[row : row + count])
        row += new


def test_unused_rows_may_hold_anything() -> None:
    given = inputs([(0, 5), (300, 40), (70, 1)])
    wanted, used = latent_attention(given), set()
    for sequence, (first, new) in enumerate([(0, 5), (300, 40), (70, 1)]):
        used |= {int(given.paging.grow_SP[sequence, at // GROW]) * GROW + at % GROW for at in range(first + new)}
    rest = torch.tensor(sorted(set(range(given.rows.memory.shape[0] * GROW)) - used))
    given.rows.write(rest, torch.full((len(rest), LATENT + ROPE), float("nan")))
    assert torch.equal(latent_attention(given), wanted)


def chosen(spans: list[tuple[int, int]], *sizes: int, top_k: int | None = None) -> list[bool]:
    """Return which numbers of new tokens, after so many tokens of context, use the absorbed form."""
    new_S, context_S = torch.tensor(spans).T
    return absorbs(new_S, context_S, *sizes, top_k=top_k).tolist()


@pytest.mark.parametrize("heads", [16, 128])
def test_up_projection_pays_from_171_new_tokens_on_a_long_context(heads: int) -> None:
    spans = [(170, 1 << 20), (171, 1 << 20), (1, 1), (8, 100_000)]
    assert chosen(spans, heads, 128, 64, 128, 512) == [True, False, True, True]


@pytest.mark.parametrize("heads", [16, 128])
def test_prompts_without_context_are_up_projected(heads: int) -> None:
    assert not any(chosen([(2, 0), (20, 0), (170, 0), (2048, 0)], heads, 128, 64, 128, 512))


def test_selections_pay_in_long_contexts() -> None:
    """The up-projected form reads all rows; with few heads their products cost less, those of the absorbed form do not."""
    wide, narrow = ((heads, 128, 64, 128, 512) for heads in (128, 16))
    short, longer = [(8192, 0), (2048, 0), (1000, 5000)], [(8192, 8192), (1000, 9000), (300, 5000)]
    longest = [(8192, 1 << 16), (16, 5000), (1, 3000)]
    assert not any(chosen(short, *wide, top_k=2048) + chosen(short, *narrow, top_k=2048))
    assert all(chosen(longer, *wide, top_k=2048)) and not any(chosen(longer, *narrow, top_k=2048))
    assert all(chosen(longest, *wide, top_k=2048) + chosen(longest, *narrow, top_k=2048))
    unselected = [(170, 1 << 20), (171, 1 << 20), (2000, 0)]  # no token sees more rows than a selection has
    assert chosen(unselected, *wide, top_k=1 << 21) == chosen(unselected, *wide)


def test_prompts_of_a_captured_step_fit_or_are_absorbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has room for the rows of 2 T tokens, each sequence's rounded up; padding and single tokens need none."""
    monkeypatch.setattr("dsv4lite.kernels.latent_attention._FLOPS_PER_BYTE", 0)
    monkeypatch.setattr("dsv4lite.kernels.latent_attention.CAPTURED_TOKENS", 100)
    step = inputs([(0, 100), (5, 1), (0, 20), (200, 90), (0, 2)], any_order=True)
    assert step.captured and step.projected == [0, 2]  # 128 and 128 of 426 rows; 384 more do not fit, so no later one does
    known = step._replace(paging=replace(step.paging, host_spans=tuple(step.paging.spans())))
    assert not known.captured and known.projected == [0, 2, 3, 4]
    assert not step._replace(any_order=False).captured and not inputs([(0, 1)] * 200, any_order=True).captured
    assert not inputs([(0, 99)], any_order=True).captured
    assert [captured_rows(tokens, 128, 256, 2) for tokens in (640, 2048, 4096)] == [1280, 4096, 4096]


def test_parts_over_no_rows_change_nothing() -> None:
    q, keys, values = random(4, 2, 8), random(5, 2, 8, seed=1), random(5, 2, 3, seed=2)
    seen = torch.tensor([[True] * 5, [False] * 5, [True] + [False] * 4, [False, True] * 2 + [False]])
    part = attend(q, keys, values, seen, 0.5)
    nothing = empty_part(q, 3)
    assert part[0][1].eq(0).all() and part[1][1].eq(float("-inf")).all()
    for both in (merged(part, nothing), merged(nothing, part)):
        torch.testing.assert_close(both[0], part[0])
        torch.testing.assert_close(both[1], part[1])
    out, sums = merged(nothing, nothing)
    assert out.eq(0).all() and sums.eq(float("-inf")).all()


def test_merged_parts_are_attention_over_both() -> None:
    q, keys, values = random(4, 2, 8), 40 * random(9, 2, 8, seed=1), random(9, 2, 3, seed=2)
    seen = random(4, 9, seed=3) > -1
    whole = attend(q, keys, values, seen, 0.5)
    first, rest = (attend(q, keys[cut], values[cut], seen[:, cut], 0.5) for cut in (slice(0, 4), slice(4, 9)))
    for got, wanted in zip(merged(first, rest), whole, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("row_tile", [None, 16])
def test_products_by_head_are_those_of_each_head(row_tile: int | None) -> None:
    x, w = random(21, 3, 8), random(3, 5, 8, seed=1)
    wanted = torch.stack([x[:, head] @ w[head].T for head in range(3)], 1)
    torch.testing.assert_close(by_head(x, w, row_tile), wanted)


def test_rows_of_a_block_are_those_of_its_sequences() -> None:
    given = inputs([(2, 1), (260, 1)])
    (block,) = given.paging.blocks(64, 2)
    addresses, seen = entry_addresses(block, given.paging, 1, GROW, None)
    assert addresses.shape == (2, 261) and seen.sum(1).tolist() == [3, 261]
    assert int(addresses[1, 260]) == int(given.paging.grow_SP[1, 1]) * GROW + 4


def test_gradients_reach_queries_and_up_projections() -> None:
    for any_order in (False, True):
        given = inputs([(1, 9), (20, 3)], any_order=any_order)
        given = given._replace(q_THC=given.q_THC.requires_grad_(), up_HCL=given.up_HCL.requires_grad_())
        latent_attention(given).square().sum().backward()
        assert given.q_THC.grad is not None and given.q_THC.grad.abs().amax((1, 2)).min() > 0
        assert given.up_HCL.grad is not None and given.up_HCL.grad.abs().max() > 0
