"""What one forward pass works on, as tensors: tokens, who they belong to, and which cache rows they read and write.

Everything here is the same for all layers of a kind and is worked out once per step.
Shapes: T tokens, S sequences, W window rows, E entries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from dsv4lite.kernels.compress import Segments, empty_carry, make_prefixes, make_segments
from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.rope import rope_angles
from dsv4lite.models.deepseek_v4.config import V4Config
from dsv4lite.models.deepseek_v4.state import state_spec
from dsv4lite.paging import PAGE_TOKENS, WINDOW_PAGE_TOKENS
from dsv4lite.state.spec import LayerSpec, SlotSpec, StoreSpec
from dsv4lite.state.store import DenseStore, LayerCache, Store
from dsv4lite.weights.quant import Numerics

QUERY_BLOCK = 256  # tokens of a chunk that gather their rows together
# Programs that share a token's rows, by the most tokens of a step: few tokens alone do not fill a chip.
SPLITS: tuple[tuple[float, int], ...] = ((4, 16), (12, 8), (32, 4), (100, 2), (math.inf, 1))
BAND_BLOCK = 64  # tokens of a chunk that share the rows of all their windows


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceInput:
    """One sequence's part of a step, in plain ints.

    Attributes:
        token_ids: New tokens, at positions ``start``, ``start + 1``, …
        slot: Its accumulators.
        pages: Its grow pages, in order, for all positions up to the last new one.
        window_first: Logical index of the first of ``window_pages``.
        window_pages: Physical window pages; -1 where a page is neither read nor written.
        drafts: How many of the last tokens are guesses. Without any, accumulators are kept in copy 0; with some, in copy i after
            token i, and all other tokens but the first are guesses.
        carry: The copy of the accumulators that it starts from.
    """

    token_ids: Sequence[int]
    start: int
    slot: int
    pages: Sequence[int]
    window_first: int
    window_pages: Sequence[int]
    drafts: int = 0
    carry: int = 0

    @property
    def decodes(self) -> bool:
        """Whether its tokens are one that is known, and guesses: no part of a prompt."""
        return len(self.token_ids) == 1 + self.drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryBlock:
    """Tokens ``begin`` to ``end`` of a step that find their rows in the same way.

    Tokens of sequences that decode form one block (``sequence`` is ``None``) and read their window, own rows included, from pages.
    A chunk of one sequence reads its window from ``prior`` rows of the pages, followed by the chunk's own rows from ``source`` on:
    each token its own list of them, or, in a band, all tokens the same rows under a mask.

    Attributes:
        window_NW: int64: addresses for decoding, else indices into prior rows followed by own rows; ``None`` for a band.
        valid_NW: bool; for a band [N, rows].
        last_position: The largest position in the block.
    """

    begin: int
    end: int
    sequence: int | None
    window_NW: Tensor | None
    valid_NW: Tensor
    prior: Tensor | None
    source: int
    last_position: int

    @property
    def banded(self) -> bool:
        """Whether all tokens share their rows."""
        return self.window_NW is None

    def window_rows(self, kv_TC: Tensor, store: Store) -> Tensor:
        """Return the window's rows, [N, W, C] or, for a band, [rows, C]; places that are not valid hold anything."""
        if self.sequence is None:
            assert self.window_NW is not None
            return store.read(self.window_NW, kv_TC.dtype)
        own = kv_TC[self.source : self.end]
        rows = own if self.prior is None else torch.cat([store.read(self.prior, kv_TC.dtype), own])
        return rows if self.window_NW is None else rows[self.window_NW]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStep:
    """What layers of one compression ratio share in a step.

    Attributes:
        rows_per_page: Entries in a grow page.
        phase_T: int64, position within the group.
        visible_T: int64, entries each token may see.
        write_E: int64, addresses of the entries that close.
        rope_E: cos and sin of the closing groups' first positions.
    """

    ratio: int
    rows_per_page: int
    segments: Segments
    phase_T: Tensor
    visible_T: Tensor
    write_E: Tensor
    rope_E: tuple[Tensor, Tensor]


