"""Attention on rows in pages: the kernel against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.attention import AttentionInputs, paged_attention
from dsv4lite.kernels.rope import rope, rope_angles
from dsv4lite.kernels.rows import Fp8Kv, RowFormat, RowStore, UnquantizedRow, pack_rows, unpack_rows
from tests.kernels.paged import attention_bound, fill_store, make_paging, pages_of
from tests.kernels.tensors import DEVICE, ON_GPU

triton = pytest.importorskip("triton")

from dsv4lite.kernels.attention import triton as attention_triton  # noqa: E402
from dsv4lite.kernels.attention.merge_triton import merged  # noqa: E402
from dsv4lite.kernels.attention.prefill_triton import prefill_attention_triton, widened_rows_triton  # noqa: E402
from dsv4lite.kernels.attention.triton import Tile, paged_attention_triton, tile_for, unquantized_tile_for  # noqa: E402

pytestmark = pytest.mark.kernel

ON_HOPPER = ON_GPU and torch.cuda.get_device_capability() == (9, 0)

Steps = Sequence[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Sizes of a layer; rows are packed if there is no ``dtype``."""

    heads: int = 8
    nope: int = 64
    rope: int = 64
    ratio: int = 4
    top_k: int | None = 64
    window: int = 128
    dtype: torch.dtype | None = None

    @property
    def format(self) -> RowFormat:
        return Fp8Kv(self.nope, self.rope) if self.dtype is None else UnquantizedRow(self.nope + self.rope, self.dtype)


TINY = Layer()
FLASH = Layer(heads=64, nope=448, top_k=512)
SMALL = Layer(heads=4, nope=24, rope=8, top_k=9, window=8, dtype=torch.float32)


