"""The kernels of the streaming pooling against their reference, and against themselves under other cuts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.compress import OVERLAP_RATIO, CompressInputs, compress_step, empty_state
from dsv4lite.kernels.rope import rope_angles, rope_frequencies
from dsv4lite.kernels.rows import Fp4Key, Fp8Key, Fp8Kv, RowFormat, RowStore, UnquantizedRow
from tests.kernels.steps import step_of
from tests.kernels.tensors import DEVICE, ON_GPU

triton = pytest.importorskip("triton")

from dsv4lite.kernels.compress.triton import SEQUENCE_TOKENS, compress_step_triton  # noqa: E402
from dsv4lite.kernels.gemm.triton import float_linear_triton  # noqa: E402

pytestmark = pytest.mark.kernel

Turn = tuple[list[int], int, int]  # lengths, padding, width
CASES: list[tuple[int, RowFormat, bool]] = [
    (4, Fp8Kv(64, 64), False),
    (4, Fp4Key(128), True),
    (4, Fp8Key(128), True),
    (4, Fp8Kv(320, 64), False),
    (16, Fp8Kv(64, 64), False),
    (4, UnquantizedRow(32, torch.float32), False),
    (8, UnquantizedRow(100, torch.bfloat16), False),
]
CASES += [(4, Fp8Kv(448, 64), False), (128, Fp8Kv(448, 64), False)] if ON_GPU else []


class Run:
    """A few sequences that advance together."""

    def __init__(self, ratio: int, fmt: RowFormat, transformed: bool, count: int, tokens: int) -> None:
        self.ratio, self.transformed, self.rope = ratio, transformed, 64 if fmt.width >= 64 else 8
        sets, width = 2 if ratio == OVERLAP_RATIO else 1, fmt.width
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(DEVICE)

        self.ape, self.norm = random(ratio, sets * width), random(width).abs() + 0.5
        self.projected = 2 * random(count, tokens, 2 * sets * width + 32)
        self.state = empty_state(count + 2, 3, sets, width, device=DEVICE)
        self.copies = [0] * count
        self.state[count:] = 7.0  # of other sequences
        self.store = RowStore(fmt, 16 * count + 1, 256 // ratio, DEVICE)
        self.store.memory.fill_(0xA5)
        self.starts = [0] * count

    def step(
        self,
        lens: list[int],
        padding: int,
        width: int,
        reference: bool = False,
        drafts: list[int] | None = None,
        before: Callable[[], object] | None = None,
    ) -> None:
        slots = [*range(1, len(lens)), 0]
        paging = step_of(
            self.starts, lens, slots=slots, drafts=drafts, copies=self.copies, padding=padding, width=width, device=DEVICE
        )
        projected = torch.full((len(paging.positions_T), self.projected.shape[2]), float("nan"), device=DEVICE)
        for rows, start, count, row in zip(self.projected, self.starts, lens, paging.rows_S.tolist(), strict=False):
            projected[row : row + count] = rows[start : start + count]
        projected = projected[:, 16:]
        angles = rope_angles(paging.positions_T // self.ratio * self.ratio, rope_frequencies(self.rope, 10000.0).to(DEVICE))
        op, state = compress_step.reference if reference else compress_step_triton, (self.state, self.store, paging)
        given = CompressInputs(projected, self.ape, self.norm, *state, self.ratio, *angles, 1e-6, self.transformed)
        self.before = None if before is None else before()  # its memory is in use until the compression is over
        op(given._replace(overlaps=before is not None))
        self.starts = [start + count for start, count in zip(self.starts, lens, strict=True)]
        self.copies = list(drafts or [0] * len(lens))

    def reject(self, counts: list[int]) -> None:
        """Go back to before the last drafts."""
        self.starts = [start - count for start, count in zip(self.starts, counts, strict=True)]
        self.copies = [copy - count for copy, count in zip(self.copies, counts, strict=True)]


def turns_of(ratio: int) -> list[Turn]:
    """Chunks that begin and end at boundaries and off them, singles across a boundary, and one of each kind together."""
    return [
        ([2 * ratio + 3, ratio, 1], 2, 0),
        *[([1, 1, 1], 2, 1)] * 3,
        ([ratio - 1, 2, 2 * ratio + 1], 0, 0),
        ([3, 2 * ratio, 1], 1, 0),
    ]


def assert_same_rows(ours: RowStore, theirs: RowStore) -> None:
    if ours.format == UnquantizedRow(ours.format.width, torch.float32):
        torch.testing.assert_close(ours.memory.view(torch.float32), theirs.memory.view(torch.float32), rtol=1e-5, atol=1e-5)
    else:
        different = (ours.memory != theirs.memory).float().mean()
        assert different <= 2e-3, different


@pytest.mark.parametrize("more", [0, SEQUENCE_TOKENS], ids=["few", "many"])
@pytest.mark.parametrize(("ratio", "fmt", "transformed"), CASES)
def test_compress_step_agrees(ratio: int, fmt: RowFormat, transformed: bool, more: int) -> None:
    turns = [(lens, padding if width else padding + more, width) for lens, padding, width in turns_of(ratio)]
    tokens = max(sum(turn[0][i] for turn in turns) for i in range(3))
    ours, theirs = (Run(ratio, fmt, transformed, 3, tokens) for _ in range(2))
    for turn in turns:
        ours.step(*turn)
        theirs.step(*turn, reference=True)
        scale = theirs.projected.abs().max()
        torch.testing.assert_close(ours.state, theirs.state, rtol=4e-6, atol=2e-6 * float(scale))
        # Rows that are not written keep their poison; of the others few codes differ, by a rounding.
        assert_same_rows(ours.store, theirs.store)
    assert (ours.store.memory != 0xA5).any()


@pytest.mark.parametrize(("ratio", "fmt", "transformed"), CASES[:2] + CASES[4:5])
def test_no_cut_changes_a_bit(ratio: int, fmt: RowFormat, transformed: bool) -> None:
    total = 3 * ratio + 2
    whole, parts, singles = (Run(ratio, fmt, transformed, 1, total) for _ in range(3))
    whole.step([total], SEQUENCE_TOKENS, 0)
    for length in (ratio - 1, 2, ratio, 1):
        parts.step([length], 1, 0)
    parts.step([total - parts.starts[0]], 0, 0)
    for _ in range(total):
        singles.step([1], 1, 1)
    for other in (parts, singles):
        assert torch.equal(other.state, whole.state)
        assert torch.equal(other.store.memory, whole.store.memory)


@pytest.mark.parametrize(
    ("paddings", "width"), [((1, 1, 1), 0), ((1, SEQUENCE_TOKENS, 1), 0), ((1, SEQUENCE_TOKENS, 1), 3)], ids=["few", "both", "wide"]
)
@pytest.mark.parametrize(("ratio", "fmt", "transformed"), CASES[:2] + CASES[4:5])
def test_rejected_drafts_leave_no_trace(
    ratio: int, fmt: RowFormat, transformed: bool, paddings: tuple[int, ...], width: int
) -> None:
    """After any drafts and rejections, in steps of few tokens or many, all state has the bits of single tokens."""
    ours, singles, theirs = (Run(ratio, fmt, transformed, 3, 3 * ratio) for _ in range(3))
    for run in (ours, singles, theirs):
        run.step([ratio - 1, 2, 1], 0, False, reference=run is theirs)
    drafted = (([2, 1, 0], [1, 0, 0]), ([2, 2, 2], [0, 1, 2]), ([1, 0, 2], [1, 0, 0]))
    for (drafts, rejected), padding in zip(drafted, paddings, strict=True):
        lens = [count + 1 for count in drafts]
        for run in (ours, theirs):
            run.step(lens, padding, width, reference=run is theirs, drafts=drafts)
        torch.testing.assert_close(ours.state, theirs.state, rtol=4e-6, atol=2e-6 * float(ours.projected.abs().max()))
        for run in (ours, theirs):
            run.reject(rejected)
    while singles.starts != ours.starts:
        lens = [int(start < end) for start, end in zip(singles.starts, ours.starts, strict=True)]
        singles.step(lens, 0, 0)
    for slot, copy in zip((1, 2, 0), ours.copies, strict=True):
        assert torch.equal(ours.state[slot, copy], singles.state[slot, 0])
    for run in (ours, singles):
        run.step([3 * ratio - start for start in run.starts], 1, 0)
    assert torch.equal(ours.store.memory, singles.store.memory)


@pytest.mark.parametrize(("ratio", "fmt", "transformed"), CASES[:1] + CASES[4:6])
def test_entries_of_many_sequences_close_side_by_side(ratio: int, fmt: RowFormat, transformed: bool) -> None:
    ours, theirs = (Run(ratio, fmt, transformed, 5, ratio) for _ in range(2))
    for run, reference in ((ours, False), (theirs, True)):
        run.step([ratio - 1] * 5, SEQUENCE_TOKENS, 0, reference=reference)
        run.step([1] * 5, SEQUENCE_TOKENS, 0, reference=reference)
    assert (ours.store.memory != theirs.store.memory).float().mean() <= 2e-3
    assert (ours.store.memory != 0xA5).any(-1).sum() == 5  # a page each


def test_step_without_tokens_changes_nothing() -> None:
    run = Run(4, Fp8Kv(64, 64), False, 1, 4)
    before = run.state.clone()
    run.step([0], 0, 0)
    run.step([0], 2, 0)
    assert torch.equal(run.state, before) and (run.store.memory == 0xA5).all()


@pytest.mark.parametrize(("ratio", "fmt", "transformed"), CASES[:2])
def test_running_at_the_same_time_as_the_launch_before_changes_no_bit(ratio: int, fmt: RowFormat, transformed: bool) -> None:
    rows, inputs, outs = (64, 4096, 2624) if ON_GPU else (2, 128, 64)
    x, w = (torch.randn(count, inputs, device=DEVICE).bfloat16() for count in (rows, outs))
    ours, theirs = (Run(ratio, fmt, transformed, 3, 2 * ratio) for _ in range(2))
    for _ in range(2 * ratio):
        ours.step([1, 1, 1], 2, 1, before=lambda: float_linear_triton(x, w, torch.float32))
        theirs.step([1, 1, 1], 2, 1)
    assert torch.equal(ours.state, theirs.state) and torch.equal(ours.store.memory, theirs.store.memory)
