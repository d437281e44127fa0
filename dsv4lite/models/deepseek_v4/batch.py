"""What one forward pass works on, as tensors: tokens, their sequences and positions, and the pages of their state.

Everything here is the same for all layers of a kind and is computed once per step.
Shapes: T tokens, S sequences, P pages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.rows import GradientStore, RowStore, UnquantizedRow
from dsv4lite.models.deepseek_v4.config import V4Config
from dsv4lite.models.deepseek_v4.state import state_spec
from dsv4lite.paging import PAGE_TOKENS, WINDOW_PAGE_TOKENS
from dsv4lite.state.paging import SequenceInput, make_paging
from dsv4lite.state.spec import StateSizes
from dsv4lite.state.store import LayerCache, StateCache
from dsv4lite.weights.quant import Numerics

# Programs that share a token's rows, by the most tokens of a step: few tokens alone do not fill a chip.
SPLITS: tuple[tuple[float, int], ...] = ((4, 16), (12, 8), (32, 4), (100, 2), (math.inf, 1))


@dataclass(frozen=True, slots=True)
class Rotary:
    """Frequencies float32 [rope_dim / 2] of the two kinds of layers.

    Attributes:
        ratios: Compression ratios, ascending.
        strides: int32 [2 + ratios, 1], 1, 1, then the ratios: what ``angles`` rounds positions down to.
        frequencies: float32 [2 + ratios, 1, rope_dim / 2]: ``main``, then ``compress``.
    """

    main: Tensor
    compress: Tensor
    ratios: tuple[int, ...]
    strides: Tensor
    frequencies: Tensor

    @classmethod
    def of(cls, main: Tensor, compress: Tensor, ratios: tuple[int, ...], device: torch.device) -> Rotary:
        """Copy frequencies, computed on the CPU, to a device."""
        wanted = tuple(sorted({ratio for ratio in ratios if ratio}))
        strides = torch.tensor((1, 1, *wanted), dtype=torch.int32, device="cpu")[:, None]
        frequencies = torch.stack([main, *[compress] * (1 + len(wanted))])[:, None]
        return cls(main.to(device), compress.to(device), wanted, strides.to(device), frequencies.to(device))

    def angles(self, positions_T: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return cos and sin, float32 [T, rope_dim / 2]: of both kinds of layers, and of the groups' starts by ratio."""
        starts = (positions_T // self.strides * self.strides).float()
        angles = starts[..., None] * self.frequencies
        return list(zip(angles.cos().unbind(), angles.sin().unbind(), strict=True))


@dataclass(slots=True, kw_only=True)
class Batch:
    """One step's tokens.

    Attributes:
        token_ids_T: int64; anything valid for padding.
        paging: Their positions, sequences, and pages.
        max_tokens: Upper bound, known to the host, of the length of any sequence after the step.
        rope_T: cos and sin of sliding-window layers.
        compress_rope_T: cos and sin of compressed layers.
        group_rope_T: By compression ratio, cos and sin of the first position of the group that each token is in.
        splits: KV splits of attention, which change the last bits of its results.
        routed_TLK: Receives the experts chosen, int16 [T, layers, K], unless it is ``None``.
        most_tokens: Where several replicas share experts, tokens of the one with the most; ``None`` if it is not known.
        taps_TK: What a drafter reads of layers of several stages, [T, layers x D], passed from stage to stage.
    """

    token_ids_T: Tensor
    paging: Paging
    max_tokens: int
    splits: int
    rope_T: tuple[Tensor, Tensor]
    compress_rope_T: tuple[Tensor, Tensor]
    group_rope_T: dict[int, tuple[Tensor, Tensor]]
    routed_TLK: Tensor | None = None
    most_tokens: int | None = None
    taps_TK: Tensor | None = None

    @classmethod
    def of(
        cls,
        token_ids_T: Tensor,
        paging: Paging,
        rotary: Rotary,
        *,
        max_tokens: int,
        deterministic: bool,
    ) -> Batch:
        """Compute the angles and choose the KV splits: a deterministic model never splits."""
        main, compress, *groups = rotary.angles(paging.positions_T)
        return cls(
            token_ids_T=token_ids_T,
            paging=paging,
            max_tokens=max_tokens,
            splits=1 if deterministic else next(splits for most, splits in SPLITS if len(token_ids_T) <= most),
            rope_T=main,
            compress_rope_T=compress,
            group_rope_T=dict(zip(rotary.ratios, groups, strict=True)),
        )


def make_batch(sequences: Sequence[SequenceInput], rotary: Rotary, device: torch.device, *, deterministic: bool) -> Batch:
    """Return the batch of a step."""
    token_ids_T, paging, longest = make_paging(sequences, device)
    return Batch.of(token_ids_T, paging, rotary, max_tokens=longest, deterministic=deterministic)


def one_pass(
    prompts: Sequence[Sequence[int]], config: V4Config, rotary: Rotary, numerics: Numerics, *, num_layers: int
) -> tuple[Batch, list[LayerCache]]:
    """Prepare whole sequences from position 0 and state for this pass alone; that of plain models lets gradients through.

    Args:
        prompts: Token ids of each sequence.
        config: Sizes.
        rotary: Frequencies.
        numerics: Arithmetic and device.
        num_layers: Layers that have state.
    """
    sequences, grow, windows = [], 0, 0
    for slot, ids in enumerate(prompts):
        pages = range(grow, grow + -(-len(ids) // PAGE_TOKENS))
        window_pages = range(windows, windows + -(-len(ids) // WINDOW_PAGE_TOKENS))
        grow, windows = pages.stop, window_pages.stop
        sequences.append(SequenceInput(token_ids=ids, start=0, slot=slot, pages=pages, window_first=0, window_pages=window_pages))
    spec = state_spec(config, numerics, range(num_layers), drafter=False)
    sizes = StateSizes(grow_pages=grow, window_pages=windows, slots=len(prompts), snapshots=0)
    plain = all(isinstance(store.format, UnquantizedRow) for store in spec.stores)
    cache = StateCache.allocate(spec, sizes, numerics.device, rows=GradientStore if plain and torch.is_grad_enabled() else RowStore)
    batch = make_batch(sequences, rotary, numerics.device, deterministic=numerics.deterministic)
    return batch, cache.layers