@dataclass(slots=True, kw_only=True)
class Batch:
    """One step's tokens.

    Attributes:
        sequence_T: int64, which sequence each token is of.
        carry_from: Slot and copy, int64 [P], of the accumulators that each prefix of ``Segments`` starts from.
        carry_to: Slot and copy where they go.
        rope_T: cos and sin of sliding-window layers.
        compress_rope_T: cos and sin of compressed layers; ``None`` if there are none.
        groups: By compression ratio.
        tables_SP: int64, grow pages of each sequence, padded with 0.
        write_rows, write_addresses: Which rows of the step go to which window rows.
        routed_TLK: If wanted, int16 [T, layers, K] that receives the experts chosen.
        most_tokens: Where several replicas share experts, tokens of the one with the most; ``None`` if it is not known.
        taps_TK: What a drafter sees of layers of several stages, [T, layers x D], on its way from stage to stage.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    sequence_T: Tensor
    carry_from: tuple[Tensor, Tensor]
    carry_to: tuple[Tensor, Tensor]
    blocks: tuple[QueryBlock, ...]
    rope_T: tuple[Tensor, Tensor]
    compress_rope_T: tuple[Tensor, Tensor] | None
    groups: dict[int, GroupStep]
    tables_SP: Tensor
    write_rows: Tensor | None
    write_addresses: Tensor
    routed_TLK: Tensor | None = None
    most_tokens: int | None = None
    taps_TK: Tensor | None = None

    def entry_addresses(self, block: QueryBlock, entries: Tensor, ratio: int) -> Tensor:
        """Return the addresses of a block's entries, given by index [N, K] or [K]; negative indices stay -1."""
        rows = self.groups[ratio].rows_per_page
        page = (entries // rows).clamp_min(0)
        if block.sequence is None:
            physical = self.tables_SP[self.sequence_T[: block.end, None], page]
        else:
            physical = self.tables_SP[block.sequence][page]
        return torch.where(entries < 0, -1, physical * rows + entries % rows)


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
        """Put frequencies, worked out on the CPU, where they are wanted."""
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
class PagedBatch:
    """One step's tokens for the kernels that work on paged state: what ``Batch`` is to the references.

    Attributes:
        token_ids_T: int64; anything valid for padding.
        paging: Where they stand.
        max_tokens: No sequence is longer than this after the step, as far as the host knows.
        rope_T: cos and sin of sliding-window layers.
        compress_rope_T: cos and sin of compressed layers.
        group_rope_T: By compression ratio, cos and sin of the first position of the group that each token is in.
        splits: How many programs share a token's rows in attention; results depend on it in their last bits.
        routed_TLK: If wanted, int16 [T, layers, K] that receives the experts chosen.
        most_tokens: Where several replicas share experts, tokens of the one with the most; ``None`` if it is not known.
        taps_TK: What a drafter sees of layers of several stages, [T, layers x D], on its way from stage to stage.
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
    ) -> PagedBatch:
        """Work out the angles, and how many programs to spread attention over: one for all tokens if bits must not depend on it."""
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


def _padded(tables: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    width = max(1, max(len(t) for t in tables))
    return torch.tensor([[*t, *([0] * (width - len(t)))] for t in tables], dtype=torch.int64, device=device)


def make_batch(
    sequences: Sequence[SequenceInput], config: V4Config, rotary: Rotary, device: torch.device, *, banded: bool = False
) -> Batch:
    """Work out a step; sequences that decode come first.

    Args:
        sequences: What each sequence runs.
        config: Sizes.
        rotary: Frequencies.
        device: Where.
        banded: Let tokens of a chunk share rows under a mask: faster, but the order of summation then depends on the chunk.
    """

    def integers(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    starts_S, lens_S = integers([s.start for s in sequences]), integers([len(s.token_ids) for s in sequences])
    decoding = next((i for i, s in enumerate(sequences) if not s.decodes), len(sequences))
    assert not any(s.decodes for s in sequences[decoding:]), "sequences that decode come first"
    token_ids_T = integers([t for s in sequences for t in s.token_ids])
    rows_S = lens_S.cumsum(0) - lens_S
    if len(token_ids_T) == len(sequences):
        sequence_T, positions_T = torch.arange(len(sequences), device=device), starts_S
    else:
        sequence_T = torch.repeat_interleave(torch.arange(len(sequences), device=device), lens_S)
        positions_T = torch.arange(len(token_ids_T), device=device) - (rows_S - starts_S)[sequence_T]

    window = _Windows(sequences, decoding, positions_T, sequence_T, config.window, device)
    write_rows, write_addresses = window.writes()

    tables_SP = _padded([s.pages for s in sequences], device)
    slots_S, carry_S = integers([s.slot for s in sequences]), integers([s.carry for s in sequences])
    prefixes = make_prefixes(lens_S, integers([s.drafts for s in sequences]))
    owner_P = prefixes.owner_P
    ratios = sorted({r for r in config.ratios if r})
    groups: dict[int, GroupStep] = {}
    for ratio in ratios:
        segments = make_segments(starts_S[owner_P], prefixes.lens_P, ratio, rows_S=rows_S[owner_P], whole_S=prefixes.whole_P)
        rows = PAGE_TOKENS // ratio
        entry_E = segments.positions_E // ratio
        page_E = tables_SP[owner_P[segments.sequence_G[segments.closed_E]], entry_E // rows]
        groups[ratio] = GroupStep(
            ratio=ratio,
            rows_per_page=rows,
            segments=segments,
            phase_T=positions_T % ratio,
            visible_T=(positions_T + 1) // ratio,
            write_E=page_E * rows + entry_E % rows,
            rope_E=rope_angles(segments.positions_E, rotary.compress),
        )
    return Batch(
        token_ids_T=token_ids_T,
        positions_T=positions_T,
        sequence_T=sequence_T,
        carry_from=(slots_S[owner_P], carry_S[owner_P]),
        carry_to=(slots_S[owner_P], prefixes.copy_P),
        blocks=tuple(window.blocks(banded)),
        rope_T=rope_angles(positions_T, rotary.main),
        compress_rope_T=rope_angles(positions_T, rotary.compress) if ratios else None,
        groups=groups,
        tables_SP=tables_SP,
        write_rows=write_rows,
        write_addresses=write_addresses,
    )


def make_paged_batch(
    sequences: Sequence[SequenceInput], rotary: Rotary, device: torch.device, *, deterministic: bool
) -> PagedBatch:
    """Work out a step for the kernels, with one copy to the device."""
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
    # Each begins at a multiple of 16 bytes: kernels are compiled for what is known of addresses, and not in traffic.
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
    return PagedBatch.of(token_ids.long(), paging, rotary, max_tokens=longest, deterministic=deterministic)


def _flat(tables: Sequence[Sequence[int]], filler: int) -> list[int]:
    """Return tables one after the other, all as long as the longest."""
    width = max(1, max(len(table) for table in tables))
    return [value for table in tables for value in (*table, *([filler] * (width - len(table))))]


class _Windows:
    """Works out which window rows the tokens of a step read and write; those of the first ``decoding`` sequences decode."""

    def __init__(
        self,
        sequences: Sequence[SequenceInput],
        decoding: int,
        positions_T: Tensor,
        sequence_T: Tensor,
        window: int,
        device: torch.device,
    ) -> None:
        self._sequences, self._decoding, self._window, self._device = sequences, decoding, window, device
        self._rows = sum(len(s.token_ids) for s in sequences[:decoding])
        self._position_N = positions_T[: self._rows, None]
        self._sequence_N = sequence_T[: self._rows]
        self._pages_SP = _padded([s.window_pages for s in sequences], device)
        self._first_S = torch.tensor([s.window_first for s in sequences], dtype=torch.int64, device=device)

    def blocks(self, banded: bool) -> list[QueryBlock]:
        """Return who reads what: decoding tokens in one block, chunks in blocks of some tokens each."""
        blocks = [self._decode_block()] if self._rows else []
        row = self._rows
        for index in range(self._decoding, len(self._sequences)):
            length = len(self._sequences[index].token_ids)
            size = BAND_BLOCK if banded else QUERY_BLOCK
            blocks += [self._chunk_block(index, row, begin, min(begin + size, length), banded) for begin in range(0, length, size)]
            row += length
        return blocks

    def _decode_block(self) -> QueryBlock:
        read_NW = (self._position_N - self._window + 1).clamp_min(0) + torch.arange(self._window, device=self._device)
        valid_NW = read_NW <= self._position_N
        return QueryBlock(
            begin=0,
            end=self._rows,
            sequence=None,
            window_NW=self._addresses(torch.where(valid_NW, read_NW, self._position_N)),
            valid_NW=valid_NW,
            prior=None,
            source=0,
            last_position=max(s.start + s.drafts for s in self._sequences[: self._decoding]),
        )

    def _addresses(self, positions_NW: Tensor) -> Tensor:
        """Return where rows of decoding sequences lie."""
        page_NW = positions_NW // WINDOW_PAGE_TOKENS - self._first_S[self._sequence_N, None]
        return self._pages_SP[self._sequence_N[:, None], page_NW] * WINDOW_PAGE_TOKENS + positions_NW % WINDOW_PAGE_TOKENS

    def _chunk_block(self, index: int, row: int, begin: int, end: int, banded: bool) -> QueryBlock:
        """Return the block of tokens ``begin`` to ``end`` of a sequence whose first token is in ``row``."""
        seq, window, device = self._sequences[index], self._window, self._device
        oldest = max(0, seq.start + begin - window + 1)  # position of the first row anyone in the block reads
        prior = None
        if oldest < seq.start:
            read_P = torch.arange(oldest, seq.start, device=device)
            page_P = self._pages_SP[index, read_P // WINDOW_PAGE_TOKENS - seq.window_first]
            prior = page_P * WINDOW_PAGE_TOKENS + read_P % WINDOW_PAGE_TOKENS
        position_N = torch.arange(seq.start + begin, seq.start + end, device=device)[:, None]
        window_NW: Tensor | None = None
        if banded:
            read_R = torch.arange(oldest, seq.start + end, device=device)
            valid_NW = (read_R <= position_N) & (read_R > position_N - window)
        else:
            read_NW = (position_N - window + 1).clamp_min(0) + torch.arange(window, device=device)
            valid_NW = read_NW <= position_N
            window_NW = torch.where(valid_NW, read_NW - oldest, 0)
        return QueryBlock(
            begin=row + begin,
            end=row + end,
            sequence=index,
            window_NW=window_NW,
            valid_NW=valid_NW,
            prior=prior,
            source=row + max(0, oldest - seq.start),
            last_position=seq.start + end - 1,
        )

    def writes(self) -> tuple[Tensor | None, Tensor]:
        """Return which rows are kept (``None`` for all) and where: every decoding row, and a chunk's last ``window`` rows."""
        addresses = [self._addresses(self._position_N)[:, 0]]
        if self._decoding == len(self._sequences):
            return None, addresses[0]
        rows = [torch.arange(self._rows, device=self._device)]
        row = self._rows
        for index in range(self._decoding, len(self._sequences)):
            seq = self._sequences[index]
            length = len(seq.token_ids)
            kept = torch.arange(max(0, length - self._window), length, device=self._device)
            position = seq.start + kept
            page = self._pages_SP[index, position // WINDOW_PAGE_TOKENS - seq.window_first]
            addresses.append(page * WINDOW_PAGE_TOKENS + position % WINDOW_PAGE_TOKENS)
            rows.append(row + kept)
            row += length
        return torch.cat(rows), torch.cat(addresses)


def one_pass(
    prompts: Sequence[Sequence[int]], config: V4Config, rotary: Rotary, numerics: Numerics, *, num_layers: int
) -> tuple[Batch, list[LayerCache]]:
    """Prepare whole sequences from position 0 with a cache that lives for this one pass and lets gradients through."""
    device = numerics.device
    ordered = sorted(range(len(prompts)), key=lambda i: len(prompts[i]) > 1)
    assert ordered == list(range(len(prompts))), "single-token prompts come first"
    sequences, grow = [], 0
    for slot, ids in enumerate(prompts):
        count = -(-len(ids) // PAGE_TOKENS)
        window_count = -(-len(ids) // WINDOW_PAGE_TOKENS)
        pages = range(grow, grow + count)
        windows = range(grow * (PAGE_TOKENS // WINDOW_PAGE_TOKENS), grow * (PAGE_TOKENS // WINDOW_PAGE_TOKENS) + window_count)
        sequences.append(SequenceInput(token_ids=ids, start=0, slot=slot, pages=pages, window_first=0, window_pages=windows))
        grow += count
    spec = state_spec(config, numerics, range(num_layers), drafter=False)
    caches = [_dense(layer, grow, len(prompts), numerics) for layer in spec.layers]
    return make_batch(sequences, config, rotary, device, banded=numerics.banded), caches


def _dense(layer: LayerSpec, pages: int, sequences: int, numerics: Numerics) -> LayerCache:
    """Return the state of one layer for one pass."""
    dtype, device = numerics.dtype, numerics.device
    stores: dict[str, Store] = {
        part.name: DenseStore(part.format, pages * PAGE_TOKENS // part.tokens_per_row, dtype, device)
        for part in layer
        if isinstance(part, StoreSpec)
    }
    slots = {
        part.name: empty_carry(sequences, 1, part.shape[0], part.shape[-1], device=device)
        for part in layer
        if isinstance(part, SlotSpec)
    }
    return LayerCache(stores=stores, slots=slots)
