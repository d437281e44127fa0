"""Rows and sums through memory of ranks in Triton's interpreter: ranks run one after the other, on buffers that all can reach."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.all_reduce import EMPTY, TURNS, Inbox
from dsv4lite.kernels.exchange import TokenRows, fits, gather_few, gather_few_ref, lengthened, scatter_few, scatter_few_ref
from dsv4lite.kernels.experts import ExpertSum

pytest.importorskip("triton")

from dsv4lite.kernels.exchange import triton as kernels
from dsv4lite.kernels.exchange.triton import BLOCK, gather_triton, scatter_triton

pytestmark = [pytest.mark.kernel, pytest.mark.skipif(torch.cuda.is_available(), reason="buffers are on the CPU")]
HIDDEN, COUNT = 1536, 2  # two blocks of a row


@dataclass(frozen=True, slots=True)
class World:
    """Buffers of some ranks, in one process."""

    buffers: list[Tensor]
    inboxes: list[Inbox]
    abandoned: Tensor

    @classmethod
    def of(cls, ranks: int) -> World:
        numbers = 2 * COUNT * 2 * BLOCK
        buffers = [torch.full((TURNS, ranks, numbers), EMPTY, dtype=torch.int32) for _ in range(ranks)]
        abandoned = torch.zeros(1, dtype=torch.int32)
        addresses = torch.tensor([x.data_ptr() for x in (*buffers, abandoned)])
        calls = [torch.zeros(numbers // BLOCK, dtype=torch.int64) for _ in range(ranks)]
        return cls(buffers, [Inbox(addresses, calls[rank], rank, numbers) for rank in range(ranks)], abandoned)

    def deliver(self, rank: int, numbers: list[Tensor], blocks: int) -> None:
        """Write what a rank will send in its next call: int32 numbers for each peer, in so many blocks."""
        for buffer, for_peer in zip(self.buffers, numbers, strict=True):
            words = buffer.view(torch.int64)
            for block, call in enumerate(self.inboxes[rank].calls[:blocks].tolist()):
                part = for_peer[block * BLOCK : (block + 1) * BLOCK].long() & 0xFFFFFFFF
                words[(call + 1) % TURNS, rank, block * BLOCK : block * BLOCK + len(part)] = part | (call + 1) << 32


def rows_of(tokens: int, seed: int) -> TokenRows:
    """Rows of all bits there are, -0.0 and NaN included."""
    rng = torch.Generator().manual_seed(seed)

    def bits(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, generator=rng, dtype=torch.uint8)

    x = bits(tokens, 2 * HIDDEN)
    x[:, :8] = torch.tensor([0, 0, 0, 128] * 2)
    ids = torch.randint(0, 1 << 31, (tokens,), generator=rng)
    positions = torch.randint(-1, 1 << 20, (tokens,), generator=rng, dtype=torch.int32)
    return TokenRows(
        x.view(torch.bfloat16), bits(tokens, HIDDEN).view(torch.float8_e4m3fn), bits(tokens, HIDDEN // 128), ids, positions
    )


def as_numbers(rows: TokenRows) -> Tensor:
    """What travels of some rows: int32, filled up to whole blocks."""
    parts = (rows.x_TD.view(torch.int32), rows.codes.view(torch.int32), rows.scales.int())
    numbers = torch.cat([*parts, rows.token_ids_T.int()[:, None], rows.positions_T.int()[:, None]], 1)
    return torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % BLOCK)).flatten()


def same(a: TokenRows, b: TokenRows) -> bool:
    return all(x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a, b, strict=True))


def parts_of(ranks: int, seed: int) -> list[ExpertSum]:
    """Outputs for the tokens of all ranks, on each; what no expert has written is anything."""
    rng, found = torch.Generator().manual_seed(seed), []
    for _ in range(ranks):
        chosen = torch.randint(0, 5, (ranks * COUNT, 2), generator=rng)  # of three here
        outputs = torch.randn(ranks * COUNT, 2, HIDDEN, generator=rng).bfloat16()
        outputs[chosen >= 3] = torch.nan
        found.append(ExpertSum(chosen, outputs, torch.randn(ranks * COUNT, HIDDEN, generator=rng).bfloat16(), 3))
    return found


def sums_of(parts: ExpertSum, ranks: int) -> list[Tensor]:
    """A rank's float32 sums as it sends them to each of its peers."""
    written = torch.where((parts.slots_TK < parts.experts)[..., None], parts.outputs_TKD, 0).float().sum(1)
    padded = torch.nn.functional.pad(written, (0, -HIDDEN % BLOCK)).view(torch.int32)
    return [part.flatten() for part in padded.chunk(ranks)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_and_sums_come_to_the_ranks_that_want_them_call_after_call(ranks: int) -> None:
    """Sums take the same places as rows; numbers of tokens change; and every rank is the late one once."""
    world = World.of(ranks)
    for number, tokens in enumerate(([2, 1, 2, 1], [1, 1, 1, 1])):
        count, late = max(tokens[:ranks]), number % ranks
        rows = [rows_of(n, 10 * number + rank) for rank, n in enumerate(tokens[:ranks])]
        others = [rank for rank in range(ranks) if rank != late]
        for rank in others:
            world.deliver(rank, [as_numbers(lengthened(rows[rank], count))] * ranks, 2 * count)
        expected = gather_few_ref(rows, count)
        assert all(same(gather_triton(rows[rank], world.inboxes[rank], count), expected) for rank in (late, *others))
        parts = parts_of(ranks, number)
        for rank in others:
            world.deliver(rank, sums_of(parts[rank], ranks), 2 * COUNT)
        for rank in (late, *others):
            found = scatter_triton(parts[rank], world.inboxes[rank], tokens[rank], torch.float32)
            close = 0 if ranks == 2 else 1e-6
            torch.testing.assert_close(found, scatter_few_ref(parts, rank, tokens[rank], torch.float32), rtol=close, atol=close)


def test_sums_are_rounded_once_and_need_no_shared_expert() -> None:
    world, parts = World.of(2), parts_of(2, 5)
    for shared in (True, False):
        given = [each if shared else each._replace(shared_TD=None) for each in parts]
        world.deliver(1, sums_of(given[1], 2), 2 * COUNT)
        found = scatter_triton(given[0], world.inboxes[0], COUNT, torch.bfloat16)
        world.inboxes[1].calls[: 2 * COUNT] += 1
        assert torch.equal(found, scatter_few_ref(given, 0, COUNT, torch.bfloat16))


def test_missing_rows_are_of_no_token() -> None:
    rows = rows_of(1, 3)
    longer = lengthened(rows, 3)
    assert same(TokenRows(*(tensor[:1] for tensor in longer)), rows)
    assert longer.positions_T[1:].tolist() == [-1, -1] and not longer.codes[1:].float().any() and lengthened(rows, 1) is rows


def test_inbox_has_a_place_for_each_number_and_its_call() -> None:
    inbox = World.of(2).inboxes[0]
    assert [fits(inbox, count, HIDDEN) for count in range(5)] == [False, True, True, False, False]


def test_nobody_waits_once_it_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_PATIENCE", 1)
    world = World.of(2)
    world.abandoned.fill_(1)
    gather_few(rows_of(1, 1), world.inboxes[0], 2)
    scatter_few(parts_of(2, 1)[0], world.inboxes[0], 2, torch.float32)
    assert world.inboxes[0].calls.tolist() == [2] * 4 + [0] * 4
