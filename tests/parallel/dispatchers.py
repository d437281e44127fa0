"""Dispatchers of a user's own, in a module that ranks in child processes can import."""

from __future__ import annotations

from torch import Tensor

from dsv4lite.parallel.experts import AllGather, AllToAll, Dispatched, ExpertRanks, Local, Rows


class Marked(AllToAll):
    """Does what its base does, and leaves a mark that tests can find."""

    calls: int = 0

    def __init__(self, ranks: ExpertRanks) -> None:
        super().__init__(ranks)
        self.ranks = ranks

    def start(self, rows: Rows, slots_TK: Tensor, weight_TK: Tensor, most_tokens: int | None = None) -> Dispatched:
        self.calls += 1
        return super().start(rows, slots_TK, weight_TK, most_tokens)


class OwnLocal(Local):
    """Its base, which a host has taken over: it gets every call."""


class OwnAllGather(AllGather):
    """The same."""


def refuses(ranks: ExpertRanks) -> AllToAll:
    """A factory that fails."""
    raise RuntimeError(f"no dispatcher for ep={ranks.ep.size}")
