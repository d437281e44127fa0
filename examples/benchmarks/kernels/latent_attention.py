"""Time latent attention at the sizes of V2, V3 and V3.2 on a CUDA device.

    python -m examples.benchmarks.kernels.latent_attention [--heads 128,16] [--sequences 64] [--context 8192]

Prompts take the up-projected form, first with the kernel for any chip and then with the one that the chip takes; both are compared.
Times include the projection of the rows; TFLOP/s count the products of queries that causality leaves, with all rows. Steps of one
token take the absorbed form, and are compared with the reference for one sequence; the share is that of copying the rows once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor

from dsv4lite.kernels.latent_attention import LatentAttentionInputs, latent_attention, splits_of
from dsv4lite.kernels.rope import rope_angles, rope_frequencies
from dsv4lite.kernels.rows import Fp8Latent, RowFormat, RowStore, UnquantizedRow
from dsv4lite.paging import PAGE_TOKENS
from dsv4lite.scheduling.step_plan import SequencePlan
from dsv4lite.state.paging import make_paging
from examples.benchmarks.kernels.timing import BANDWIDTH, distance, microseconds

CUDA = torch.device("cuda")
NOPE, ROPE, VALUE, LATENT = 128, 64, 128, 512
PLAIN, FP8 = UnquantizedRow(LATENT + ROPE, torch.bfloat16), Fp8Latent(LATENT, ROPE)
# Context and new tokens of each sequence, and rows that each token attends to, 0 for all.
PROMPTS: tuple[tuple[tuple[tuple[int, int], ...], int], ...] = (
    (((0, 8192),), 0),
    (((0, 8192),), 2048),
    (((0, 1024),) * 8, 0),
    (((8192, 2048),), 0),
    (((0, 2048),), 0),
)


def inputs(spans: Sequence[tuple[int, int]], heads: int, fmt: RowFormat, top_k: int = 0) -> LatentAttentionInputs:
    """Return random inputs of sequences with a context and new tokens each."""
    plans, pages = [], 0
    for index, (context, new) in enumerate(spans):
        own = -(-(context + new) // PAGE_TOKENS)
        plans.append(SequencePlan(index, index, context, (0,) * new, tuple(range(pages, pages + own)), 0, (0,), sample=True))
        pages += own
    _, paging, longest = make_paging(plans, CUDA)
    tokens, rows = len(paging.positions_T), RowStore(fmt, pages, PAGE_TOKENS, CUDA)
    rows.write(torch.arange(pages * PAGE_TOKENS, device=CUDA), torch.randn(pages * PAGE_TOKENS, LATENT + ROPE, device=CUDA))
    cos, sin = rope_angles(paging.positions_T, rope_frequencies(ROPE, 10000.0).to(CUDA))
    return LatentAttentionInputs(
        torch.randn(tokens, heads, NOPE + ROPE, device=CUDA).bfloat16(),
        rows,
        paging,
        (torch.randn(heads, NOPE + VALUE, LATENT, device=CUDA) * LATENT**-0.5).bfloat16(),
        ROPE,
        (NOPE + ROPE) ** -0.5,
        selection(paging.positions_T, top_k, longest) if top_k else None,
        any_order=True,
        cos=cos,
        sin=sin,
    )


def selection(positions_T: Tensor, top_k: int, longest: int) -> Tensor:
    """Return random ascending positions, int32 [T, K]."""
    parts = []
    for positions in positions_T.split(256):
        scores = torch.rand(len(positions), max(longest, top_k), device=CUDA)
        scores.masked_fill_(torch.arange(scores.shape[1], device=CUDA) > positions[:, None], -1.0)
        parts.append(scores.topk(top_k).indices.sort(-1).values.int())
    return torch.cat(parts)


def timed(given: LatentAttentionInputs) -> float:
    """Return the microseconds of a call; its inputs are larger than the L2 cache."""
    return microseconds(lambda _: latent_attention(given), 1)


def time_prompts(heads: int) -> None:
    """Time prompts with both kernels."""
    for spans, top_k in PROMPTS:
        given = inputs(spans, heads, PLAIN, top_k)
        assert given.projected == list(range(len(spans))), (spans, top_k)
        with patch("dsv4lite.kernels.latent_attention.prefill_triton.takes_round", lambda *_: False):
            wanted, general = latent_attention(given), timed(given)
        given.paging.derived.clear()  # which kernel takes the prompts
        assert distance(latent_attention(given), wanted) < 1e-2
        us = timed(given)
        pairs = sum((first + new) * (first + new + 1) - first * (first + 1) for first, new in spans) // 2
        flop = 2 * heads * (NOPE + ROPE + VALUE) * pairs
        name = f"{len(spans)} x {spans[0][1]} after {spans[0][0]}, {top_k or 'all'} rows"
        print(f"{heads:<6}{name:<34}{general:>10.0f}{us:>9.0f}{flop / us / 1e6:>9.0f} TFLOP/s", flush=True)


def time_decode(heads: int, sequences: int, context: int) -> None:
    """Time steps of one token for each sequence."""
    for fmt in (PLAIN, FP8):
        given = inputs([(context - 1, 1)] * sequences, heads, fmt)
        given = given._replace(paging=replace(given.paging, splits=splits_of(sequences, heads)))
        one = inputs([(context - 1, 1)], heads, fmt)
        assert distance(latent_attention(one), latent_attention.reference(one)) < 1e-2
        us = timed(given)
        share = sequences * context * fmt.data_bytes / BANDWIDTH / us * 1e6
        name = f"{sequences} x 1 after {context - 1}, {'FP8' if fmt is FP8 else 'bfloat16'}"
        print(f"{heads:<6}{name:<34}{'':>10}{us:>9.0f}{share:>9.0%} of the copy rate", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--heads", default="128,16", help="of a rank")
    parser.add_argument("--sequences", type=int, default=64, help="that decode")
    parser.add_argument("--context", type=int, default=8192, help="of each of them")
    options = parser.parse_args()
    print(f"{'heads':<6}{'':<34}{'any chip':>10}{'us':>9}")
    for heads in map(int, options.heads.split(",")):
        time_prompts(heads)
        time_decode(heads, options.sequences, options.context)


if __name__ == "__main__":
    main()
