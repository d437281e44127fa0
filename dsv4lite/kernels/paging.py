"""Where the tokens of a step stand and where their rows lie, as tensors that kernels read: nothing of it is known to the host.

    compressed entry e of ratio r     page grow_SP[s, e // (256 / r)], place e % (256 / r)
    window row of position p          before this step: page window_SP[s, p // 64 - window_first_S[s]], place p % 64
                                      of this step:     the step's own packed rows, row rows_S[s] + p - first_S[s]

Shapes: T tokens, S sequences, P grow pages, Q window pages.  Tokens of a sequence are consecutive rows and positions.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Paging:
    """One step, int32 throughout.

    Attributes:
        positions_T: Position of each token; -1 is padding, which reads and writes no store and whose results nobody looks at.
        sequence_T: Row of the per-sequence tensors; any valid one for padding.
        slots_S: Where each sequence's accumulators are; -1 is padding.
        first_S: Position of its first token in this step.
        rows_S: Row of that token.
        lens_S: Its number of tokens.
        drafts_S: How many of the last ones are guesses: what accumulators hold before each of them is kept in a copy of its own.
        carry_S: In which copy the accumulators are that it starts with.
        grow_SP: Pages of 256 positions each, from position 0; what is past the end is any valid page.
        window_SP: Pages of 64 positions each; -1 where neither read nor written.
        window_first_S: Which 64 positions ``window_SP[:, 0]`` holds.
        singles: Every sequence has one token: S = T and rows_S = 0, 1, 2, …
    """

    positions_T: Tensor
    sequence_T: Tensor
    slots_S: Tensor
    first_S: Tensor
    rows_S: Tensor
    lens_S: Tensor
    drafts_S: Tensor
    carry_S: Tensor
    grow_SP: Tensor
    window_SP: Tensor
    window_first_S: Tensor
    singles: bool
