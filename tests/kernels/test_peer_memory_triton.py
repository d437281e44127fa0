"""The collectives' kernels in Triton's interpreter: ranks run one after the other, on buffers that all of them reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4lite.kernels.experts import ExpertSum
from dsv4lite.kernels.peer_memory import (
    BLOCK,
    EMPTY,
    TURNS,
    Inbox,
    TokenRows,
    all_gather,
    all_gather_columns,
    all_gather_ref,
    all_gather_shards,
    all_reduce,
    all_reduce_ref,
    all_reduce_shards,
    lengthened,
    most_rows,
    part_of_experts,
    reduce_scatter,
    reduce_scatter_ref,
    reduce_scatter_shards,
    shard_numbers,
)
from dsv4lite.parallel.mesh import Axis
from dsv4lite.parallel.peer_memory import PeerMemory

pytest.importorskip("triton")

from dsv4lite.kernels.peer_memory import triton as kernels

pytestmark = [pytest.mark.kernel, pytest.mark.skipif(torch.cuda.is_available(), reason="buffers are on the CPU")]
HIDDEN, COUNT = 1536, 2  # two blocks of a row
NUMBERS = 2 * COUNT * 2 * BLOCK
SHARD = 5440  # numbers of a shard that such an inbox takes: two thirds, down to a multiple of 32


@dataclass(frozen=True, slots=True)
class World:
    """Buffers of some ranks, in one process."""

    buffers: list[Tensor]
    inboxes: list[Inbox]
    abandoned: Tensor

    @classmethod
    def of(cls, ranks: int) -> World:
        buffers = [torch.full((TURNS, ranks, NUMBERS), EMPTY, dtype=torch.int32) for _ in range(ranks)]
        abandoned = torch.zeros(1, dtype=torch.int32)
        addresses = torch.tensor([x.data_ptr() for x in (*buffers, abandoned)])
        calls = [torch.zeros(NUMBERS // BLOCK, dtype=torch.int64) for _ in range(ranks)]
        tickets = torch.zeros(1, dtype=torch.int32)
        return cls(buffers, [Inbox(addresses, calls[rank], tickets, rank, NUMBERS) for rank in range(ranks)], abandoned)

    def shards(self, call: int, rank: int) -> dict[int, Tensor]:
        """Return by peer the place at which a rank's numbers arrive in a call; a rank sends nothing to itself."""
        ranks = len(self.buffers)
        views = [buffer.flatten()[: TURNS * (ranks - 1) * NUMBERS].view(TURNS, ranks - 1, NUMBERS) for buffer in self.buffers]
        return {peer: view[call % TURNS, (rank - peer - 1) % ranks] for peer, view in enumerate(views) if peer != rank}

    def deliver(self, rank: int, part: Tensor) -> None:
        """Write what a rank will send in its next ``all_reduce``."""
        bits = part.view(torch.int32)
        for block, call in enumerate(self.inboxes[rank].calls.tolist()):
            places = slice(block * BLOCK, min(len(part), (block + 1) * BLOCK))
            for buffer in self.buffers if places.start < len(part) else ():
                buffer[call % TURNS, rank, places] = torch.where(bits[places] == EMPTY, 0, bits[places])

    def deliver_words(self, rank: int, numbers: Sequence[Tensor]) -> None:
        """Write what a rank will send in its next other call: int32 numbers for each peer, whole blocks."""
        for buffer, for_peer in zip(self.buffers, numbers, strict=True):
            words = buffer.view(torch.int64)
            calls = self.inboxes[rank].calls[: len(for_peer) // BLOCK].tolist()
            for block, call in enumerate(calls):
                places = slice(block * BLOCK, (block + 1) * BLOCK)
                words[(call + 1) % TURNS, rank, places] = for_peer[places].long() & 0xFFFFFFFF | (call + 1) << 32


def parts_of(ranks: int, count: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(count, generator=generator) for _ in range(ranks)]
    for part, first in zip(parts, ([-0.0, 0.0, -0.0], [-0.0, -0.0, 1.5]), strict=False):
        part[:3] = torch.tensor(first)[:count]
    return parts


def experts_of(ranks: int, tokens: int, hidden: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> list[ExpertSum]:
    """Outputs of three experts on each rank; what no expert has written is anything."""
    rng, found = torch.Generator().manual_seed(seed), []
    for _ in range(ranks):
        chosen = torch.randint(0, 5, (tokens, 3), generator=rng)
        outputs = torch.randn(tokens, 3, hidden, generator=rng)
        outputs[chosen >= 3] = torch.nan
        found.append(ExpertSum(chosen, outputs.to(dtype), torch.randn(tokens, hidden, generator=rng).to(dtype), 3))
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_reduce_adds_up_parts_of_any_size_call_after_call(ranks: int) -> None:
    """Blocks are used in different numbers of calls, and every rank is the late one once."""
    world = World.of(ranks)
    for number, count in enumerate((17, 3 * BLOCK, BLOCK + 5, 1)):
        parts, late = parts_of(ranks, count, number), number % ranks
        others = [rank for rank in range(ranks) if rank != late]
        for rank in others:
            world.deliver(rank, parts[rank])
        found = [all_reduce_part(world, rank, parts[rank]) for rank in (late, *others)]
        assert all(torch.equal(x, found[0]) for x in found)
        close = 0 if ranks == 2 else 1e-6
        torch.testing.assert_close(found[0], all_reduce_ref(parts, torch.float32), rtol=close, atol=close)


def all_reduce_part(world: World, rank: int, part: Tensor) -> Tensor:
    return all_reduce(part, world.inboxes[rank], torch.float32)


def deliver_shards(world: World, sender: int, parts: list[Tensor]) -> None:
    """Write what a rank will send in its next ``all_reduce_shards``: its parts of all other shards, and the sums of its own."""
    ranks, size, sums = len(parts), len(parts[0]), SHARD
    shard = -(-size // (ranks * BLOCK)) * BLOCK
    totals = pad(all_reduce_ref(parts, torch.bfloat16), (0, ranks * shard - size)).view(torch.int32)
    for block, call in enumerate(world.inboxes[sender].calls[: shard // BLOCK].tolist()):
        for peer, slot in world.shards(call, sender).items():
            begin = peer * shard + block * BLOCK
            mine = (parts[sender] + 0.0).view(torch.int32)[begin : begin + BLOCK]
            slot[block * BLOCK : block * BLOCK + len(mine)] = mine
            begin = (sender * shard + block * BLOCK) // 2
            words = totals[begin : min(begin + BLOCK // 2, size // 2)]
            slot[sums + block * BLOCK // 2 :][: len(words)] = words


@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_of_a_sum_come_to_all_ranks_call_after_call(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls fill the inbox once or several times, blocks are used in different numbers of calls, and buffers are cleared."""
    world = World.of(ranks)
    monkeypatch.setattr(kernels, "_RESIDENT", 0 if ranks == 2 else 8)  # blocks are given out as programs start, or not
    rows = ranks * (SHARD // BLOCK) * BLOCK // 512  # that fill the inbox
    for number, count in enumerate((rows, 3, rows - 1, 5, rows)):
        parts, late = parts_of(ranks, count * 512, number), number % ranks
        others = [rank for rank in range(ranks) if rank != late]
        for rank in others:
            deliver_shards(world, rank, parts)
        found = [all_reduce_shards(parts[rank].view(count, 512), world.inboxes[rank]) for rank in (late, *others)]
        assert all(torch.equal(x, found[0]) for x in found)
        close = 0 if ranks == 2 else 2**-7
        torch.testing.assert_close(found[0].flatten(), all_reduce_ref(parts, torch.bfloat16), rtol=close, atol=close)
        for rank, inbox in enumerate(world.inboxes):  # of the first block; the others had fewer calls
            last = int(inbox.calls[0])
            assert last == number + 1
            for call in (last - 2, last):
                assert all((slot[:BLOCK] == EMPTY).all() for slot in world.shards(call, rank).values())


def deliver_columns(world: World, sender: int, part: Tensor) -> None:
    """Write what a rank will send in its next ``all_gather_columns``."""
    bits = torch.where(part.view(torch.int32) == EMPTY, 0, part.view(torch.int32)).flatten()
    for block, call in enumerate(world.inboxes[sender].calls[: -(-len(bits) // BLOCK)].tolist()):
        places = slice(block * BLOCK, min(len(bits), (block + 1) * BLOCK))
        for slot in world.shards(call, sender).values():
            slot[places] = bits[places]


@pytest.mark.parametrize("ranks", [2, 4])
def test_columns_come_to_all_ranks_between_shards_of_sums(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ops use one inbox: each clears what the other has left, in blocks of which they have used different numbers."""
    world = World.of(ranks)
    monkeypatch.setattr(kernels, "_RESIDENT", 0 if ranks == 2 else 8)
    for number, (count, columns) in enumerate(((7, 700), (0, 0), (3, 11), (2, 2 * BLOCK), (0, 0), (1, 3), (5, 1000))):
        late = number % ranks
        order = [late, *(rank for rank in range(ranks) if rank != late)]
        parts = parts_of(ranks, count * columns or 3 * 512 * ranks, number)
        for rank in order[1:]:
            if count:
                deliver_columns(world, rank, parts[rank].view(count, columns))
            else:
                deliver_shards(world, rank, parts)
        if count:
            wanted = torch.cat([part.view(count, columns) for part in parts], 1)
            out = torch.empty_like(wanted)
            found = [all_gather_columns(parts[rank].view(count, columns), world.inboxes[rank], out) for rank in order[:1]]
            found += [all_gather_columns(parts[rank].view(count, columns), world.inboxes[rank]) for rank in order[1:]]
            assert found[0] is out
        else:
            wanted = all_reduce_ref(parts, torch.bfloat16).view(-1, 512)
            found = [all_reduce_shards(parts[rank].view(-1, 512), world.inboxes[rank]) for rank in order]
        close = 2**-7 if not count and ranks > 2 else 0
        for x in found:
            torch.testing.assert_close(x, wanted, rtol=close, atol=close)


def deliver_rows(world: World, sender: int, parts: list[Tensor]) -> None:
    """Write what a rank will send in its next ``reduce_scatter_shards``, of one launch: its parts of all other ranks' rows."""
    count = -(-len(parts[0]) // len(parts))
    rows = pad(parts[sender] + 0.0, (0, 0, 0, len(parts) * count - len(parts[0]))).view(torch.int32).view(len(parts), -1)
    for block, call in enumerate(world.inboxes[sender].calls[: rows.shape[1] // BLOCK].tolist()):
        places = slice(block * BLOCK, (block + 1) * BLOCK)
        for peer, slot in world.shards(call, sender).items():
            slot[places] = rows[peer, places]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_add_and_gather_their_rows_between_sums_of_all(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ops of shards use one inbox, and each clears what the others have left; the last rank has fewer rows, or none."""
    world = World.of(ranks)
    monkeypatch.setattr(kernels, "_RESIDENT", 0 if ranks == 2 else 8)
    for number, tokens in enumerate((4 * ranks, 3 * ranks + 1, 2, 5 * ranks, ranks + 1)):
        order = [(number + i) % ranks for i in range(ranks)]
        parts = [part.view(tokens, BLOCK) for part in parts_of(ranks, tokens * BLOCK, number)]
        also = parts[order[0]] * 3 if number % 2 else None
        for rank in order[1:]:
            deliver_rows(world, rank, parts)
        mine = {order[0]: reduce_scatter_shards(parts[order[0]], world.inboxes[order[0]], also)}
        for rank in order[1:]:
            mine[rank] = reduce_scatter_shards(parts[rank], world.inboxes[rank])
        if also is not None:
            parts[order[0]] = parts[order[0]] + also
        every = torch.cat([mine[rank] for rank in range(ranks)])
        close = 2**-7 if ranks > 2 else 0
        torch.testing.assert_close(every[:tokens], all_reduce_ref(parts, torch.bfloat16), rtol=close, atol=close)
        for rank in order[1:]:
            deliver_columns(world, rank, mine[rank].view(torch.float32).view(1, -1))
        for rank in order:
            assert torch.equal(all_gather_shards(mine[rank], world.inboxes[rank]), every), (number, rank)
        sums = parts_of(ranks, 3 * 512 * ranks, number)
        for rank in order[1:]:
            deliver_shards(world, rank, sums)
        for rank in order:
            found = all_reduce_shards(sums[rank].view(-1, 512), world.inboxes[rank])
            torch.testing.assert_close(found.flatten(), all_reduce_ref(sums, torch.bfloat16), rtol=close, atol=close)


@pytest.mark.parametrize("source", [0, 1])
def test_tokens_of_one_rank_come_to_the_other(source: int) -> None:
    world, tokens = World.of(2), torch.tensor([[5, 0, 129279], [7, 1, 2**31 - 9]])
    axes = [Axis("tp", rank, 2, object(), PeerMemory(inbox, inbox, world.abandoned)) for rank, inbox in enumerate(world.inboxes)]
    sent = [tokens if rank == source else torch.full_like(tokens, -(2**63)) for rank in range(2)]  # the others' are anything
    for turn in range(4):
        deliver_columns(world, 1, (sent[1] + turn).int().view(1, -1))
        for axis in axes:
            assert torch.equal(axis.broadcast_tokens(sent[axis.rank] + turn, source), (tokens + turn).int().long())


@pytest.fixture
def abandoned(monkeypatch: pytest.MonkeyPatch) -> World:
    """Two ranks of which the host has ended all waiting, which the kernels see at their first poll."""
    monkeypatch.setattr(kernels, "_PATIENCE", 1)
    world = World.of(2)
    world.abandoned.fill_(1)
    return world


def test_columns_of_more_than_an_inbox_take_several_launches(abandoned: World) -> None:
    tokens = torch.arange(2 * 3000, dtype=torch.int32).view(2, 3000)  # two rows of three blocks, one in a launch
    out = all_gather_columns(tokens, abandoned.inboxes[1])
    assert torch.equal(out[:, 3000:], tokens) and abandoned.inboxes[1].calls.tolist()[:4] == [2, 2, 2, 0]


def test_shards_of_more_than_an_inbox_take_several_launches(abandoned: World) -> None:
    """The second launch waits for what the first has made room for; here a peer that never comes is given up after each."""
    rows = 2 * (SHARD // BLOCK) * BLOCK // 512
    all_reduce_shards(torch.ones(rows + 1, 512), abandoned.inboxes[0])
    assert abandoned.inboxes[0].calls.tolist()[: SHARD // BLOCK + 1] == [2] + [1] * (SHARD // BLOCK - 1) + [0]


def test_shards_of_experts_and_of_two_parts_are_rounded_once() -> None:
    world, experts = World.of(2), experts_of(2, 3, 2 * BLOCK, 3, torch.float32)
    parts = [part_of_experts(one) for one in experts]
    deliver_shards(world, 1, [part.flatten() for part in parts])
    found = all_reduce_shards(experts[0], world.inboxes[0])
    assert torch.equal(found, all_reduce_ref(parts, torch.bfloat16))
    mine, theirs = (part.view(2, 250) for part in parts_of(2, 500, 1))
    also = torch.randn(2, 250, generator=torch.Generator().manual_seed(2))
    world.inboxes[1].calls.copy_(world.inboxes[0].calls)
    deliver_shards(world, 1, [(mine + also).flatten(), theirs.flatten()])
    assert torch.equal(all_reduce_shards(mine, world.inboxes[0], also), all_reduce_ref([mine + also, theirs], torch.bfloat16))


def test_all_reduce_rounds_once_and_adds_another_part() -> None:
    world = World.of(2)
    mine, theirs = parts_of(2, 500, 1)
    also = torch.randn(500, generator=torch.Generator().manual_seed(2))
    for part in (also, also.bfloat16()):
        world.deliver(1, theirs)
        found = all_reduce(mine, world.inboxes[0], torch.bfloat16, part)
        world.inboxes[1].calls[0] += 1
        assert torch.equal(found, all_reduce_ref([mine + part, theirs], torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["cut", "whole"])
def test_all_reduce_adds_up_what_each_rank_has_of_experts(dtype: torch.dtype) -> None:
    """Results of experts that are elsewhere are whatever lay in memory; of whole ones, the shared one is on one rank only."""
    world, experts = World.of(2), experts_of(2, 3, 2 * BLOCK, 3, dtype)
    if dtype == torch.bfloat16:
        experts[1] = experts[1]._replace(shared_TD=None)
    parts = [part_of_experts(one) for one in experts]
    world.deliver(1, parts[1].flatten())
    for one, inbox in zip(experts, world.inboxes, strict=True):
        assert torch.equal(all_reduce(one, inbox, torch.bfloat16), all_reduce_ref(parts, torch.bfloat16))


def test_all_reduce_sends_its_part_to_all_and_clears_what_it_read_before() -> None:
    world = World.of(2)
    for call in range(2 * TURNS):
        mine, theirs = parts_of(2, 900, call)
        world.deliver(1, theirs)
        all_reduce_part(world, 0, mine)
        world.inboxes[1].calls[0] += 1
        assert torch.equal(world.buffers[1][call % TURNS, 0, :900].view(torch.float32), mine + 0.0)
        assert (world.buffers[0][(call - 1) % TURNS] == EMPTY).all()
        world.buffers[1][(call - 1) % TURNS] = EMPTY  # what the other rank does


def rows_of(tokens: int, seed: int) -> TokenRows:
    """Rows of all bits there are, -0.0 and NaN included."""
    rng = torch.Generator().manual_seed(seed)

    def bits(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, generator=rng, dtype=torch.uint8)

    x = bits(tokens, 2 * HIDDEN)
    x[:, :8] = torch.tensor([0, 0, 0, 128] * 2)
    ids = torch.randint(0, 1 << 31, (tokens,), generator=rng)
    positions = torch.randint(-1, 1 << 20, (tokens,), generator=rng, dtype=torch.int32)
    codes, scales = bits(tokens, HIDDEN).view(torch.float8_e4m3fn), bits(tokens, HIDDEN // 128)
    return TokenRows(x.view(torch.bfloat16), codes, scales, ids, positions)


def as_numbers(rows: TokenRows) -> Tensor:
    """What travels of some rows: int32, filled up to whole blocks."""
    parts = (rows.x_TD.view(torch.int32), rows.codes.view(torch.int32), rows.scales.int())
    numbers = torch.cat([*parts, rows.token_ids_T.int()[:, None], rows.positions_T.int()[:, None]], 1)
    return pad(numbers, (0, -numbers.shape[1] % BLOCK)).flatten()


def same(a: TokenRows, b: TokenRows) -> bool:
    return all(x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a, b, strict=True))


def sums_of(parts: ExpertSum, ranks: int) -> list[Tensor]:
    """A rank's float32 sums as it sends them to each of its peers."""
    padded = pad(part_of_experts(parts._replace(shared_TD=None)), (0, -HIDDEN % BLOCK)).view(torch.int32)
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
            world.deliver_words(rank, [as_numbers(lengthened(rows[rank], count))] * ranks)
        expected = all_gather_ref(rows, count)
        assert all(same(all_gather(rows[rank], world.inboxes[rank], count), expected) for rank in (late, *others))
        parts = experts_of(ranks, ranks * COUNT, HIDDEN, number)
        for rank in others:
            world.deliver_words(rank, sums_of(parts[rank], ranks))
        for rank in (late, *others):
            found = reduce_scatter(parts[rank], world.inboxes[rank], tokens[rank], torch.float32)
            close = 0 if ranks == 2 else 1e-6
            torch.testing.assert_close(found, reduce_scatter_ref(parts, rank, tokens[rank], torch.float32), rtol=close, atol=close)


def test_sums_are_rounded_once_and_need_no_shared_expert() -> None:
    world, parts = World.of(2), experts_of(2, 2 * COUNT, HIDDEN, 5)
    for shared in (True, False):
        given = [each if shared else each._replace(shared_TD=None) for each in parts]
        world.deliver_words(1, sums_of(given[1], 2))
        found = reduce_scatter(given[0], world.inboxes[0], COUNT, torch.bfloat16)
        world.inboxes[1].calls[: 2 * COUNT] += 1
        assert torch.equal(found, reduce_scatter_ref(given, 0, COUNT, torch.bfloat16))


def test_missing_rows_are_of_no_token() -> None:
    rows = rows_of(1, 3)
    longer = lengthened(rows, 3)
    assert same(TokenRows(*(tensor[:1] for tensor in longer)), rows)
    assert longer.positions_T[1:].tolist() == [-1, -1] and not longer.codes[1:].float().any() and lengthened(rows, 1) is rows


def test_inbox_has_a_place_for_each_number_and_its_call() -> None:
    inbox = World.of(2).inboxes[0]
    assert most_rows(inbox, HIDDEN) == 2 and shard_numbers(inbox) == SHARD


def test_abandoned_sums_end(abandoned: World) -> None:
    all_reduce_part(abandoned, 0, torch.ones(10))
    assert abandoned.inboxes[0].calls.tolist() == [1] + [0] * 7
    assert torch.equal(abandoned.buffers[1][0, 0, :10].view(torch.float32), torch.ones(10))


def test_abandoned_rows_end(abandoned: World) -> None:
    all_gather(rows_of(1, 1), abandoned.inboxes[0], 2)
    reduce_scatter(experts_of(2, 2 * COUNT, HIDDEN, 1)[0], abandoned.inboxes[0], 2, torch.float32)
    assert abandoned.inboxes[0].calls.tolist() == [2] * 4 + [0] * 4
