"""Expert dispatchers: how a token's row comes to the ranks that hold its experts, and their results back.

    Local       every rank of ep has the token already; the partial sums of the ranks are the caller's to add
    AllGather   every rank gets every row, and each its tokens' sums from a reduce-scatter; each sends as many as the fullest
    AllToAll    rows travel to their experts and back, exactly as many as there are; the token's own rank sums them, in the order of
                its experts, so that the result is that of one rank, bit for bit

Ranks that work on the same tokens are peers. All return float32 sums [T, D] that are a part: added up over the peers, they are the
sums over each token's experts. Where rows travel, each peer sends an equal share of the tokens, and gets the sums of these.

Slots are places for experts, counted through all ranks of ep; as many as there are slots in all means none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from dsv4lite.errors import ConfigError
from dsv4lite.parallel.mesh import Axis

Rows = tuple[Tensor, ...]
"""What the experts take of each token: tensors [T, ...]."""
LocalExperts = Callable[[Rows, Tensor, Tensor], Tensor]
"""``experts(rows, slots_TK, weight_TK)``: float32 sums [T, D] over this rank's experts, by their slots on it, in the order of k."""
Sums = Callable[[], Tensor]
"""Waits for this rank's part of the sums, float32 [T, D], and returns it."""
Dispatched = Callable[[LocalExperts], Sums]
"""Waits for the rows that come to this rank, lets its experts work on them, and begins to bring back what they make of them.

Experts take slots counted from the rank's first."""


class Dispatcher(Protocol):
    """Takes tokens to their experts, on every rank of ep at the same time.

    What does not wait for other ranks runs beside that: between ``start`` and the call of what it returns, and between that and the
    call of what this returns in turn. Each of them is called once.

    Attributes:
        capturable: A step with ``most_tokens`` can be recorded in a CUDA graph: no shape depends on what the device has worked out.
    """

    @property
    def capturable(self) -> bool:
        """See above."""
        ...

    def start(self, rows: Rows, slots_TK: Tensor, weight_TK: Tensor, most_tokens: int | None = None) -> Dispatched:
        """Begin to bring rows to their experts.

        Args:
            rows: What experts take of each of this rank's tokens. No argument may be overwritten before the sums are there.
            slots_TK: int64, in the order in which experts are added up.
            weight_TK: float32 mixing weights.
            most_tokens: As many as the rank of ep has that has the most tokens; ``None`` if it is not known. All are told alike.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertRanks:
    """What a dispatcher is made from.

    Attributes:
        ep: Ranks that share the experts.
        peers: Ranks that work on the same tokens.
        slots_per_rank: Places for experts on each rank of ep.
        dtype: Of what one expert returns for one token.
        recorded: Steps are recorded as CUDA graphs if they can be.
    """

    ep: Axis
    peers: Axis
    slots_per_rank: int
    dtype: torch.dtype
    recorded: bool

    @property
    def together(self) -> bool:
        """Whether peers hold all experts together."""
        return self.ep.size <= self.peers.size

    def own_tokens(self, tokens: int) -> slice:
        """Return which of the tokens, known to all peers, this rank answers for."""
        return equal_share(tokens, self.peers.rank, self.peers.size)

    def own_slots(self, slots_TK: Tensor) -> Tensor:
        """Return slots counted from this rank's first; as many as it has for those of other ranks."""
        if self.ep.size == 1:
            return slots_TK
        count, slots = self.slots_per_rank, self.ep.size * self.slots_per_rank
        # Slots before this rank's first, and what is none, come to lie behind its last.
        return ((slots_TK - self.ep.rank * count) % (slots + 1)).clamp_(max=count)


class Local:
    """No dispatch: every rank runs its own experts on tokens that all of them have."""

    capturable = True

    def __init__(self, ranks: ExpertRanks) -> None:
        if not ranks.together:
            raise ConfigError(f"ep={ranks.ep.size} ranks work on different tokens; choose the dispatcher all_gather or all_to_all")
        self._ranks = ranks

    def start(self, rows: Rows, slots_TK: Tensor, weight_TK: Tensor, most_tokens: int | None = None) -> Dispatched:
        def run(experts: LocalExperts) -> Sums:
            sums = experts(rows, self._ranks.own_slots(slots_TK), weight_TK)
            return lambda: sums

        return run


