"""Multi-head latent attention over paged latent rows, in two equivalent forms.

    row t = (c_t [L], r_t [R])                  shared by all heads; a query is (q [P], p [R]), of which p is rotated
    absorbed       s_ht = scale (q_h UK_h . c_t + p_h . r_t)       o_h = UV_h (sum_t w_ht c_t)        w_h = softmax_t(s_h)
    up-projected   s_ht = scale (q_h . UK_h c_t + p_h . r_t)       o_h = sum_t w_ht (UV_h c_t)

The absorbed form reads latent rows directly and projects queries and results. The up-projected form computes keys and values of
every row, a chunk of rows at a time, and merges the chunks' results by their log-sum-exp:

    m = max(S1, S2),  w_i = exp(S_i - m),  O = (w1 O1 + w2 O2) / (w1 + w2),  S = m + ln(w1 + w2)

``absorbs`` chooses the form for each sequence by operations and bytes. Deterministic models always use the absorbed form.

Source: MLA specification 3.4 to 3.7 and 3.11.  Numerics: float32 from queries and rows to the results, one rounding to the dtype of
the queries. The two forms agree to 1e-5 of the largest result in float32. Kernels round queries in the space of latents,
probabilities and sums of latents to the dtype of the queries: in bfloat16 they agree to 2^-6 of a head's largest result, in float32
to 2^-13. On FP8 rows they take scales that are powers of two.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lite.kernels.attention import BLOCK, WIDENED_ROWS, entry_addresses, sparse_attention
from dsv4lite.kernels.dispatch import op
from dsv4lite.kernels.gemm import ROW_TILE, matmul_rows
from dsv4lite.kernels.paging import Block, Paging
from dsv4lite.kernels.rope import rope
from dsv4lite.kernels.rows import Fp8Latent, RowStore

CHUNK_ROWS = 1024  # rows that the reference up-projects at a time
ROUND_BYTES = 1 << 28  # bytes of keys and values that kernels up-project at a time
ROUND_TOKENS = 1024  # tokens whose latent queries kernels hold at a time
PLACE_ROWS = 128  # rows of a prompt begin at multiples of it, or of a divisor, in a round
CAPTURED_TOKENS = 640  # from here on, captured steps up-project rows for prompts
_FLOPS_PER_BYTE = 206  # cost model: operations per byte of memory traffic of an H200, bfloat16
_ITEM = 2  # cost model: bytes of a number
_LISTED_COST = 1.2  # cost model: time of an operation in the absorbed form with a selection, whose rows lie apart
_TOKENS = 64  # tokens that the reference processes at a time
_GATHERED_ROWS = 1 << 15  # rows that the reference reads for them, all tokens together
PROGRAMS = 132  # programs that ``splits_of`` aims at; the same on every chip, for the same bits
MOST_HEADS = 64  # most heads of one program
_MOST_SPLITS = 64
_LEAST_SHARING = 2  # with ``any_order``, sequences with so many tokens read their rows once for all


def splits_of(tokens: int, heads: int) -> int:
    """Return the number of KV splits of each token: a power of two with which a step of few tokens fills the GPU."""
    blocks = max(1, tokens) * -(-heads // MOST_HEADS)
    return 1 << (max(1, min(_MOST_SPLITS, PROGRAMS // blocks)).bit_length() - 1)


class LatentAttentionInputs(NamedTuple):
    """Arguments of ``latent_attention``.

    Attributes:
        q_THC: Queries [T, H, P + R]; the last R channels are rotated here with ``cos`` and ``sin``, or by the caller.
        rows: Rows [L + R] in grow pages, one per token, including those of this step.
        paging: Positions and pages of the tokens.
        up_HCL: Up-projections of keys, then of values, [H, P + V, L].
        rope: R.
        scale: Multiplies the logits.
        selected_TK: int32 ascending positions for every token that sees more than K; other tokens, and all tokens if it is
            ``None``, attend to every position they see.
        any_order: The order of sums may depend on the rest of the step, and each sequence uses the form that costs less.
        chunk_rows: Rows that are up-projected at a time; ``None``: ``CHUNK_ROWS`` in the reference, ``projected_rows`` in kernels.
        cos, sin: float32 [T, R / 2], angles of the tokens; ``None`` if the queries are rotated already.
    """

    q_THC: Tensor
    rows: RowStore
    paging: Paging
    up_HCL: Tensor
    rope: int
    scale: float
    selected_TK: Tensor | None = None
    any_order: bool = False
    chunk_rows: int | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None

    def angles(self) -> tuple[Tensor, Tensor]:
        """Return cos and sin [T, rope / 2]; without rotation other tensors, which kernels do not read."""
        if self.cos is None or self.sin is None:
            return self.q_THC, self.q_THC
        assert self.cos.is_contiguous() and self.sin.is_contiguous()
        return self.cos, self.sin

    @property
    def nope(self) -> int:
        """P."""
        return self.q_THC.shape[2] - self.rope

    def widens(self, tokens: int) -> bool:
        """Return whether kernels first widen all FP8 rows of the step, of which ``tokens`` tokens attend in the absorbed form."""
        rows = self.paging.grow_SP.numel() * self.rows.rows_per_page
        wanted = isinstance(self.rows.format, Fp8Latent) and self.q_THC.dtype == torch.bfloat16
        return wanted and self.paging.splits == 1 and rows <= WIDENED_ROWS * tokens

    def prompts(self) -> Tensor:
        """Return first row, number of tokens and first position of each sequence, int64 [3, S]; layers share them.

        The number is 0 for sequences that use the absorbed form; in a captured step also for those without room. The tensor is on
        the CPU, but for captured steps on the device.
        """
        return self.paging.once(("prompts", self.form), self._prompts)

    def _prompts(self) -> Tensor:
        paging, (heads, width, latent) = self.paging, self.up_HCL.shape
        if self.captured:
            rows_S, lens_S, first_S = torch.stack([paging.rows_S, paging.lens_S, paging.first_S]).long()
        else:
            rows_S, lens_S, first_S = torch.tensor(paging.spans(), dtype=torch.int64, device="cpu").view(-1, 3).T
        top_k = None if self.selected_TK is None else self.selected_TK.shape[1]
        absorbed_S = absorbs(lens_S, first_S, heads, self.nope, self.rope, width - self.nope, latent, top_k=top_k)
        absorbed_S |= (lens_S < _LEAST_SHARING) | (first_S < 0) | (not self.any_order)
        if self.captured:
            taken_S = (-(-(first_S + lens_S) // PLACE_ROWS) * PLACE_ROWS).masked_fill(absorbed_S, 0).cumsum(0)
            absorbed_S |= taken_S > captured_rows(len(self.q_THC), heads, width, self.up_HCL.element_size())
        return torch.stack([rows_S, lens_S.masked_fill(absorbed_S, 0), first_S])

    @property
    def projected(self) -> list[int]:
        """The sequences that use the up-projected form. For references, or with ``host_spans``."""
        if not self.any_order:
            return []
        return [sequence for sequence, new in enumerate(self.prompts()[1].tolist()) if new]

    @property
    def form(self) -> tuple[object, ...]:
        """What the choice of forms and the rounds of a step depend on, besides ``paging``."""
        top_k = None if self.selected_TK is None else self.selected_TK.shape[1]
        return self.up_HCL.shape, self.nope, self.q_THC.dtype, top_k, self.chunk_rows, self.rows.rows_per_page

    @property
    def captured(self) -> bool:
        """Whether the device chooses each sequence's form, for a captured step with prompts that is large enough for both."""
        unknown = self.any_order and self.paging.host_spans is None and self.paging.width == 0
        return unknown and len(self.q_THC) >= CAPTURED_TOKENS


