"""Transfers between the stages of a pipeline: streams to the next stage, sampled tokens to all stages.

A stage starts a step while the streams of its previous step are being sent. It waits for sampled tokens when a step starts with
them, not when the step that samples them ends: the last stage may be as many steps late as there are stages before it.

Streams and tokens have separate process groups, each used in the order of the steps, so every wait is for an earlier step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence, Set

import torch
from torch import Tensor

from dsv4lite.kernels.dispatch import send
from dsv4lite.parallel.mesh import Axis, Mesh, Transfer


class StageLink:
    """Receives streams from the previous stage and sends them to the next one; mutable.

    Args:
        pp: The stages.
    """

    def __init__(self, pp: Axis) -> None:
        self._pp = pp
        self._sending: list[Transfer] = []

    def receive(self, into: Sequence[Tensor]) -> None:
        """Wait for the tensors that the previous stage sends for a step."""
        for x in into:
            self._pp.receive(x, self._pp.rank - 1)

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Start to send to the next stage, which calls ``receive``. The tensors must not be written to afterwards.

        Waits until the next stage has received the tensors of the previous step, which limits how far a stage runs ahead.
        """
        for transfer in self._sending:
            transfer.wait()
        self._sending = [self._pp.begin_send(x, self._pp.rank + 1) for x in tensors]


class TokenBroadcast:
    """Broadcasts the token sampled last in each slot to all ranks that have the sequences; mutable.

    Args:
        mesh: The ranks.
        last_token: int64 [slots + 1], kept up to date on this rank; the last element is for padding.
    """

    def __init__(self, mesh: Mesh, last_token: Tensor) -> None:
        assert mesh.replica is not None
        self._replica = mesh.replica
        self._source = mesh.layout.group("replica", mesh.rank).index(mesh.layout.reporter(mesh.place.dp))
        self._stages = mesh.pp.size
        self._last_token = last_token
        self._pending: deque[tuple[tuple[int, ...], Transfer]] = deque()  # slots, and the broadcast of their tokens

    @property
    def samples(self) -> bool:
        """Whether this rank is the one that samples."""
        return self._replica.rank == self._source

    @property
    def pending(self) -> bool:
        """Whether a broadcast has started for which no step has waited yet."""
        return bool(self._pending)

    def begin(self, slots: Iterable[int]) -> None:
        """Start to broadcast the tokens of some slots that a step has sampled; on every rank, in the order of the steps."""
        if self._replica.size == 1:
            return
        slots = tuple(slots)
        if not slots:
            return
        index = self._index(slots)
        token_ids = self._last_token[index] if self.samples else torch.empty_like(index)
        if self._stages > 1:
            self._pending.append((slots, self._replica.begin_broadcast(token_ids, self._source)))
            return
        token_ids = self._replica.broadcast_tokens(token_ids, self._source)
        if not self.samples:
            self._last_token[index] = token_ids

    def await_tokens(self, slots: Set[int]) -> None:
        """Make the stream wait for the tokens of some slots, and of all steps before the ones that sampled them."""
        while len(self._pending) > self._stages or any(not slots.isdisjoint(sent) for sent, _ in self._pending):
            sent, transfer = self._pending.popleft()
            token_ids = transfer.wait()
            if not self.samples:
                self._last_token[self._index(sent)] = token_ids

    def _index(self, slots: Sequence[int]) -> Tensor:
        return send(torch.tensor(slots, dtype=torch.int64, device="cpu"), self._last_token.device)
