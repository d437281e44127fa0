"""Expert dispatchers: they send a token's row to the ranks that hold its experts, and return the results.

    Local       every rank of ep already has the token; the caller adds the partial sums of the ranks
    AllGather   every rank gets every row, and a reduce-scatter returns each rank the sums of its tokens; ranks pad to equal counts
    AllToAll    rows are sent only to the ranks of their experts and back; the token's own rank adds the results in the order of its
                experts, so that the sum has the same bits as on a single rank

Ranks that work on the same tokens are peers. All dispatchers return partial float32 sums [T, D]: added up over the peers, they are
the sums over each token's experts. If rows are sent, each peer sends an equal part of the tokens, and gets the sums of that part.

Slots are places for experts, numbered through all ranks of ep. The number of all slots stands for "no expert".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from dsv4lite.errors import ConfigError
from dsv4lite.kernels.peer_memory import padded
from dsv4lite.kernels.routing import own_slots
from dsv4lite.parallel.mesh import Axis

Rows = tuple[Tensor, ...]
"""Inputs of the experts: tensors [T, ...]."""
LocalExperts = Callable[[Rows, Tensor, Tensor], Tensor]
"""``experts(rows, slots_TK, weight_TK)``: float32 sums [T, D] over this rank's experts, by their slots on it, in the order of k."""
Sums = Callable[[], Tensor]
"""Waits for this rank's part of the sums, float32 [T, D], and returns it."""
Dispatched = Callable[[LocalExperts], Sums]
"""Waits for the rows that this rank receives, runs its experts on them, and begins to send the results back.

Experts take slots numbered from the rank's first."""


class Dispatcher(Protocol):
    """Sends tokens to their experts, on every rank of ep at the same time.

    The caller runs other work during the transfers: between ``start`` and the call of the ``Dispatched`` that it returns, and
    between that call and the call of the ``Sums`` that it returns. Each is called once.

    Attributes:
        capturable: Whether a step with ``most_tokens`` can be captured in a CUDA graph: no shape depends on device results.
    """

    @property
    def capturable(self) -> bool:
        """See the class."""
        ...

    def start(self, rows: Rows, slots_TK: Tensor, weight_TK: Tensor, most_tokens: int | None = None) -> Dispatched:
        """Begin to send rows to their experts.

        Args:
            rows: Inputs of the experts for this rank's tokens. No argument may be written to before the sums are complete.
            slots_TK: int64, in the order in which results are added up.
            weight_TK: float32 mixing weights.
            most_tokens: The largest number of tokens on a rank of ep; ``None`` if it is unknown. Equal on all ranks.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertRanks:
    """The ranks and sizes from which a dispatcher is made.

    Attributes:
        ep: Ranks that share the experts.
        peers: Ranks that work on the same tokens.
        slots_per_rank: Slots of each rank of ep.
        dtype: Dtype of the result of one expert for one token.
        captured: Whether steps are captured as CUDA graphs if they can be.
    """

    ep: Axis
    peers: Axis
    slots_per_rank: int
    dtype: torch.dtype
    captured: bool

    @property
    def together(self) -> bool:
        """Whether peers hold all experts together."""
        return self.ep.size <= self.peers.size

    def own_tokens(self, tokens: int) -> slice:
        """Return which of the peers' common tokens this rank sends."""
        return equal_part(tokens, self.peers.rank, self.peers.size)

    def own_slots(self, slots_TK: Tensor) -> Tensor:
        """Return slots numbered from this rank's first; those of other ranks become ``slots_per_rank``."""
        if self.ep.size == 1:
            return slots_TK
        return own_slots(slots_TK, self.ep.rank * self.slots_per_rank, self.slots_per_rank)


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
    """Every rank gets every token; ranks with fewer tokens than ``most_tokens`` send empty rows.

    Without ``most_tokens`` the ranks exchange their numbers of tokens, and the host waits for them.
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
            counts = ranks.ep.all_gather(torch.tensor([tokens], dtype=torch.int64, device=slots_TK.device))
            most_tokens = int(counts.max())
        count = -(-most_tokens // ranks.peers.size)
        parts = (slots_TK[own], weight_TK[own], *(row[own] for row in rows))
        held, none = len(parts[0]), ranks.ep.size * ranks.slots_per_rank
        longer = (padded(parts[0], count, none), *(padded(part, count, 0) for part in parts[1:]))
        gathered = ranks.ep.begin_all_gather(*longer)

        def run(experts: LocalExperts) -> Sums:
            slots, weights, *inputs = gathered.wait()
            sums = ranks.ep.begin_reduce_scatter(experts(tuple(inputs), ranks.own_slots(slots), weights))
            return lambda: _spread(sums.wait()[:held], own, tokens)

        return run


class AllToAll:
    """Rows are sent only to their experts; the host waits for the numbers of rows before it launches the transfer."""

    capturable = False

    def __init__(self, ranks: ExpertRanks) -> None:
        self._ranks = _whole(ranks)

    def start(self, rows: Rows, slots_TK: Tensor, weight_TK: Tensor, most_tokens: int | None = None) -> Dispatched:
        ranks, size = self._ranks, self._ranks.ep.size
        own = ranks.own_tokens(len(slots_TK))
        slots, weights = slots_TK[own], weight_TK[own].flatten()
        tokens, per_token = slots.shape
        none = size * ranks.slots_per_rank
        pairs = slots.flatten().clamp(0, none)  # a dry run leaves slots unwritten
        goal = pairs // ranks.slots_per_rank
        goal = torch.where(goal < size, goal, ranks.ep.rank)  # padding has no expert and stays here
        counts = torch.zeros(size, dtype=torch.int64, device=pairs.device).scatter_add_(0, goal, torch.ones_like(goal))
        ones = [1] * size
        send, receive = torch.stack([counts, ranks.ep.begin_all_to_all(counts, ones, ones).wait()]).tolist()
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
        choice: A name in ``DISPATCHERS``, or a factory. ``auto`` is ``local`` if peers hold all experts, else ``all_gather`` if
            steps are captured, else ``all_to_all``.

    Raises:
        ConfigError: There is no such dispatcher, or it does not fit the layout.
    """
    if not isinstance(choice, str):
        return choice(ranks)
    if choice == "auto":
        choice = "local" if ranks.together else "all_gather" if ranks.captured else "all_to_all"
    if choice not in DISPATCHERS:
        raise ConfigError(f"dispatcher={choice!r} is not one of auto, {', '.join(DISPATCHERS)}")
    return DISPATCHERS[choice](ranks)