class AllGather:
    """Every rank sees every token; ranks with fewer than the one with the most send empty rows.

    Where nobody says how many that are, they tell each other, which waits for the device.
    """

    capturable = True

    def __init__(self, ranks: ExpertRanks) -> None:
        self._ranks = _whole(ranks)

    def start(self, rows: Rows, slots_TK: Tensor, weight_TK: Tensor, most_tokens: int | None = None) -> Dispatched:
        ranks, tokens = self._ranks, len(slots_TK)
        own = ranks.own_tokens(tokens)
        if ranks.together:
            most_tokens = tokens
        elif most_tokens is None:
            told = ranks.ep.all_gather(torch.tensor([tokens], dtype=torch.int64, device=slots_TK.device))
            most_tokens = int(told.max())
        count = -(-most_tokens // ranks.peers.size)
        parts = (slots_TK[own], weight_TK[own], *(row[own] for row in rows))
        held, none = len(parts[0]), ranks.ep.size * ranks.slots_per_rank
        longer = (_lengthen(parts[0], count, none), *(_lengthen(part, count, 0) for part in parts[1:]))
        gathered = ranks.ep.begin_all_gather(*longer)

        def run(experts: LocalExperts) -> Sums:
            slots, weights, *inputs = gathered.wait()
            sums = ranks.ep.begin_reduce_scatter(experts(tuple(inputs), ranks.own_slots(slots), weights))
            return lambda: _spread(sums.wait()[:held], own, tokens)

        return run


class AllToAll:
    """Rows travel to their experts only: the host must know how many before it can launch what comes next."""

    capturable = False

    def __init__(self, ranks: ExpertRanks) -> None:
        self._ranks = _whole(ranks)

    def start(self, rows: Rows, slots_TK: Tensor, weight_TK: Tensor, most_tokens: int | None = None) -> Dispatched:
        ranks, size = self._ranks, self._ranks.ep.size
        own = ranks.own_tokens(len(slots_TK))
        slots, weights = slots_TK[own], weight_TK[own].flatten()
        tokens, per_token = slots.shape
        none = size * ranks.slots_per_rank
        pairs = slots.flatten().clamp(0, none)  # a pass that only asks which kernels there are leaves slots unwritten
        goal = pairs // ranks.slots_per_rank
        goal = torch.where(goal < size, goal, ranks.ep.rank)  # no expert: padding stays
        counts = torch.zeros(size, dtype=torch.int64, device=pairs.device).scatter_add_(0, goal, torch.ones_like(goal))
        ones = [1] * size
        send, receive = torch.stack([counts, ranks.ep.all_to_all(counts, ones, ones)]).tolist()
        order = goal.argsort(stable=True)
        at = order // per_token
        parts = (pairs[order], weights[order], *(row[own][at] for row in rows))
        sent = ranks.ep.begin_all_to_all(_pack(parts), send, receive)

        def run(experts: LocalExperts) -> Sums:
            local, mixing, *inputs = _unpack(sent.wait(), parts)
            results = experts(tuple(inputs), ranks.own_slots(local[:, None]), mixing[:, None]).to(ranks.dtype)
            returned = ranks.ep.begin_all_to_all(results, receive, send)
            return lambda: _spread(_in_order(returned.wait(), order, tokens, per_token), own, len(slots_TK))

        return run


DispatcherFactory = Callable[[ExpertRanks], Dispatcher]
DISPATCHERS: Mapping[str, DispatcherFactory] = {"local": Local, "all_gather": AllGather, "all_to_all": AllToAll}


def make_dispatcher(choice: str | DispatcherFactory, ranks: ExpertRanks) -> Dispatcher:
    """Return a dispatcher.

    Args:
        choice: A name in ``DISPATCHERS``, or whatever makes one. ``auto`` is ``local`` where that suffices, else ``all_gather``
            where steps are recorded, else ``all_to_all``.
        ranks: Between whom.

    Raises:
        ConfigError: There is no such dispatcher, or it does not suit the layout.
    """
    if not isinstance(choice, str):
        return choice(ranks)
    if choice == "auto":
        choice = "local" if ranks.together else "all_gather" if ranks.recorded else "all_to_all"
    if choice not in DISPATCHERS:
        raise ConfigError(f"dispatcher={choice!r} is not one of auto, {', '.join(DISPATCHERS)}")
    return DISPATCHERS[choice](ranks)


def _whole(ranks: ExpertRanks) -> ExpertRanks:
    if ranks.ep.size < ranks.peers.size:
        raise ConfigError(
            f"tp={ranks.peers.size} ranks share the width of experts on ep={ranks.ep.size}; "
            f"rows can travel to whole experts only: choose the dispatcher local, or ep={ranks.peers.size}"
        )
    return ranks


def equal_share(count: int, rank: int, size: int) -> slice:
    """Return a rank's part of so many rows; only the last ones' may be smaller than others', or empty."""
    share = -(-count // size)
    return slice(min(rank * share, count), min((rank + 1) * share, count))


def _in_order(results: Tensor, order: Tensor, tokens: int, per_token: int) -> Tensor:
    """Return float32 sums over each token's experts, one after the other; result i is of pair ``order[i]`` of token and expert."""
    by_pair = torch.empty(len(results), results.shape[1], dtype=torch.float32, device=results.device)
    by_pair[order] = results.float()
    total, *others = by_pair.view(tokens, per_token, by_pair.shape[1]).unbind(1)
    for other in others:
        total = total + other
    return total


def _spread(sums: Tensor, own: slice, tokens: int) -> Tensor:
    """Return sums of some tokens as sums [T, D] that are zero for the others."""
    if len(sums) == tokens:
        return sums
    whole = sums.new_zeros(tokens, sums.shape[1])
    whole[own] = sums
    return whole


def _lengthen(part: Tensor, rows: int, value: int) -> Tensor:
    """Return a tensor with rows of one value after its own."""
    if len(part) == rows:
        return part
    longer = torch.empty(rows, *part.shape[1:], dtype=part.dtype, device=part.device)
    longer[: len(part)] = part
    longer[len(part) :] = value
    return longer


def _pack(parts: Rows) -> Tensor:
    """Return the rows of several tensors as bytes side by side, uint8 [T, B]."""
    return torch.cat([part.reshape(len(part), prod(part.shape[1:])).view(torch.uint8) for part in parts], 1)


def _unpack(packed: Tensor, like: Rows) -> list[Tensor]:
    """Return what ``_pack`` packed; ``like`` has the dtypes and the shapes of one row."""
    parts, begin = [], 0
    for part in like:
        end = begin + prod(part.shape[1:]) * part.dtype.itemsize
        bytes_ = packed[:, begin:end].clone(memory_format=torch.contiguous_format)  # aligned, whatever lies before it
        parts.append(bytes_.view(part.dtype).view(len(packed), *part.shape[1:]))
        begin = end
    return parts
