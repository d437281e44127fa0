"""Attention on plain rows in pages: the kernel against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.attention import paged_attention_ref
from dsv4lite.kernels.rope import rope_angles
from dsv4lite.kernels.rows import PlainRow, RowStore
from tests.kernels.paged import fill_store, make_paging, pages_of

triton = pytest.importorskip("triton")

from dsv4lite.kernels.attention import unquantized_triton as plain_attention_triton  # noqa: E402
from dsv4lite.kernels.attention.unquantized_triton import Tile, plain_paged_attention_triton, tile_for  # noqa: E402

pytestmark = pytest.mark.kernel

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
Steps = Sequence[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Sizes of a layer."""

    heads: int = 4
    width: int = 32
    rope: int = 8
    ratio: int = 4
    top_k: int | None = 9
    window: int = 8


FLASH = Layer(heads=64, width=512, rope=64, top_k=512, window=128)
WIDE = replace(FLASH, heads=20, top_k=64)


def case(layer: Layer, dtype: torch.dtype, steps: Steps, *, padding: int = 0) -> dict[str, Any]:
    """Return the arguments of ``paged_attention`` but for the splits."""
    generator, fmt = torch.Generator().manual_seed(1), PlainRow(layer.width, dtype)
    paging = make_paging(steps, DEVICE, padding=padding)
    tokens = len(paging.positions_T)
    selected: Tensor | None = None
    if layer.top_k is not None:
        selected = torch.full((tokens, layer.top_k), -(1 << 30), dtype=torch.int32)
        for t, position in enumerate(paging.positions_T.tolist()):
            visible = (position + 1) // layer.ratio
            if visible > layer.top_k:
                selected[t] = torch.randperm(visible, generator=generator)[: layer.top_k].sort().values.int()
        selected = selected.to(DEVICE)
    cos, sin = rope_angles(paging.positions_T, torch.rand(layer.rope // 2, generator=generator).to(DEVICE))
    fresh = torch.randn(tokens, layer.width, generator=generator).to(dtype).view(torch.uint8).to(DEVICE)
    entries = fill_store(fmt, pages_of(paging.grow_SP), 256 // layer.ratio, DEVICE, seed=3) if layer.ratio else None
    return {
        "q_THC": (2 * torch.randn(tokens, layer.heads, layer.width, generator=generator)).to(dtype).to(DEVICE),
        "fresh_TB": fresh,
        "window": fill_store(fmt, pages_of(paging.window_SP), 64, DEVICE, seed=2),
        "entries": entries,
        "paging": paging,
        "sink_H": torch.randn(layer.heads, generator=generator).to(DEVICE),
        "scale": layer.width**-0.5,
        "cos": cos,
        "sin": sin,
        "ratio": layer.ratio,
        "selected_TK": selected,
        "window_size": layer.window,
    }


def close(got: Tensor, wanted: Tensor) -> None:
    """Compare as the docstring of ``attention`` promises."""
    assert got.dtype == wanted.dtype and got.shape == wanted.shape
    if got.numel():
        near, far = (0.0, 2**-13) if got.dtype == torch.float32 else (2**-7, 2**-8)
        bound = near * wanted.float().abs() + far * wanted.float().abs().amax(-1, keepdim=True)
        assert ((got.float() - wanted.float()).abs() <= bound).all(), (got.float() - wanted.float()).abs().max()


CASES: list[tuple[Layer, Steps, int]] = [
    (Layer(), [(0, 3), (126, 4)], 1),
    (Layer(), [(700, 1), (5, 1), (254, 1)], 3),
    (Layer(ratio=8, top_k=None, width=20), [(300, 2)], 16),
    (Layer(ratio=0, top_k=None, heads=17, window=70), [(63, 1), (200, 1)], 2),
    (Layer(width=100, rope=64, window=128), [(290, 1)], 1),
]
if CUDA:
    shapes = (FLASH, WIDE, replace(FLASH, ratio=128, top_k=None), replace(FLASH, ratio=0, top_k=None))
    runs: list[tuple[Steps, int]] = [([(0, 300)], 1), ([(5000, 70), (100, 1)], 1), ([(1023, 1), (70000, 1), (0, 1)], 4)]
    CASES += [(layer, steps, splits) for layer in shapes for steps, splits in (*runs, ([(70001, 1), (40, 1)], 16))]


@DTYPES
@pytest.mark.parametrize(("layer", "steps", "splits"), CASES)
def test_kernel_equals_the_reference(layer: Layer, steps: Steps, splits: int, dtype: torch.dtype) -> None:
    given = case(layer, dtype, steps)
    close(plain_paged_attention_triton(**given, splits=splits), paged_attention_ref(**given))


def widened(store: RowStore) -> RowStore:
    """Return the same rows in float32."""
    wide = RowStore(PlainRow(store.format.width, torch.float32), len(store.memory), store.rows_per_page, DEVICE)
    wide.memory.view(torch.float32).copy_(store.memory.view(torch.bfloat16))
    return wide


@pytest.mark.parametrize("splits", [1, 4])
def test_bfloat16_is_no_farther_from_float32_than_the_reference(splits: int) -> None:
    """Probabilities are rounded relative to other peaks, so numbers differ; their errors are as large."""
    given = case(FLASH if CUDA else Layer(heads=16, width=64, top_k=None, window=128), torch.bfloat16, [(1100, 2)])
    wide = {name: widened(given[name]) for name in ("window", "entries")}
    fresh = given["fresh_TB"].view(torch.bfloat16).float().view(torch.uint8)
    exact = paged_attention_ref(**{**given, **wide, "q_THC": given["q_THC"].float(), "fresh_TB": fresh})
    ours, theirs = (
        (result.float() - exact).norm()
        for result in (plain_paged_attention_triton(**given, splits=splits), paged_attention_ref(**given))
    )
    assert theirs > 0 and ours < 1.03 * theirs


@DTYPES
@pytest.mark.parametrize("tile", sorted({tile_for(64, n, 1, c) for n in (1024, 2048) for c in (80, 90)}, key=repr), ids=repr)
@pytest.mark.skipif(CUDA, reason="a chip runs its own tiles")
def test_every_tile_equals_the_reference(tile: Tile, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_attention_triton, "tile_for", lambda *layer: tile)
    given = case(Layer(heads=20), dtype, [(300, 1)])
    close(plain_paged_attention_triton(**given, splits=1), paged_attention_ref(**given))


@pytest.mark.parametrize("splits", [1, 3])
def test_padding_gives_zeros(splits: int) -> None:
    given = case(Layer(), torch.bfloat16, [(200, 2)], padding=2)
    got = plain_paged_attention_triton(**given, splits=splits)
    close(got, paged_attention_ref(**given))
    assert got[:2].ne(0).any() and got[2:].eq(0).all()


@pytest.mark.parametrize("splits", [1, 3])
def test_a_token_alone_has_the_same_bits(splits: int) -> None:
    given = case(Layer(), torch.float32, [(700, 1), (5, 1), (54, 1)])
    p = given["paging"]
    together = plain_paged_attention_triton(**given, splits=splits)
    of_sequences = ("first_S", "grow_SP", "window_SP", "window_first_S", "positions_T")
    one = replace(p, sequence_T=p.sequence_T[:1], **{name: getattr(p, name)[2:] for name in of_sequences})
    alone = {name: given[name][2:] for name in ("q_THC", "fresh_TB", "cos", "sin", "selected_TK")}
    assert torch.equal(plain_paged_attention_triton(**given | alone | {"paging": one}, splits=splits)[0], together[2])
