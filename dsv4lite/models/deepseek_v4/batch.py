"""The inputs of one forward pass, as tensors: tokens, their sequences and positions, and the pages of their state.

All layers of a kind share them, so they are computed once per step.
Shapes: T tokens, S sequences, P pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4lite.kernels.paging import Paging
from dsv4lite.models import batch
from dsv4lite.models.partial_sums import ALL_TOKENS, TokenShard

# KV splits per token, by the most tokens of a step: without splits, few tokens do not fill a GPU.
SPLITS: tuple[tuple[int | None, int], ...] = ((4, 16), (12, 8), (32, 4), (100, 2), (None, 1))


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary frequencies of the two kinds of layers.

    Attributes:
        main: Frequencies of sliding-window layers, float32 [rope_dim / 2].
        ratios: Compression ratios, ascending.
        strides: int32 [2 + ratios, 1]: 1, 1, then the ratios; ``angles`` rounds positions down to their multiples.
        frequencies: float32 [2 + ratios, 1, rope_dim / 2]: ``main``, then those of compressed layers in all other rows.
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
        """Return cos and sin, float32 [T, rope_dim / 2]: of both kinds of layers, then of each ratio's group starts."""
        starts = (positions_T // self.strides * self.strides).float()
        angles = starts[..., None] * self.frequencies
        return list(zip(angles.cos().unbind(), angles.sin().unbind(), strict=True))


@dataclass(slots=True, kw_only=True)
class Batch(batch.Batch):
    """One step's tokens.

    Attributes:
        rope_T: cos and sin of sliding-window layers.
        compress_rope_T: cos and sin of compressed layers.
        group_rope_T: By compression ratio, cos and sin of the first position of each token's group.
        most_unselected: Length up to which each token of a sequence attends to all compressed entries that it sees.
        seen: Positions and pages for attention; ``paging``, except that rows of a draft block also see the later rows of the block.
        ahead: Positions by which the window of such rows is longer: the rows of the block.
        shard: The tokens whose residual streams this rank holds.
    """

    rope_T: tuple[Tensor, Tensor]
    compress_rope_T: tuple[Tensor, Tensor]
    group_rope_T: dict[int, tuple[Tensor, Tensor]]
    most_unselected: int
    seen: Paging
    ahead: int = 0
    shard: TokenShard = ALL_TOKENS

    @property
    def selects(self) -> bool:
        """Whether the indexer must run: a token may see more compressed entries than it attends to."""
        return self.max_tokens > self.most_unselected
