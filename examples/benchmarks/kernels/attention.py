"""Time attention, index scores and the selection on pages, on a CUDA device.

    python -m examples.benchmarks.kernels.attention [--sweep]

Checks a few tokens against the references first. V4-Flash's sizes; graph replays, for decoding back to back and, as in a step, with
no row in the L2 cache but queries and page numbers there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4lite.kernels.attention import AttentionInputs, paged_attention
from dsv4lite.kernels.indexer import IndexInputs, choose_paged, index_scores_paged, select_paged
from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.rope import rope_angles
from dsv4lite.kernels.rows import Fp4Key, Fp8Kv, RowFormat, RowStore
from examples.benchmarks.kernels.timing import BANDWIDTH, distance, microseconds
from tests.kernels.paged import simulate

HEADS, NOPE, TOP_K, INDEX_HEADS = 64, 448, 512, 64
CUDA = torch.device("cuda")
SPLITS = (1, 2, 4, 8, 16, 32)


def store_of(fmt: RowFormat, pages: int, rows_per_page: int) -> RowStore:
    store = RowStore(fmt, pages, rows_per_page, CUDA)
    for address in torch.arange(pages * rows_per_page, device=CUDA).split(1 << 16):
        store.write(address, torch.randn(len(address), fmt.width, device=CUDA).to(torch.bfloat16))
    return store


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step's inputs of every kind of layer."""

    paging: Paging
    q: Tensor
    fresh: Tensor
    window: RowStore
    cos: Tensor
    sin: Tensor
    sink: Tensor
    visible: Tensor

    def inputs(self, entries: RowStore | None, ratio: int, selected: Tensor | None, splits: int) -> AttentionInputs:
        rows = self.fresh, self.window, entries, replace(self.paging, splits=splits)
        return AttentionInputs(self.q, *rows, self.sink, 512**-0.5, self.cos, self.sin, ratio, selected)


