"""Time the ops around attention at V4-Flash's shapes: ``python -m examples.benchmarks.kernels.latent`` on a CUDA device.

Checks each first. Replays a graph that walks through copies of the inputs larger than the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dsv4lite.kernels.compress import CompressInputs, compress_step, empty_state
from dsv4lite.kernels.latent_norm_store import LatentInputs, latent_norms
from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.qk_norm_rope import HeadInputs, head_norms
from dsv4lite.kernels.rope import rope_angles, rope_frequencies
from dsv4lite.kernels.rows import Fp4Key, Fp8Kv, RowFormat, RowStore
from examples.benchmarks.kernels.timing import BANDWIDTH, microseconds

ROTATED = 150 << 20
KV, KEY = Fp8Kv(448, 64), Fp4Key(128)
CUDA = torch.device("cuda")
Op = Callable[[int], object]


def step(tokens: int, singles: bool) -> Paging:
    """One token each of ``tokens`` sequences at positions that close a group, or one sequence's chunk from position 0."""

    def ints(*values: object) -> Tensor:
        return torch.tensor(*values, dtype=torch.int32, device=CUDA)

    count = tokens if singles else 1
    position = 1023
    numbers = torch.arange(tokens, dtype=torch.int32, device=CUDA)
    pages = torch.arange(count * 40, dtype=torch.int32, device=CUDA).view(count, 40)
    windows = torch.arange(count * 130, dtype=torch.int32, device=CUDA).view(count, 130)
    return Paging(
        positions_T=torch.full_like(numbers, position) if singles else numbers,
        sequence_T=numbers if singles else torch.zeros_like(numbers),
        slots_S=numbers[:count].clone(),
        first_S=ints([position if singles else 0] * count),
        rows_S=numbers[:count].clone(),
        lens_S=ints([1 if singles else tokens] * count),
        drafts_S=ints([0] * count),
        state_copy_S=ints([0] * count),
        grow_SP=pages,
        window_SP=windows,
        window_first_S=ints([0] * count),
        width=int(singles),
    )


def differing(ours: Tensor, theirs: Tensor) -> float:
    return (ours.view(torch.uint8) != theirs.view(torch.uint8)).float().mean().item()


def latent_case(paging: Paging, tokens: int, copies: int) -> tuple[Op, float, float]:
    """Return the op, the bytes it must move, and how many of its bytes differ from the reference's."""
    latent = [torch.randn(tokens, 1536, device=CUDA).bfloat16() for _ in range(copies)]
    norms = [torch.rand(size, device=CUDA) + 0.5 for size in (1024, 512)]
    angles = rope_angles(paging.positions_T, rope_frequencies(64, 10000.0).to(CUDA))
    store = RowStore(KV, paging.window_SP.numel(), 64, CUDA)
    given = [LatentInputs(x, *norms, *angles, 1e-6, store, paging) for x in latent]
    ours, theirs = latent_norms(given[0]), latent_norms.reference(given[0])
    error = max(differing(a, b) for a, b in zip(ours, theirs, strict=True))
    moved = tokens * (2 * 1536 + 1024 + 8 + 584)
    return lambda i: latent_norms(given[i]), moved, error


def heads_case(paging: Paging, tokens: int, copies: int) -> tuple[Op, float, float]:
    """The same for the heads of a csa layer."""
    query = [torch.randn(tokens, 40960, device=CUDA).bfloat16() for _ in range(copies)]
    angles = rope_angles(paging.positions_T, rope_frequencies(64, 10000.0).to(CUDA))
    shape = (64, 512, 64, 128)
    given = [HeadInputs(part, *shape, *angles, 1e-6, fp4=True) for part in query]
    ours, theirs = head_norms(given[0]), head_norms.reference(given[0])
    error = max(differing(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None)
    return lambda i: head_norms(given[i]), 4.0 * query[0].numel(), error


def compress_case(paging: Paging, tokens: int, copies: int, ratio: int, fmt: RowFormat) -> tuple[Op, float, float]:
    """The same for a compressor."""
    sets, width = 2 if ratio == 4 else 1, fmt.width
    columns = sets * width
    projected = [torch.randn(tokens, 2 * columns, device=CUDA) for _ in range(copies)]
    ape, norm = torch.randn(ratio, columns, device=CUDA), torch.rand(width, device=CUDA) + 0.5
    angles = rope_angles(paging.positions_T // ratio * ratio, rope_frequencies(64, 10000.0).to(CUDA))
    stores = [RowStore(fmt, paging.grow_SP.numel(), 256 // ratio, CUDA) for _ in range(2)]
    states = [empty_state(len(paging.slots_S), 1, sets, width, device=CUDA) for _ in range(2)]

    def call(i: int, reference: bool = False) -> None:
        op, state = compress_step.reference if reference else compress_step, (states[reference], stores[reference], paging)
        op(CompressInputs(projected[i], ape, norm, *state, ratio, *angles, 1e-6, fmt is KEY))

    call(0)
    call(0, reference=True)
    torch.testing.assert_close(*states, rtol=1e-5, atol=1e-5)
    moved = tokens * 8.0 * columns + (24.0 * states[0].shape[1] * width * tokens if paging.singles else 0)
    return call, moved, differing(stores[0].memory, stores[1].memory)


def main() -> None:
    """Print a table."""
    print(f"{'op':<14}{'tokens':>7}{'us':>9}{'TB/s':>7}{'roofline':>10}{'bytes that differ':>19}")
    for tokens, singles in ((1, True), (16, True), (64, True), (8192, False)):
        paging = step(tokens, singles)
        cases = {
            "latent": (latent_case, (), 3072),
            "heads": (heads_case, (), 81920),
            "compress 4": (compress_case, (4, KV), 8192),
            "compress key": (compress_case, (4, KEY), 2048),
            "compress 128": (compress_case, (128, KV), 4096),
        }
        for name, (make, more, row) in cases.items():
            copies = min(64, max(1, ROTATED // (tokens * row)))
            op, moved, error = make(paging, tokens, copies, *more)
            assert error < 2e-3, (name, tokens, error)
            us = microseconds(op, copies, calls=20)
            rate = moved / us * 1e6
            print(f"{name:<14}{tokens:>7}{us:>9.2f}{rate / 1e12:>7.2f}{rate / BANDWIDTH:>10.0%}{error:>19.1e}", flush=True)


if __name__ == "__main__":
    main()
