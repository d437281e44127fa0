"""Attention on packed pages: the reference against the formula, the kernel against the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.attention import paged_attention_ref
from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.rope import rope_angles
from dsv4lite.kernels.rows import Fp8Kv, RowStore
from tests.kernels.paged import attention_bound, fill_store, make_paging, pages_of

triton = pytest.importorskip("triton")

from dsv4lite.kernels.attention import triton as attention_triton  # noqa: E402
from dsv4lite.kernels.attention.triton import Tile, paged_attention_triton, tile_for  # noqa: E402

pytestmark = pytest.mark.kernel

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Sizes of a layer: heads, channels without position, compression ratio, entries selected."""

    heads: int
    nope: int
    ratio: int
    top_k: int | None = None
    window: int = 128


TINY = Layer(heads=8, nope=64, ratio=4, top_k=64)
FLASH = Layer(heads=64, nope=448, ratio=4, top_k=512)


@dataclass(frozen=True, kw_only=True)
class Case:
    """The arguments of ``paged_attention``."""

    q: Tensor
    fresh: Tensor
    window: RowStore
    entries: RowStore | None
    paging: Paging
    sink: Tensor
    cos: Tensor
    sin: Tensor
    selected: Tensor | None
    layer: Layer

    def kernel(self, splits: int) -> Tensor:
        return paged_attention_triton(*self._arguments(), splits, self.layer.window)

    def reference(self) -> Tensor:
        return paged_attention_ref(*self._arguments(), window_size=self.layer.window)

    def _arguments(self) -> tuple:
        scale = self.q.shape[-1] ** -0.5
        ratio = self.layer.ratio
        rows = self.fresh, self.window, self.entries, self.paging
        return self.q, *rows, self.sink, scale, self.cos, self.sin, ratio, self.selected