def step_of(sequences: int, first: int, length: int) -> Step:
    """Return sequences of ``length`` new tokens after ``first`` old ones."""
    tokens = sequences * length
    grow, oldest = -(-(first + length) // 256), max(0, first - 127) // 64
    width = -(-(first + length) // 64) - oldest

    def ints(values: Tensor) -> Tensor:
        return values.to(torch.int32).to(CUDA)

    each = torch.arange(sequences)
    paging = Paging(
        positions_T=ints(first + torch.arange(length).repeat(sequences)),
        sequence_T=ints(each.repeat_interleave(length)),
        slots_S=ints(each),
        first_S=ints(torch.full((sequences,), first)),
        rows_S=ints(each * length),
        lens_S=ints(torch.full((sequences,), length)),
        drafts_S=ints(torch.zeros(sequences)),
        state_copy_S=ints(torch.zeros(sequences)),
        grow_SP=ints(torch.randperm(sequences * grow).view(sequences, grow)),
        window_SP=ints(torch.randperm(sequences * width).view(sequences, width)),
        window_first_S=ints(torch.full((sequences,), oldest)),
        width=length,
    )
    fmt = Fp8Kv(NOPE, 64)
    packed = torch.cat(fmt.pack(torch.randn(tokens, 512, device=CUDA).to(torch.bfloat16)), -1)
    cos, sin = rope_angles(paging.positions_T, torch.rand(32, device=CUDA))
    return Step(
        paging=paging,
        q=torch.randn(tokens, HEADS, 512, device=CUDA).to(torch.bfloat16),
        fresh=torch.empty(tokens, 592, dtype=torch.uint8, device=CUDA)[:, :584].copy_(packed),
        window=store_of(fmt, sequences * width, 64),
        cos=cos,
        sin=sin,
        sink=torch.randn(HEADS, device=CUDA),
        visible=(paging.positions_T + 1) // 4,
    )


def selection_of(visible: Tensor) -> Tensor:
    """Return random ascending entries of every token that sees more than are attended."""
    spread = torch.rand(len(visible), TOP_K, device=CUDA).sort(-1).values
    room = (visible - TOP_K).clamp_min(0)[:, None]
    return ((spread * room).floor() + torch.arange(TOP_K, device=CUDA)).to(torch.int32)


def cold_microseconds(call: Callable[[], object], step: Step) -> float:
    """Return the median time after a kernel that fills the L2 cache and kernels that touch what a step has just written."""
    filling = torch.ones(1056, 1 << 15, device=CUDA)  # 138 MB
    sums = torch.empty(len(filling), device=CUDA)
    p = step.paging
    fresh = (step.q, step.fresh, p.positions_T, p.sequence_T, p.first_S, p.rows_S, p.window_first_S, p.window_SP, p.grow_SP)

    def fill() -> None:
        torch.sum(filling, 1, out=sums)
        for tensor in fresh:
            tensor.add_(0)

    def both() -> None:
        fill()
        call()

    return microseconds(lambda _: both(), 1, calls=10) - microseconds(lambda _: fill(), 1, calls=10)


def layers(step: Step, pages: int) -> dict[str, tuple[RowStore | None, int, Tensor | None]]:
    fmt = Fp8Kv(NOPE, 64)
    return {
        "sliding": (None, 0, None),
        "csa": (store_of(fmt, pages, 64), 4, selection_of(step.visible)),
        "hca": (store_of(fmt, pages, 2), 128, None),
    }


def rows_of(step: Step, ratio: int, selected: Tensor | None) -> int:
    """Return how many rows all tokens attend to."""
    seen = step.paging.positions_T.long() + 1
    entries = seen // ratio if ratio else seen * 0
    return int((seen.clamp_max(128) + (entries if selected is None else entries.clamp_max(TOP_K))).sum())


def bench_prefill(length: int, first: int) -> None:
    step = step_of(1, first, length)
    for name, (entries, ratio, selected) in layers(step, -(-(first + length) // 256)).items():
        time = microseconds(lambda _, e=entries, r=ratio, s=selected: paged_attention(step.inputs(e, r, s, 1)), 1, calls=2)
        rate = rows_of(step, ratio, selected) * HEADS * 512 * 4 / time / 1e6
        print(f"prefill {length:6d} after {first:6d}  {name:8s} {time:9.1f} us  {rate:6.1f} TFLOP/s")


def bench_decode(sequences: int, context: int, *, sweep: bool) -> None:
    step = step_of(sequences, context - 1, 1)
    for name, (entries, ratio, selected) in layers(step, sequences * -(-context // 256)).items():
        wanted = paged_attention.reference(step.inputs(entries, ratio, selected, 1))
        found = []
        for splits in SPLITS:
            given = step.inputs(entries, ratio, selected, splits)
            error = distance(paged_attention(given), wanted)
            assert error < 1e-2, (name, splits, error)
            time = microseconds(lambda _, given=given: paged_attention(given), 1, calls=20)
            found.append((time, splits))
        roofline = rows_of(step, ratio, selected) * 584 / BANDWIDTH * 1e6
        best = min(found)
        given = step.inputs(entries, ratio, selected, best[1])
        cold = cold_microseconds(lambda given=given: paged_attention(given), step)
        every = "  ".join(f"{splits}:{time:.1f}" for time, splits in found) if sweep else ""
        print(
            f"decode {sequences:3d} x {context:7d}  {name:8s} {best[0]:7.1f} us at {best[1]:2d} splits, {cold:7.1f} cold, "
            f"roofline {roofline:6.1f}  {every}"
        )


def bench_index(sequences: int, first: int, length: int) -> None:
    step = step_of(sequences, first, length)
    tokens, entries = sequences * length, (first + length) // 4
    keys = store_of(Fp4Key(128), sequences * -(-(first + length) // 256), 64)
    iq = simulate(Fp4Key(128), torch.randn(tokens, INDEX_HEADS, 128, device=CUDA).to(torch.bfloat16))
    weights = torch.randn(tokens, INDEX_HEADS, device=CUDA).to(torch.bfloat16)
    few = slice(tokens - min(tokens, 4), tokens)
    given = IndexInputs(iq, weights, keys, step.paging, TOP_K, entries)
    got = index_scores_paged(given, few.start, few.stop)
    wanted = index_scores_paged.reference(given._replace(top_k=0), few.start, few.stop)
    for n, count in enumerate(step.visible[few].tolist()):
        assert (got[n, :count] == wanted[n, :count]).float().mean() > 0.9, "scores"
    both = microseconds(lambda _: choose_paged(given), 1)
    scores = index_scores_paged(given, 0, min(tokens, 256))
    selected = torch.empty(len(scores), TOP_K, dtype=torch.int32, device=CUDA)
    select = microseconds(lambda _: select_paged(scores, step.paging, 4, 0, selected), 1)
    print(f"index  {sequences:3d} x {length:5d} after {first:7d}  both {both:9.1f} us  selection of {len(scores)} {select:8.1f} us")


def main() -> None:
    torch.manual_seed(0)
    for length, first in ((8192, 0), (8192, 24576), (2048, 100000)):
        bench_prefill(length, first)
    for sequences, context in ((1, 1100), (1, 16000), (1, 1 << 20), (8, 1100), (8, 16000), (64, 1100), (64, 16000)):
        bench_decode(sequences, context, sweep="--sweep" in sys.argv)
    for sequences, first, length in (
        (1, 16000, 1),
        (1, (1 << 20) - 1, 1),
        (8, 16000, 1),
        (64, 16000, 1),
        (1, 0, 8192),
        (1, 100000, 2048),
    ):
        bench_index(sequences, first, length)


if __name__ == "__main__":
    main()
