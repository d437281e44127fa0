"""Kernel of ``route``: one warp per token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from dsv4lite.kernels.dispatch import compiled, power_of_2
from dsv4lite.kernels.routing import Router


@triton.jit
def _score(logit):
    # Reference: scores = softplus(logits_TE).sqrt(); libdevice's functions are those that torch uses.
    if compiled():
        tail = libdevice.log1p(libdevice.exp(-tl.abs(logit)))
    else:
        # The interpreter has no log1p; the quotient corrects the rounding of 1 + e.
        e = tl.exp(-tl.abs(logit))
        rounded = 1.0 + e
        tail = tl.where(rounded == 1.0, e, tl.log(rounded) * (e / tl.where(rounded == 1.0, 1.0, rounded - 1.0)))
    return tl.sqrt_rn(tl.maximum(logit, 0.0) + tail)


@triton.jit
def _row_sums(x):
    """Return the sums of rows [R, N], N a power of two up to 64. Neighbours are added first: bits do not depend on the layout."""
    for _ in tl.static_range(6):
        if x.shape[1] > 1:
            a, b = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
            x = a + b
    return tl.reshape(x, (x.shape[0],))


@triton.jit
def best_experts(
    selection, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr, TOP_TILE: tl.constexpr
):  # fmt: skip
    """Return the ids of the experts with the largest numbers of each row [TOKENS, BLOCK]: int32 [TOKENS, TOP_TILE]."""
    # Reference: (scores + bias_E).topk(top_k)
    expert = tl.arange(0, BLOCK)[None, :]
    slot = tl.arange(0, TOP_TILE)[None, :]
    # Keys: the floats as integers in the same order; ties go to the lowest id. LAST is below all keys.
    key = selection.to(tl.int32, bitcast=True)
    key ^= (key >> 31) & 0x7FFFFFFF
    LAST: tl.constexpr = -(1 << 63)
    key = tl.where(expert < EXPERTS, (key.to(tl.int64) << 32) + (BLOCK - expert), LAST)
    ids = tl.full((selection.shape[0], TOP_TILE), EXPERTS, tl.int32)
    for k in tl.static_range(TOP_K):
        best = tl.max(key, 1)[:, None]
        key = tl.where(key == best, LAST, key)
        ids = tl.where(slot == k, BLOCK - (best & 0xFFFFFFFF).to(tl.int32), ids)
    return ids


@triton.jit
def _scores(logit, inside, SOFTMAX: tl.constexpr):
    """Return the scores of rows of logits [TOKENS, BLOCK]: softmax or sigmoid."""
    # Reference: scores_of
    if SOFTMAX:
        logit = tl.where(inside, logit, float("-inf"))
        logit -= tl.max(logit, 1)[:, None]
    else:
        logit = -logit
    power = tl.minimum(logit, 88.7)  # the exponential of 88.7 is still finite
    power = libdevice.exp(power) if compiled() else tl.exp(power)
    if SOFTMAX:
        scores = tl.div_rn(power, tl.zeros_like(power) + tl.sum(power, 1)[:, None])
    else:
        scores = tl.where(logit > 88.7, 0.0, tl.div_rn(tl.zeros_like(power) + 1.0, 1.0 + power))
    return scores


@triton.jit
def _in_top_groups(
    selection, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TILE: tl.constexpr,
    BIASED: tl.constexpr,
):  # fmt: skip
    """Return the selection [TOKENS, BLOCK] with minus infinity for experts outside of a token's groups."""
    # Reference: in_top_groups; of groups of equal rank the first are taken
    expert = tl.arange(0, BLOCK)[None, :]
    group = tl.where(expert < EXPERTS, expert // (EXPERTS // GROUPS), GROUPS)
    number = tl.arange(0, TILE)
    ranks = tl.full((selection.shape[0], TILE), float("-inf"), tl.float32)
    for g in tl.static_range(GROUPS):
        own = tl.where(group == g, selection, float("-inf"))
        best = tl.max(own, 1)
        rank = best
        if BIASED:
            first = tl.min(tl.where(own == best[:, None], expert, BLOCK), 1)
            rank += tl.max(tl.where(expert == first[:, None], float("-inf"), own), 1)
        ranks = tl.where((number == g)[None, :], rank[:, None], ranks)
    other, mine = ranks[:, None, :], ranks[:, :, None]
    before = (other > mine) | ((other == mine) & (number[None, None, :] < number[None, :, None]))
    kept = tl.sum(before.to(tl.int32), 2) < TOP_GROUPS
    kept = tl.sum((kept[:, None, :] & (group[:, :, None] == number[None, None, :])).to(tl.int32), 2)
    return tl.where(kept > 0, selection, float("-inf"))


@triton.jit
def route_rows(
    token, logits, bias, table, token_ids, positions, logits_stride, route_scale,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr, TOP_TILE: tl.constexpr, BIASED: tl.constexpr,
    FIXED: tl.constexpr, PADDED: tl.constexpr, GROUPED: tl.constexpr = False, SOFTMAX: tl.constexpr = False,
    GROUPS: tl.constexpr = 1, TOP_GROUPS: tl.constexpr = 1, GROUP_TILE: tl.constexpr = 1, RENORMALIZE: tl.constexpr = True,
):  # fmt: skip
    """Route the tokens [TOKENS]; return experts, their weights and their places in the row, [TOKENS, TOP_TILE].

    GROUPED: scores are softmax or sigmoid; only these take the constants after it.
    """
    if GROUPED:
        expert = tl.arange(0, BLOCK)[None, :]
        inside = expert < EXPERTS
        logit = tl.load(logits + token[:, None] * logits_stride + expert, mask=inside, other=0.0)
        scores = _scores(logit, inside, SOFTMAX)
        selection = scores
        if BIASED:
            selection += tl.load(bias + expert, mask=inside, other=0.0)
        if TOP_GROUPS < GROUPS:
            selection = _in_top_groups(selection, EXPERTS, BLOCK, GROUPS, TOP_GROUPS, GROUP_TILE, BIASED)
        ids = best_experts(selection, EXPERTS, BLOCK, TOP_K, TOP_TILE)
        picked = tl.sum(tl.where(ids[:, :, None] == expert[:, None, :], scores[:, None, :], 0.0), 2)
    else:
        slot = tl.arange(0, TOP_TILE)[None, :]
        used = slot < TOP_K
        logits += token[:, None] * logits_stride
        if FIXED:
            row = tl.load(token_ids + token).to(tl.int64)
            ids = tl.load(table + row[:, None] * TOP_K + slot, mask=used, other=EXPERTS).to(tl.int32)
        else:
            expert = tl.arange(0, BLOCK)[None, :]
            inside = expert < EXPERTS
            selection = _score(tl.load(logits + expert, mask=inside, other=0.0))
            if BIASED:
                selection += tl.load(bias + expert, mask=inside, other=0.0)
            ids = best_experts(selection, EXPERTS, BLOCK, TOP_K, TOP_TILE)
        picked = _score(tl.load(logits + ids, mask=used, other=0.0))
    at = tl.arange(0, TOP_TILE)
    used = (at < TOP_K)[None, :]
    # Reference: chosen_TK.sort(-1); an expert's place is the number of experts before it.
    other = ids[:, None, :]
    before = (other < ids[:, :, None]) | ((other == ids[:, :, None]) & (at[None, None, :] < at[None, :, None]))
    place = tl.sum(before.to(tl.int32), 2)
    # Reference: picked / (picked.sum(-1, keepdim=True) + _LEAST_SUM) * route_scale
    weight = picked
    if RENORMALIZE:
        total = _row_sums(tl.where(used, picked, 0.0)) + 1e-20
        weight = tl.div_rn(picked, tl.zeros_like(picked) + total[:, None])
    weight *= route_scale
    if PADDED:
        padding = (tl.load(positions + token) < 0)[:, None]
        ids = tl.where(padding, EXPERTS, ids)
        weight = tl.where(padding, 0.0, weight)
    return ids, weight, place


@triton.jit
def route_kernel(
    logits,
    bias,
    table,
    token_ids,
    positions,
    chosen,
    weights,
    logits_stride,
    route_scale,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_TILE: tl.constexpr,
    BIASED: tl.constexpr,
    FIXED: tl.constexpr,
    PADDED: tl.constexpr,
    GROUPED: tl.constexpr,
    SOFTMAX: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    ids, weight, place = route_rows(
        token, logits, bias, table, token_ids, positions, logits_stride, route_scale, EXPERTS, BLOCK, TOP_K, TOP_TILE,
        BIASED, FIXED, PADDED, GROUPED, SOFTMAX, GROUPS, TOP_GROUPS, GROUP_TILE, RENORMALIZE,
    )  # fmt: skip
    used = tl.arange(0, TOP_TILE)[None, :] < TOP_K
    at = token[:, None] * TOP_K + place
    tl.store(chosen + at, ids.to(tl.int64), mask=used)
    tl.store(weights + at, weight, mask=used)


def _router_constants(logits_TE: Tensor, router: Router) -> dict[str, int]:
    """Check a router's tensors, and return its kernel constants."""
    experts, (top_k, _, bias_E, table_VK, token_ids_T, positions_T, *_) = logits_TE.shape[1], router
    assert logits_TE.dtype == torch.float32 and logits_TE.stride(1) == 1 and top_k <= experts, (logits_TE.shape, top_k)
    assert bias_E is None or (bias_E.dtype == torch.float32 and bias_E.is_contiguous())
    assert positions_T is None or positions_T.is_contiguous()
    if table_VK is not None:
        assert table_VK.is_contiguous() and table_VK.shape[1] == top_k
        assert token_ids_T is not None and token_ids_T.is_contiguous()
    return {
        "EXPERTS": experts,
        "BLOCK": power_of_2(experts),
        "TOP_K": top_k,
        "TOP_TILE": power_of_2(top_k),
        "BIASED": bias_E is not None,
        "FIXED": table_VK is not None,
        "PADDED": positions_T is not None,
    }


def route_triton(logits_TE: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """See ``routing.route``. ``sqrtsoftplus`` needs one group and ``renormalize``; the other scores allow no table."""
    rules = (router.groups, router.renormalize, router.table_VK is None)
    assert rules[:2] == (1, True) if router.scoring == "sqrtsoftplus" else rules[2], router
    tokens, (top_k, scale, bias_E, table_VK, token_ids_T, positions_T, *_) = len(logits_TE), router
    constants = _router_constants(logits_TE, router)
    chosen = torch.empty(tokens, top_k, dtype=torch.int64, device=logits_TE.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits_TE.device)
    if tokens:
        route_kernel[(tokens,)](
            logits_TE,
            logits_TE if bias_E is None else bias_E,
            chosen if table_VK is None else table_VK,
            chosen if table_VK is None else token_ids_T,
            chosen if positions_T is None else positions_T,
            chosen,
            weights,
            logits_TE.stride(0),
            scale,
            **constants,
            GROUPED=router.scoring != "sqrtsoftplus",
            SOFTMAX=router.scoring == "softmax",
            GROUPS=router.groups,
            TOP_GROUPS=router.top_groups,
            GROUP_TILE=power_of_2(router.groups),
            RENORMALIZE=router.renormalize,
            num_warps=1,
            enable_fp_fusion=False,
        )
    return chosen, weights