def _whole(ranks: ExpertRanks) -> ExpertRanks:
    if ranks.ep.size < ranks.peers.size:
        raise ConfigError(
            f"tp={ranks.peers.size} ranks share the width of experts on ep={ranks.ep.size}; "
            f"rows can be sent to whole experts only: choose the dispatcher local, or ep={ranks.peers.size}"
        )
    return ranks


def equal_part(count: int, rank: int, size: int) -> slice:
    """Return a rank's part of ``count`` rows; the parts of the last ranks may be smaller, or empty."""
    part = -(-count // size)
    return slice(min(rank * part, count), min((rank + 1) * part, count))


def _in_order(results: Tensor, order: Tensor, tokens: int, per_token: int) -> Tensor:
    """Return float32 sums over each token's experts in their order; result i is that of the (token, expert) pair ``order[i]``."""
    by_pair = torch.empty(len(results), results.shape[1], dtype=torch.float32, device=results.device)
    by_pair[order] = results.float()
    total, *others = by_pair.view(tokens, per_token, by_pair.shape[1]).unbind(1)
    for other in others:
        total = total + other
    return total


def _spread(sums: Tensor, own: slice, tokens: int) -> Tensor:
    """Return sums [T, D] that have ``sums`` for the tokens of ``own`` and zeros for the others."""
    if len(sums) == tokens:
        return sums
    whole = sums.new_zeros(tokens, sums.shape[1])
    whole[own] = sums
    return whole


def _pack(parts: Rows) -> Tensor:
    """Return the rows of several tensors as bytes side by side, uint8 [T, B]."""
    return torch.cat([part.reshape(len(part), prod(part.shape[1:])).view(torch.uint8) for part in parts], 1)


def _unpack(packed: Tensor, like: Rows) -> list[Tensor]:
    """Undo ``_pack``; ``like`` has the dtypes, and the shapes of one row."""
    parts, begin = [], 0
    for part in like:
        end = begin + prod(part.shape[1:]) * part.dtype.itemsize
        bytes_ = packed[:, begin:end].clone(memory_format=torch.contiguous_format)  # a clone is aligned
        parts.append(bytes_.view(part.dtype).view(len(packed), *part.shape[1:]))
        begin = end
    return parts
