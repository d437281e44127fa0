"""Bytes that a pass allocates, as every family counts them."""

from __future__ import annotations

from typing import NamedTuple


class PassBytes(NamedTuple):
    """Bytes of one rank's pass.

    Attributes:
        hidden: The residual of one token.
        held: Of one token, during the whole pass.
        widest: All that lives at the widest point, of any number of tokens up to the most.
        split: The same of steps of few tokens, whose attention is split; 0 if it never is.
        experts: Of one token, while routed experts work.
    """

    hidden: int
    held: int
    widest: int
    split: int = 0
    experts: int = 0
