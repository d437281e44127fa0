"""What one forward pass works on, as tensors: tokens, their sequences and positions, and the pages of their state.

Everything here is the same for all layers of a kind and is computed once per step.
Shapes: T tokens, S sequences, P pages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4lite.kernels.dispatch import by_most
from dsv4lite.kernels.paging import Paging
from dsv4lite.models.choices import Choices

# Programs that share a token's rows, by the most tokens of a step: few tokens alone do not fill a chip.
SPLITS: tuple[tuple[int | None, int], ...] = ((4, 16), (12, 8), (32, 4), (100, 2), (None, 1))


@dataclass(frozen=True, slots=True)
class Rotary:
    """Frequencies of the two kinds of layers.

    Attributes:
        main: Of sliding-window layers, float32 [rope_dim / 2].
        ratios: Compression ratios, ascending.
        strides: int32 [2 + ratios, 1], 1, 1, then the ratios: what ``angles`` rounds positions down to.
        frequencies: float32 [2 + ratios, 1, rope_dim / 2]: ``main``, then that of compressed layers.
    """

    main: Tensor
    ratios: tuple[int, ...]
    strides: Tensor
    frequencies: Tensor

    @classmethod
    def of(cls, main: Tensor, compress: Tensor, ratios: tuple[int, ...], device: torch.device) -> Rotary:
        """Copy frequencies, computed on the CPU, to a device."""
        wanted = tuple(sorted({ratio for ratio in ratios if ratio}))
        strides = torch.tensor((1, 1, *wanted), dtype=torch.int32, device="cpu")[:, None]
        frequencies = torch.stack([main, *[compress] * (1 + len(wanted))])[:, None]
        return cls(main.to(device), wanted, strides.to(device), frequencies.to(device))

    def angles(self, positions_T: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return cos and sin, float32 [T, rope_dim / 2]: of both kinds of layers, and of the groups' starts by ratio."""
        starts = (positions_T // self.strides * self.strides).float()
        angles = starts[..., None] * self.frequencies
        return list(zip(angles.cos().unbind(), angles.sin().unbind(), strict=True))


@dataclass(slots=True, kw_only=True)
class Batch:
    """One step's tokens; see ``models.family.Batch``.

    Attributes:
        rope_T: cos and sin of sliding-window layers.
        compress_rope_T: cos and sin of compressed layers.
        group_rope_T: By compression ratio, cos and sin of the first position of the group that each token is in.
        most_unselected: Longest sequence whose every token attends to all compressed entries that it sees.
        seen: Positions from which rows look back, and pages of what they see: ``paging``, unless rows see others after them.
        ahead: How many more positions a row sees than the model's window has: later rows of its block.
    """

    token_ids_T: Tensor
    paging: Paging
    max_tokens: int
    rope_T: tuple[Tensor, Tensor]
    compress_rope_T: tuple[Tensor, Tensor]
    group_rope_T: dict[int, tuple[Tensor, Tensor]]
    most_unselected: int
    seen: Paging
    ahead: int = 0
    chosen: Choices | None = None
    given: Choices | None = None
    most_tokens: int | None = None
    taps_TK: Tensor | None = None

    @property
    def selects(self) -> bool:
        """Whether a token may see more compressed entries than it attends to."""
        return self.max_tokens > self.most_unselected

    @classmethod
    def of(
        cls, token_ids_T: Tensor, paging: Paging, rotary: Rotary, *, max_tokens: int, most_unselected: int, deterministic: bool
    ) -> Batch:
        """Compute the angles and choose the KV splits: a deterministic model never splits."""
        main, compress, *groups = rotary.angles(paging.positions_T)
        paging = replace(paging, splits=1 if deterministic else by_most(SPLITS, len(token_ids_T)))
        return cls(
            token_ids_T=token_ids_T,
            paging=paging,
            max_tokens=max_tokens,
            rope_T=main,
            compress_rope_T=compress,
            group_rope_T=dict(zip(rotary.ratios, groups, strict=True)),
            most_unselected=most_unselected,
            seen=paging,
        )