def case(layer: Layer, steps: list[tuple[int, int]], *, padding: int = 0, aligned: bool = False) -> Case:
    generator = torch.Generator().manual_seed(1)
    paging = make_paging(steps, DEVICE, padding=padding)
    tokens, fmt = len(paging.positions_T), Fp8Kv(layer.nope, 64)
    q = (2 * torch.randn(tokens, layer.heads, fmt.width, generator=generator)).to(torch.bfloat16).to(DEVICE)
    packed = torch.cat(fmt.pack(torch.randn(tokens, fmt.width, generator=generator).to(torch.bfloat16)), -1).to(DEVICE)
    room = torch.empty(tokens, packed.shape[1] + (8 if aligned else 0), dtype=torch.uint8, device=DEVICE)
    fresh = room[:, : packed.shape[1]].copy_(packed)
    cos, sin = rope_angles(paging.positions_T, torch.rand(32, generator=generator).to(DEVICE))
    selected = entries = None
    if layer.ratio:
        entries = fill_store(fmt, pages_of(paging.grow_SP), 256 // layer.ratio, DEVICE, seed=3)
    if layer.top_k is not None:
        selected = torch.full((tokens, layer.top_k), -(1 << 30), dtype=torch.int32)
        for t, position in enumerate(paging.positions_T.tolist()):
            visible = (position + 1) // layer.ratio
            if visible > layer.top_k:
                selected[t] = torch.randperm(visible, generator=generator)[: layer.top_k].sort().values.int()
        selected = selected.to(DEVICE)
    return Case(
        q=q,
        fresh=fresh,
        window=fill_store(fmt, pages_of(paging.window_SP), 64, DEVICE, seed=2),
        entries=entries,
        paging=paging,
        sink=torch.randn(layer.heads, generator=generator).to(DEVICE),
        cos=cos,
        sin=sin,
        selected=selected,
        layer=layer,
    )


def close(got: Tensor, wanted: Tensor) -> None:
    """Compare as the docstring of ``attention`` promises."""
    assert got.dtype == wanted.dtype == torch.bfloat16 and got.shape == wanted.shape
    if got.numel():
        assert ((got.float() - wanted.float()).abs() <= attention_bound(wanted)).all(), (got.float() - wanted.float()).abs().max()


SMALL = [
    (TINY, [(0, 1)], 1),
    (TINY, [(0, 3), (126, 4)], 1),
    (TINY, [(700, 2), (5, 1)], 1),
    (TINY, [(700, 1), (5, 1), (254, 1)], 3),
    (replace(TINY, top_k=None), [(400, 1), (130, 2)], 2),
    (replace(TINY, ratio=128, top_k=None), [(127, 1), (1300, 2)], 16),
    (replace(TINY, ratio=0, top_k=None), [(63, 2), (1000, 1)], 2),
    (replace(TINY, heads=21, window=8, top_k=9), [(6, 3), (90, 1)], 1),
    (replace(TINY, heads=64), [(300, 1)], 1),
    (replace(TINY, nope=192), [(300, 1)], 2),
    (replace(FLASH, heads=16, top_k=64), [(290, 1)], 1),
]
REAL = [
    (layer, steps, splits)
    for layer in (
        FLASH,
        replace(FLASH, heads=128, top_k=1024),
        replace(FLASH, ratio=128, top_k=None),
        replace(FLASH, ratio=0, top_k=None),
        TINY,
    )
    for steps, splits in (
        ([(0, 300)], 1),
        ([(5000, 70), (100, 1), (9000, 1)], 1),
        ([(1023, 1), (70000, 1), (0, 1)], 2),
        ([(1023, 1), (70000, 1), (0, 1), (2600, 1)], 3),
        ([(70001, 1), (40, 1)], 16),
    )
]


@pytest.mark.parametrize(("layer", "steps", "splits"), SMALL + (REAL if CUDA else []))
def test_kernel_equals_the_reference(layer: Layer, steps: list[tuple[int, int]], splits: int) -> None:
    given = case(layer, steps)
    close(given.kernel(splits), given.reference())


@pytest.mark.parametrize(
    "layer", [TINY, replace(TINY, heads=64), replace(TINY, nope=192, heads=20), replace(FLASH, heads=16, top_k=64)]
)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("tile", sorted({tile_for(64, capability) for capability in (80, 90, 100)}, key=repr), ids=repr)
@pytest.mark.skipif(CUDA, reason="a chip runs its own tiles")
def test_every_tile_equals_the_reference(tile: Tile, splits: int, layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_triton, "tile_for", lambda heads, capability: tile)
    given = case(layer, [(300, 1)])
    close(given.kernel(splits), given.reference())


def test_fresh_rows_may_be_spread_out() -> None:
    given = case(TINY, [(300, 3)], aligned=True)
    assert given.fresh.stride(0) % 16 == 0
    close(given.kernel(1), given.reference())


@pytest.mark.filterwarnings("ignore:overflow")  # the interpreter's; infinity is meant
@pytest.mark.parametrize("splits", [1, 3])
def test_padding_gives_zeros_and_reads_nothing(splits: int) -> None:
    given = case(TINY, [(200, 2)], padding=2)
    got = given.kernel(splits)
    close(got, given.reference())
    assert got[2:].eq(0).all()


@pytest.mark.parametrize(
    ("steps", "splits"), [([(126, 2)], 1), *([([(200, 5), (2, 5), (126, 5)], n) for n in (1, 3)] if CUDA else [])]
)
def test_rows_of_a_block_see_each_other(steps: list[tuple[int, int]], splits: int) -> None:
    """A drafter's block: every row stands where the last one does, and sees so many rows farther back."""
    rows = steps[0][1]
    given = case(replace(TINY, ratio=0, top_k=None, window=128 + rows), steps)
    positions = given.paging.positions_T[rows - 1 :: rows].repeat_interleave(rows)
    given = replace(given, paging=replace(given.paging, positions_T=positions))
    close(given.kernel(splits), given.reference())


def test_no_tokens_give_no_output() -> None:
    given = case(TINY, [(4, 0)])
    assert given.kernel(2).shape == given.reference().shape == (0, 8, 128)


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")  # the other token's
@pytest.mark.parametrize("splits", [1, 3])
def test_what_a_token_does_not_see_changes_nothing(splits: int) -> None:
    """Bits of a token follow from its own rows: all else may be NaN."""
    given = case(TINY, [(300, 1), (20, 1)])
    wanted = given.kernel(splits)
    entries, window = given.entries, given.window
    assert entries is not None
    unseen = torch.full((1000,), True, device=DEVICE)
    page, place = given.paging.grow_SP[0], torch.arange(75, device=DEVICE)
    mine = given.selected[0].long() if given.selected is not None else place
    unseen[page[mine // 64].long() * 64 + mine % 64] = False
    for address in unseen[: len(entries.memory) * 64].nonzero().flatten().tolist():
        entries.memory[address // 64, address % 64 * 192 : address % 64 * 192 + 192] = 0x7F
    read = torch.arange(173, 300, device=DEVICE)
    pages = given.paging.window_SP[0][read // 64 - given.paging.window_first_S[0]].long()
    seen = set((pages * 64 + read % 64).tolist())
    for address in set(range(len(window.memory) * 64)) - seen:
        window.memory[address // 64, address % 64 * 192 : address % 64 * 192 + 192] = 0x7F
    given.fresh[1] = 0x7F
    assert torch.equal(given.kernel(splits)[0], wanted[0])


def test_a_token_alone_has_the_same_bits() -> None:
    given = case(TINY, [(700, 1), (5, 1), (254, 1)])
    for splits in (1, 3):
        together = given.kernel(splits)
        p = given.paging
        one = replace(
            p,
            positions_T=p.positions_T[2:],
            sequence_T=p.sequence_T[:1],
            first_S=p.first_S[2:],
            grow_SP=p.grow_SP[2:],
            window_SP=p.window_SP[2:],
            window_first_S=p.window_first_S[2:],
        )
        selected = None if given.selected is None else given.selected[2:]
        angles = {"cos": given.cos[2:], "sin": given.sin[2:]}
        alone = replace(given, q=given.q[2:], fresh=given.fresh[2:], paging=one, selected=selected, **angles)
        assert torch.equal(alone.kernel(splits)[0], together[2])


@pytest.mark.filterwarnings("ignore:overflow")  # the interpreter's; infinity is meant
def test_sink_takes_all_or_nothing() -> None:
    given = case(TINY, [(300, 1)])
    for splits in (1, 3):
        assert replace(given, sink=torch.full_like(given.sink, 1e4)).kernel(splits).eq(0).all()
        without = replace(given, sink=torch.full_like(given.sink, float("-inf")))
        close(without.kernel(splits), without.reference())