def case(layer: Layer, steps: Steps, splits: int = 1, *, padding: int = 0, room: int = 0) -> AttentionInputs:
    """Return random inputs; ``room`` bytes lie between the step's rows."""
    generator, fmt = torch.Generator().manual_seed(1), layer.format
    paging = replace(make_paging(steps, DEVICE, padding=padding), splits=splits)
    tokens, dtype = len(paging.positions_T), layer.dtype or torch.bfloat16
    q = (2 * torch.randn(tokens, layer.heads, fmt.width, generator=generator)).to(dtype).to(DEVICE)
    packed = pack_rows(fmt, torch.randn(tokens, fmt.width, generator=generator).to(dtype)).to(DEVICE)
    rows = torch.empty(tokens, packed.shape[1] + room, dtype=torch.uint8, device=DEVICE)
    cos, sin = rope_angles(paging.positions_T, torch.rand(layer.rope // 2, generator=generator).to(DEVICE))
    entries = fill_store(fmt, pages_of(paging.grow_SP), 256 // layer.ratio, DEVICE, seed=3) if layer.ratio else None
    selected: Tensor | None = None
    if layer.top_k is not None:
        selected = torch.full((tokens, layer.top_k), -(1 << 30), dtype=torch.int32)
        for t, position in enumerate(paging.positions_T.tolist()):
            visible = (position + 1) // layer.ratio
            if visible > layer.top_k:
                selected[t] = torch.randperm(visible, generator=generator)[: layer.top_k].sort().values.int()
        selected = selected.to(DEVICE)
    return AttentionInputs(
        q,
        rows[:, : packed.shape[1]].copy_(packed),
        fill_store(fmt, pages_of(paging.window_SP), 64, DEVICE, seed=2),
        entries,
        paging,
        torch.randn(layer.heads, generator=generator).to(DEVICE),
        fmt.width**-0.5,
        cos,
        sin,
        layer.ratio,
        selected,
        layer.window,
    )


def kernel(given: AttentionInputs) -> Tensor:
    """Launch; memory that no program writes holds NaN."""
    torch.set_deterministic_debug_mode("error")
    try:
        return paged_attention_triton(given)
    finally:
        torch.set_deterministic_debug_mode("default")


def close(got: Tensor, wanted: Tensor, rope: int = 64) -> None:
    """Compare as the docstring of ``attention`` promises."""
    assert got.dtype == wanted.dtype and got.shape == wanted.shape
    if got.numel():
        wide = got.dtype == torch.float32
        bound = 2**-13 * wanted.abs().amax(-1, keepdim=True) if wide else attention_bound(wanted, rope)
        assert ((got.float() - wanted.float()).abs() <= bound).all(), (got.float() - wanted.float()).abs().max()


def equals_the_reference(given: AttentionInputs) -> None:
    close(kernel(given), paged_attention.reference(given), 2 * given.cos.shape[1])


PACKED: list[tuple[Layer, Steps, int]] = [
    (TINY, [(0, 1)], 1),
    (TINY, [(0, 3), (126, 4)], 1),
    (TINY, [(700, 2), (5, 1)], 1),
    (TINY, [(700, 1), (5, 1), (254, 1)], 3),
    (replace(TINY, top_k=None), [(400, 1), (130, 2)], 2),
    (replace(TINY, ratio=128, top_k=None), [(127, 1), (1300, 2)], 3),
    (replace(TINY, ratio=0, top_k=None), [(63, 2), (1000, 1)], 2),
    (replace(TINY, heads=64), [(300, 1)], 1),
    (replace(TINY, nope=192), [(300, 1)], 2),
    (replace(TINY, heads=21, window=8, top_k=9), [(6, 3), (90, 1)], 1),
    (replace(FLASH, heads=16, top_k=64), [(290, 1)], 1),
]
UNQUANTIZED: list[tuple[Layer, Steps, int]] = [
    (SMALL, [(0, 3), (126, 4)], 1),
    (SMALL, [(700, 1), (5, 1), (254, 1)], 3),
    (replace(SMALL, ratio=8, top_k=None, nope=12), [(300, 2)], 16),
    (replace(SMALL, ratio=0, top_k=None, heads=17, window=70), [(63, 1), (200, 1)], 2),
    (replace(SMALL, nope=36, rope=64, window=128), [(290, 1)], 1),  # both halves of the channels rotate
]
if ON_GPU:
    prefill: list[tuple[Steps, int]] = [([(0, 300)], 1), ([(5000, 70), (100, 1), (9000, 1)], 1)]
    decode: list[tuple[Steps, int]] = [([(1023, 1), (70000, 1), (0, 1)], 2), ([(1023, 1), (70000, 1), (0, 1), (2600, 1)], 3)]
    layers = (
        FLASH,
        replace(FLASH, heads=128, top_k=1024),
        replace(FLASH, ratio=128, top_k=None),
        replace(FLASH, ratio=0, top_k=None),
    )
    PACKED += [(layer, steps, splits) for layer in (*layers, TINY) for steps, splits in (*prefill, *decode)]
    layers = (FLASH, replace(FLASH, heads=20, top_k=64), *layers[2:])
    decode += [([(70001, 1), (40, 1)], 16)]
    decode += [([(1023, 1), (70000, 1), (0, 1)], 4)]
    wide = [replace(layer, dtype=torch.float32) for layer in layers]
    UNQUANTIZED += [(layer, steps, splits) for layer in wide for steps, splits in (*prefill, *decode)]
# Few tokens (``decode_attention_triton``), whose KV splits ``merged`` adds.
SLIDING = replace(TINY, ratio=0, top_k=None)
DECODE: list[tuple[Layer, Steps, int]] = [
    (TINY, [(700, 1), (5, 1)], 8),  # one token each: listed entries, and a window that fills
    (TINY, [(62, 2), (600, 1)], 4),
    (replace(TINY, top_k=256), [(62, 2), (600, 1)], 4),  # all entries, pieces in a loop
    (replace(TINY, ratio=128, top_k=None), [(40000, 1)], 4),  # entries of many pages
    (replace(TINY, ratio=128, top_k=None), [(2000, 1)], 16),  # small pieces
    (replace(SLIDING, window=133), [(500, 2)], 8),  # four pages of the window
    (replace(TINY, heads=21, window=8, top_k=9), [(90, 1)], 4),
    (replace(TINY, nope=192), [(300, 1)], 9),
    (replace(FLASH, heads=16, top_k=64), [(290, 1)], 8),
]
REAL_DECODE: list[tuple[Layer, Steps, int]] = [
    (layer, steps, splits)
    for layer in (FLASH, replace(FLASH, heads=128), replace(FLASH, ratio=128, top_k=None), replace(FLASH, ratio=0, top_k=None))
    for steps, splits in (([(0, 1), (1023, 1), (70000, 1)], 16), ([(40, 3), (9000, 2), (2600, 1)], 8), ([(700, 13)], 4))
]
DECODE += REAL_DECODE if ON_GPU else []
CASES = [*PACKED, *DECODE, *UNQUANTIZED, *((replace(layer, dtype=torch.bfloat16), *other) for layer, *other in UNQUANTIZED)]


@pytest.mark.parametrize(("layer", "steps", "splits"), CASES)
def test_kernel_equals_the_reference(layer: Layer, steps: Steps, splits: int) -> None:
    equals_the_reference(case(layer, steps, splits))


@pytest.mark.parametrize(
    "layer", [TINY, replace(TINY, heads=64), replace(TINY, nope=192, heads=20), replace(FLASH, heads=16, top_k=64)]
)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("tile", sorted({tile_for(capability) for capability in (80, 90, 100)}, key=repr), ids=repr)
@pytest.mark.skipif(ON_GPU, reason="a chip runs its own tiles")
def test_every_tile_equals_the_reference(tile: Tile, splits: int, layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_triton, "tile_for", lambda *given: tile)
    equals_the_reference(case(layer, [(300, 1)], splits))


TILES = sorted({unquantized_tile_for(64, n, 1, c) for n in (1024, 2048) for c in (80, 90)}, key=repr)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tile", TILES, ids=repr)
@pytest.mark.skipif(ON_GPU, reason="a chip runs its own tiles")
def test_every_tile_for_unquantized_rows_equals_the_reference(
    tile: Tile, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_triton, "unquantized_tile_for", lambda *given: tile)
    equals_the_reference(case(replace(SMALL, heads=20, dtype=dtype), [(300, 1)]))


def test_bfloat16_is_no_farther_from_float32_than_the_reference() -> None:
    """Probabilities are rounded relative to other peaks, so numbers differ; their errors are as large."""

    def widened(store: RowStore) -> RowStore:
        wide = RowStore(UnquantizedRow(store.format.width, torch.float32), len(store.memory), store.rows_per_page, DEVICE)
        wide.memory.view(torch.float32).copy_(store.memory.view(torch.bfloat16))
        return wide

    layer = FLASH if ON_GPU else replace(SMALL, heads=16, nope=56, top_k=None, window=128)
    for splits in (1, 4):
        given = case(replace(layer, dtype=torch.bfloat16), [(1100, 2)], splits)
        assert given.entries is not None
        wide = {"window": widened(given.window), "entries": widened(given.entries)}
        fresh = given.fresh_TB.view(torch.bfloat16).float().view(torch.uint8)
        exact = paged_attention.reference(given._replace(q_THC=given.q_THC.float(), fresh_TB=fresh, **wide))
        ours, theirs = ((got.float() - exact).norm() for got in (kernel(given), paged_attention.reference(given)))
        assert theirs > 0 and ours < 1.03 * theirs


@pytest.mark.parametrize(("tokens", "splits"), [(3, 1), (2, 4)])
def test_fresh_rows_may_be_spread_out(tokens: int, splits: int) -> None:
    given = case(TINY, [(300, tokens)], splits, room=8)
    assert given.fresh_TB.stride(0) % 16 == 0
    equals_the_reference(given)


# Many tokens (``prefill_attention_triton``): windows that fill, that begin before the step or with it, listed entries and all.
PREFILL: list[tuple[Layer, Steps]] = [
    (TINY, [(0, 3), (126, 2), (700, 2)]),
    (replace(TINY, top_k=None), [(400, 1), (130, 2)]),
    (replace(TINY, ratio=128, top_k=None), [(127, 1), (1300, 2)]),
    (replace(SLIDING, window=133), [(500, 2), (60, 1)]),
    (replace(TINY, heads=70, nope=192), [(300, 1)]),
    (replace(FLASH, heads=16, top_k=64), [(290, 1)]),
]


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")  # the interpreter's, of rows that are not read
@pytest.mark.parametrize(("layer", "steps"), PREFILL)
def test_rows_are_widened_one_after_the_other(layer: Layer, steps: Steps) -> None:
    """The step's own rows, then each sequence's window rows before the step, then each sequence's entries."""
    given = case(layer, steps, room=8)
    got, paging, rows = widened_rows_triton(given), given.paging, iter(range(given.visible_rows))
    own = [next(rows) for _ in given.q_THC]
    assert torch.equal(got[own], unpack_rows(layer.format, given.fresh_TB, torch.bfloat16))

    def equal(store: RowStore, found: list[tuple[int, int]]) -> None:
        places, addresses = torch.tensor(found, device=DEVICE).view(-1, 2).T
        assert torch.equal(got[places], store.read(addresses, torch.bfloat16))

    found: list[tuple[int, int]] = []
    for window, first, (begin, _) in zip(paging.window_SP.tolist(), paging.window_first_S.tolist(), steps, strict=True):
        for position in range(begin - layer.window, begin):
            place, column = next(rows), position // 64 - first
            if position >= 0 and column >= 0:
                found.append((place, 64 * window[column] + position % 64))
    equal(given.window, found)
    if given.entries is None:
        return
    found, size = [], given.entries.rows_per_page
    for pages, (begin, length) in zip(paging.grow_SP.tolist(), steps, strict=True):
        for entry in range(len(pages) * size):
            place = next(rows)
            if entry < (begin + length) // layer.ratio:
                found.append((place, size * pages[entry // size] + entry % size))
    equal(given.entries, found)


@pytest.mark.skipif(not ON_HOPPER, reason="the kernel is specialized for Hopper's warps")
@pytest.mark.parametrize(("layer", "steps"), PREFILL)
def test_rows_may_be_widened_first(layer: Layer, steps: Steps) -> None:
    given = case(layer, steps, padding=2, room=8)
    given.fresh_TB[-2:] = 0x7F
    got = prefill_attention_triton(given)
    close(got, paged_attention.reference(given))
    assert got[-2:].eq(0).all()


@pytest.mark.skipif(not ON_HOPPER, reason="elsewhere rows are not widened first")
@pytest.mark.parametrize("steps", [[(0, 1100)], [(5000, 700), (2900, 500)]])
@pytest.mark.parametrize(
    "layer",
    [
        FLASH,
        replace(FLASH, ratio=128, top_k=None),
        replace(FLASH, ratio=0, top_k=None),
        *(replace(FLASH, heads=heads) for heads in (16, 128)),
        *(replace(TINY, nope=nope) for nope in (64, 192)),
    ],
)
def test_widening_rows_first_changes_no_bit(layer: Layer, steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    given = case(layer, steps)
    got = []
    for most in (0, 1000):
        monkeypatch.setattr(attention_triton, "WIDENED_ROWS", most)
        got.append(kernel(given))
    assert torch.equal(*got)


@pytest.mark.filterwarnings("ignore:overflow")  # the interpreter's; infinity is meant
@pytest.mark.parametrize(
    ("layer", "tokens", "splits"),
    [(TINY, 2, 1), (TINY, 2, 3), (SLIDING, 1, 8), *((replace(SMALL, dtype=torch.bfloat16), 2, splits) for splits in (1, 3))],
)
def test_padding_gives_zeros_and_reads_nothing(layer: Layer, tokens: int, splits: int) -> None:
    given = case(layer, [(200, tokens)], splits, padding=tokens)
    given.fresh_TB[tokens:] = 0x7F
    equals_the_reference(given)
    got = kernel(given)
    assert got[:tokens].ne(0).any() and got[tokens:].eq(0).all()


@pytest.mark.parametrize(
    ("steps", "splits"), [([(126, 2)], 1), *([([(200, 5), (2, 5), (126, 5)], n) for n in (1, 3)] if ON_GPU else [])]
)
def test_rows_of_a_block_see_each_other(steps: Steps, splits: int) -> None:
    """A drafter's block: every row has the position of the last one, and sees so many rows farther back."""
    rows = steps[0][1]
    given = case(replace(TINY, ratio=0, top_k=None, window=128 + rows), steps, splits)
    positions = given.paging.positions_T[rows - 1 :: rows].repeat_interleave(rows)
    equals_the_reference(given._replace(paging=replace(given.paging, positions_T=positions)))


def test_no_tokens_give_no_output() -> None:
    given = case(TINY, [(4, 0)], 2)
    assert kernel(given).shape == paged_attention.reference(given).shape == (0, 8, 128)


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")  # the other token's
@pytest.mark.parametrize("splits", [1, 3])
def test_what_a_token_does_not_see_changes_nothing(splits: int) -> None:
    """Bits of a token follow from its own rows: all else may be NaN."""
    given = case(TINY, [(300, 1), (20, 1)], splits)
    wanted = kernel(given)
    entries, window, paging, selected = given.entries, given.window, given.paging, given.selected_TK
    assert entries is not None and selected is not None
    mine, read = selected[0].long(), torch.arange(173, 300, device=DEVICE)
    pages = paging.window_SP[0][read // 64 - paging.window_first_S[0]].long()
    for store, seen in ((entries, paging.grow_SP[0][mine // 64].long() * 64 + mine % 64), (window, pages * 64 + read % 64)):
        for address in set(range(len(store.memory) * 64)) - set(seen.tolist()):
            store.memory[address // 64, address % 64 * 192 : address % 64 * 192 + 192] = 0x7F
    given.fresh_TB[1] = 0x7F
    assert torch.equal(kernel(given)[0], wanted[0])


def only(given: AttentionInputs, t: int, *, singles: bool) -> AttentionInputs:
    """Return a step of one token of a step whose sequences have one token each."""
    p, part = given.paging, slice(t, t + 1)
    names = ("first_S", "grow_SP", "window_SP", "window_first_S", "positions_T")
    of_sequence = {name: getattr(p, name)[part] for name in names}
    paging = replace(p, sequence_T=p.sequence_T[:1], rows_S=p.rows_S[:1], width=int(singles), **of_sequence)
    selected = None if given.selected_TK is None else given.selected_TK[part]
    tensors = {name: getattr(given, name)[part] for name in ("q_THC", "fresh_TB", "cos", "sin")}
    return given._replace(paging=paging, selected_TK=selected, **tensors)


ALONE = [(layer, [(700, 1), (5, 1), last], splits) for layer, last in ((TINY, (254, 1)), (SMALL, (54, 1))) for splits in (1, 3)]


@pytest.mark.parametrize(("layer", "steps", "splits"), [*ALONE, (TINY, [(5, 1), (254, 1)], 8)])
def test_a_token_alone_has_the_same_bits(layer: Layer, steps: Steps, splits: int) -> None:
    given = case(layer, steps, splits)
    together = kernel(given)
    for singles in (True, False):
        assert torch.equal(kernel(only(given, len(steps) - 1, singles=singles))[0], together[-1])


@pytest.mark.filterwarnings("ignore:overflow")  # the interpreter's; infinity is meant
def test_sink_takes_all_or_nothing() -> None:
    for splits in (1, 3):
        given = case(TINY, [(300, 1)], splits)
        assert kernel(given._replace(sink_H=torch.full_like(given.sink_H, 1e4))).eq(0).all()
        equals_the_reference(given._replace(sink_H=torch.full_like(given.sink_H, float("-inf"))))


@pytest.mark.filterwarnings("ignore:overflow")  # the interpreter's; infinity is meant
@pytest.mark.parametrize(
    ("splits", "fills", "used"),
    [(2, True, [2, 1, 2, 0]), (4, False, [4, 2, 4, 2]), (16, False, [10, 2, 6, 2])],
    ids=["two", "four", "in two chunks"],
)
def test_used_splits_are_added_and_others_ignored(splits: int, fills: bool, used: list[int]) -> None:
    """In float64, of tokens with 500, 0 and 251 entries, the second in a window that fills; and padding."""
    given = case(replace(TINY, top_k=None), [(1999, 1), (2, 1), (1003, 1)], splits, padding=1)
    generator = torch.Generator().manual_seed(0)
    parts, stats = (part.copy_(torch.randn(part.shape, generator=generator)) for part in given.allocate_splits())
    stats[..., 1] = stats[..., 1].abs() + 1
    for t, count in enumerate(used):
        parts[count:, t], stats[count:, t] = torch.nan, torch.nan
    parts[:, 3], stats[:, 3, :, 0], stats[:, 3, :, 1] = 0.0, -1e30, 0.0
    got = merged(given, parts, stats, 64, fills=fills)
    assert got[3].eq(0).all()
    for t, count in enumerate(used[:3]):
        weight = torch.exp2(stats[:count, t, :, 0].double())
        total = (weight * stats[:count, t, :, 1]).sum(0) + given.sink_H.double().exp()
        exact = (weight[..., None] * parts[:count, t]).sum(0) / total[:, None]
        wanted = rope(exact.float()[None], given.cos[t : t + 1], given.sin[t : t + 1], inverse=True)
        assert ((got[t].float() - wanted).abs() <= attention_bound(wanted)).all()
