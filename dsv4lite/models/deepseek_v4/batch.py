"""What one forward pass works on, as tensors: tokens, their sequences and positions, and the pages of their state.

Everything here is the same for all layers of a kind and is computed once per step.
Shapes: T tokens, S sequences, P pages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.rows import GradientStore, PlainRow, RowStore
from dsv4lite.models.deepseek_v4.config import V4Config
from dsv4lite.state.cache import GROW_PAGE, WINDOW_PAGE, LayerCache, StateCache, StateLayout, StateSizes
from dsv4lite.weights.quant import Numerics

# Programs that share a token's rows, by the most tokens of a step: few tokens alone do not fill a chip.
SPLITS: tuple[tuple[float, int], ...] = ((4, 16), (12, 8), (32, 4), (100, 2), (math.inf, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceInput:
    """One sequence's part of a step, in plain ints.

    Attributes:
        token_ids: New tokens, at positions ``start``, ``start + 1``, …
        slot: Where its compressor state is.
        pages: Its grow pages, in order, for all positions up to the last new one.
        window_first: Logical index of the first of ``window_pages``.
        window_pages: Physical window pages; -1 where a page is neither read nor written.
        drafts: How many of the last tokens are drafts. Without drafts, the compressor state after the last token goes to copy 0;
            with drafts, which are then all tokens but the first, the state after token i goes to copy i.
        carry: The copy of the compressor state that it starts from.
    """

    token_ids: Sequence[int]
    start: int
    slot: int
    pages: Sequence[int]
    window_first: int
    window_pages: Sequence[int]
    drafts: int = 0
    carry: int = 0


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
    """Return the batch of a step, with one copy to the device."""
    lens = [len(s.token_ids) for s in sequences]
    starts = [s.start for s in sequences]
    rows = [0, *accumulate(lens)][:-1]
    columns: list[list[int]] = [
        [token for s in sequences for token in s.token_ids],
        [position for s in sequences for position in range(s.start, s.start + len(s.token_ids))],
        [index for index, length in enumerate(lens) for _ in range(length)],
        [s.slot for s in sequences],
        starts,
        rows,
        lens,
        [s.drafts for s in sequences],
        [s.carry for s in sequences],
        [s.window_first for s in sequences],
        _flat([s.window_pages for s in sequences], -1),
        _flat([s.pages for s in sequences], 0),
    ]
    # Each begins at a multiple of 16 bytes: kernels are compiled for aligned addresses, and not again while requests run.
    aligned = [[*column, *[0] * (-len(column) % 4)] for column in columns]
    packed = torch.tensor([value for column in aligned for value in column], dtype=torch.int32, device="cpu")
    if device.type == "cuda":
        packed = packed.pin_memory()
    packed = packed.to(device, non_blocking=True)
    parts = packed.split([len(column) for column in aligned])
    token_ids, positions, sequence, slots, first, row, length, drafts, carry, window_first, window, grow = (
        part[: len(column)] for part, column in zip(parts, columns, strict=True)
    )
    paging = Paging(
        positions_T=positions,
        sequence_T=sequence,
        slots_S=slots,
        first_S=first,
        rows_S=row,
        lens_S=length,
        drafts_S=drafts,
        carry_S=carry,
        grow_SP=grow.view(len(lens), -1),
        window_SP=window.view(len(lens), -1),
        window_first_S=window_first,
        singles=max(lens) == 1,
    )
    longest = max(s.start + len(s.token_ids) for s in sequences)
    return Batch.of(token_ids.long(), paging, rotary, max_tokens=longest, deterministic=deterministic)


def _flat(tables: Sequence[Sequence[int]], filler: int) -> list[int]:
    """Return tables one after the other, all as long as the longest."""
    width = max(1, max(len(table) for table in tables))
    return [value for table in tables for value in (*table, *([filler] * (width - len(table))))]


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
        pages = range(grow, grow + -(-len(ids) // GROW_PAGE))
        window_pages = range(windows, windows + -(-len(ids) // WINDOW_PAGE))
        grow, windows = pages.stop, window_pages.stop
        sequences.append(SequenceInput(token_ids=ids, start=0, slot=slot, pages=pages, window_first=0, window_pages=window_pages))
    layout = StateLayout.of(config, dtype=numerics.dtype, quantized=numerics.quantized, with_mtp=True)
    sizes = StateSizes(grow_pages=grow, window_pages=windows, slots=len(prompts), snapshots=0)
    rows = GradientStore if isinstance(layout.kv, PlainRow) and torch.is_grad_enabled() else RowStore
    cache = StateCache.allocate(replace(layout, ratios=config.ratios[:num_layers]), sizes, numerics.device, rows=rows)
    batch = make_batch(sequences, rotary, numerics.device, deterministic=numerics.deterministic)
    return batch, cache.layers
