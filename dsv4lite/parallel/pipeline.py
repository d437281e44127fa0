"""What passes between the stages of a pipeline: streams to the stage behind, sampled tokens to all.

No stage waits for others longer than it has to. It goes on with the next step while the streams of the last one are on their way,
and it waits for sampled tokens when a step begins with them, not when the step that samples them ends: the last stage may be as
many steps behind as there are others before it.

Streams and tokens travel on groups of their own, each in the order of the steps. So whoever waits, waits for an earlier step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4lite.parallel.mesh import Axis, Mesh, Transfer


class Hop:
    """One stage's hands in the pipeline; mutable.

    Args:
        pp: The stages.
    """

    def __init__(self, pp: Axis) -> None:
        self._pp = pp
        self._leaving: list[Transfer] = []

    def take(self, into: Sequence[Tensor]) -> None:
        """Wait for what the stage before passes on of a step, tensors of these shapes."""
        for x in into:
            self._pp.receive(x, self._pp.rank - 1)

    def pass_on(self, tensors: Sequence[Tensor]) -> None:
        """Begin to send to the stage behind, which ``take``s. Nobody may write to the tensors any more.

        What was passed on of the step before must have been taken first: that much, and no more, waits for a slow stage.
        """
        for transfer in self._leaving:
            transfer.wait()
        self._leaving = [self._pp.begin_send(x, self._pp.rank + 1) for x in tensors]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sent:
    slots: tuple[int, ...]
    transfer: Transfer


class TokenRelay:
    """Brings the token sampled last in each slot to all ranks that have the sequences; mutable.

    Args:
        mesh: The ranks.
        last_token: int64 [slots + 1], kept up to date on this rank; the last place is for padding.
    """

    def __init__(self, mesh: Mesh, last_token: Tensor) -> None:
        assert mesh.replica is not None
        self._replica = mesh.replica
        self._source = mesh.layout.group("replica", mesh.rank).index(mesh.layout.reporter(mesh.place.dp))
        self._stages = mesh.pp.size
        self._last_token = last_token
        self._under_way: deque[_Sent] = deque()

    @property
    def samples(self) -> bool:
        """Whether this rank is the one that samples."""
        return self._replica.rank == self._source

    @property
    def busy(self) -> bool:
        """Whether tokens are on their way."""
        return bool(self._under_way)

    def begin(self, slots: Sequence[int]) -> None:
        """Begin to send the tokens of some slots, which a step has sampled; on every rank, in the order of the steps."""
        if self._replica.size == 1:
            return
        index = self._index(slots)
        token_ids = self._last_token[index] if self.samples else torch.empty_like(index)
        self._under_way.append(_Sent(slots=tuple(slots), transfer=self._replica.begin_broadcast(token_ids, self._source)))
        if self._stages == 1:
            self.await_tokens(frozenset(slots))

    def await_tokens(self, slots: Set[int]) -> None:
        """Let the stream wait until the tokens of some slots are there; those of steps long past are taken in as well."""
        while len(self._under_way) > self._stages or any(not slots.isdisjoint(sent.slots) for sent in self._under_way):
            sent = self._under_way.popleft()
            token_ids = sent.transfer.wait()
            if not self.samples:
                self._last_token[self._index(sent.slots)] = token_ids

    def _index(self, slots: Sequence[int]) -> Tensor:
        host = torch.tensor(slots, dtype=torch.int64, device="cpu")
        device = self._last_token.device
        return host.to(device) if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