def projected_rows(heads: int, channels: int, itemsize: int) -> int:
    """Return how many rows kernels up-project at a time; each head has ``channels`` channels of keys and values."""
    return max(CHUNK_ROWS, ROUND_BYTES // (itemsize * heads * channels))


def captured_rows(tokens: int, heads: int, channels: int, itemsize: int) -> int:
    """Return how many rows a captured step of so many tokens up-projects; sequences without room use the absorbed form."""
    return min(2 * tokens, projected_rows(heads, channels, itemsize))


def absorbs(
    new_S: Tensor, context_S: Tensor, heads: int, nope: int, rope: int, value: int, latent: int, top_k: int | None = None
) -> Tensor:
    """Return whether the absorbed form costs no more than the other, for ``new`` tokens of a sequence after ``context`` tokens.

    Tensors are int64 [S], the result bool [S].

    The cost of a form is the larger of its operations and of ``_FLOPS_PER_BYTE`` times its memory traffic. Without context the
    up-projected form never costs more. With a long context it costs less from 171 new tokens on, at the sizes of V2 and V3 and for
    any number of heads.

    With a selection of ``top_k`` rows for each token, only the absorbed form leaves out the other rows. But each of its operations
    takes ``_LISTED_COST`` times as long, and with few heads it multiplies as much as with ``MOST_HEADS``. At the sizes of V3.2 it
    costs less after a context of some 4,000 to 6,000 tokens, with 16 heads of 18,000 to 28,000.
    """
    rows, pairs = context_S + new_S, _pairs(context_S, context_S + new_S)
    projection = 2 * heads * latent * (nope + value)  # of one row, or of one query and its result
    read = _ITEM * (latent + rope)
    written = _ITEM * heads * (nope + value)  # keys and values of one row, which are read again
    listed = pairs
    if top_k is not None:
        start, end = context_S.clamp_min(top_k), rows.clamp_min(top_k)
        cost = _LISTED_COST * max(1.0, MOST_HEADS / heads)
        listed = pairs - _pairs(start, end) + cost * top_k * (end - start).double()
    absorbed = listed * 2 * heads * (2 * latent + rope) + new_S * projection, rows * read
    projected = pairs * 2 * heads * (nope + rope + value) + rows * projection, rows * (read + 2 * written)
    costs = [torch.maximum(flops, _FLOPS_PER_BYTE * moved) for flops, moved in (absorbed, projected)]
    return costs[0] <= costs[1]


def _pairs(start: Tensor, end: Tensor) -> Tensor:
    """Return how many rows the tokens from position ``start`` to ``end`` see together."""
    return (end * (end + 1) - start * (start + 1)) // 2


@op("latent_attention.triton:latent_attention_triton")
def latent_attention(given: LatentAttentionInputs) -> Tensor:
    """Attend each token's heads to its sequence; return [T, H, V] in the dtype of the queries, zeros for padding."""
    if given.cos is not None and given.sin is not None:
        given = given._replace(q_THC=rope(given.q_THC, given.cos, given.sin), cos=None, sin=None)
    q_THC, paging, up_HCL = given.q_THC, given.paging, given.up_HCL
    projected = given.projected if given.selected_TK is None else []  # with a selection only kernels gain by this form
    out_THC = q_THC.new_zeros(*q_THC.shape[:2], up_HCL.shape[1] - given.nope)
    for sequence in projected:
        begin, new, first = paging.spans()[sequence]
        out_THC[begin : begin + new] = up_projected(given, sequence, begin, new, first).to(q_THC.dtype)
    longest = max((first + new for _, new, first in paging.spans()), default=1)
    most = max(1, min(_TOKENS, _GATHERED_ROWS // max(1, longest)))
    for block in paging.blocks(most, _LEAST_SHARING if given.any_order else None):
        if block.newest >= 0 and block.sequence not in projected:
            out_THC[block.begin : block.end] = absorbed(given, block).to(q_THC.dtype)
    return out_THC if paging.padding_T is None else out_THC.masked_fill(paging.padding_T[:, None, None], 0.0)


def absorbed(given: LatentAttentionInputs, block: Block) -> Tensor:
    """Return the results of a block in the absorbed form, float32 [N, H, V]."""
    part, padding_T, row_tile = slice(block.begin, block.end), given.paging.padding_T, None if given.any_order else ROW_TILE
    q_NHC, nope, up_HCL, latent = given.q_THC[part].float(), given.nope, given.up_HCL.float(), given.up_HCL.shape[2]
    addresses, seen = _seen_rows(given, block)
    if padding_T is not None:
        seen = seen.clone()
        seen[:, 0] |= padding_T[part]
    q_latent = by_head(q_NHC[..., :nope], up_HCL[:, :nope].transpose(1, 2), row_tile)
    query = torch.cat([q_latent, q_NHC[..., nope:]], -1)
    size = None if given.any_order else BLOCK
    mixed = sparse_attention(query, given.rows.read(addresses, torch.float32), seen, None, given.scale, block=size, width=latent)
    return by_head(mixed, up_HCL[:, nope:], row_tile)


def _seen_rows(given: LatentAttentionInputs, block: Block) -> tuple[Tensor, Tensor]:
    """Return the addresses of a block's rows, and which of them each token sees; see ``attention.entry_addresses``."""
    paging, per_page, selected_TK = given.paging, given.rows.rows_per_page, given.selected_TK
    if selected_TK is not None and block.newest >= selected_TK.shape[1]:
        return entry_addresses(block, paging, 1, per_page, selected_TK[block.begin : block.end])
    if block.sequence is None and not paging.singles:  # not cached: for prompts, addresses per token take more memory than rows
        return entry_addresses(block, paging, 1, per_page, None)
    return paging.once(("latent rows", block), lambda: entry_addresses(block, paging, 1, per_page, None))


def by_head(x_NHK: Tensor, w_HCK: Tensor, row_tile: int | None) -> Tensor:
    """Return each head's ``x @ W.T``, [N, H, C]; ``row_tile`` is that of ``gemm.matmul_rows``."""
    if row_tile is None:
        return torch.einsum("nhk,hck->nhc", x_NHK, w_HCK)
    return torch.stack([matmul_rows(x_NHK[:, head], w_CK, row_tile) for head, w_CK in enumerate(w_HCK)], 1)


def up_projected(given: LatentAttentionInputs, sequence: int, begin: int, new: int, first: int) -> Tensor:
    """Return the results of one sequence's ``new`` tokens from row ``begin`` on, float32 [N, H, V], in the up-projected form."""
    q_NHC, nope, up_HCL, latent = given.q_THC[begin : begin + new].float(), given.nope, given.up_HCL.float(), given.up_HCL.shape[2]
    per_page, device = given.rows.rows_per_page, q_NHC.device
    parts = [empty_part(q_NHC[start : start + _TOKENS], up_HCL.shape[1] - nope) for start in range(0, new, _TOKENS)]
    chunk_rows = given.chunk_rows or CHUNK_ROWS
    for start in range(0, first + new, chunk_rows):
        at_R = torch.arange(start, min(start + chunk_rows, first + new), device=device)
        pages = given.paging.grow_SP[sequence].long()
        rows = given.rows.read(pages[at_R // per_page] * per_page + at_R % per_page, torch.float32)
        projected_RHC = torch.einsum("rl,hcl->rhc", rows[:, :latent], up_HCL)
        shared = rows[:, None, latent:].expand(-1, projected_RHC.shape[1], -1)
        keys, values = torch.cat([projected_RHC[..., :nope], shared], -1), projected_RHC[..., nope:]
        for number, part in enumerate(parts):
            q = q_NHC[number * _TOKENS : (number + 1) * _TOKENS]
            position_N = first + number * _TOKENS + torch.arange(len(q), device=device)
            if start <= first + number * _TOKENS + len(q) - 1:
                parts[number] = merged(part, attend(q, keys, values, at_R <= position_N[:, None], given.scale))
    return torch.cat([out for out, _ in parts])


Part = tuple[Tensor, Tensor]
"""Results over some rows, float32 [N, H, V], and the log-sum-exp of their logits [N, H]; zeros and -inf if there are no rows."""


def empty_part(q_NHC: Tensor, value: int) -> Part:
    """Return the results over no rows."""
    return q_NHC.new_zeros(*q_NHC.shape[:2], value), q_NHC.new_full(q_NHC.shape[:2], float("-inf"))


def attend(q_NHC: Tensor, keys_RHC: Tensor, values_RHV: Tensor, seen_NR: Tensor, scale: float) -> Part:
    """Return the results over the rows that each token sees."""
    logits = torch.einsum("nhc,rhc->nhr", q_NHC, keys_RHC) * scale
    logits = logits.masked_fill(~seen_NR[:, None], float("-inf"))
    sums_NH = logits.logsumexp(-1)
    p = torch.exp(logits - sums_NH[..., None].nan_to_num(neginf=0.0))
    return torch.einsum("nhr,rhv->nhv", p, values_RHV), sums_NH


def merged(one: Part, other: Part) -> Part:
    """Return the results over the rows of both; zeros if both have no rows."""
    peak = torch.maximum(one[1], other[1])
    weights = [torch.exp(sums - peak.nan_to_num(neginf=0.0)) for _, sums in (one, other)]
    total = weights[0] + weights[1]
    first, second = ((weight / total.clamp_min(torch.finfo(total.dtype).tiny))[..., None] for weight in weights)
    return first * one[0] + second * other[0], peak + total.log().nan_to_num(neginf=0.0)
