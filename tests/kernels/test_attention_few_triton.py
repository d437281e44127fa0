"""Attention of few tokens: the kernel against the reference, and what its bits depend on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.test_attention_triton import FLASH, TINY, Case, Layer, case, close

pytest.importorskip("triton")

from dsv4lite.kernels.attention.decode_triton import few_attention_triton
from dsv4lite.kernels.attention.inputs import PackedInputs
from dsv4lite.kernels.norm import rms_norm_heads
from dsv4lite.kernels.rope import rope

pytestmark = pytest.mark.kernel

CUDA = torch.cuda.is_available()


def kernel(given: Case, splits: int, norm_eps: float | None = None) -> Tensor:
    q, fresh, window, entries, paging, sink, scale, cos, sin, ratio, selected = given._arguments()
    inputs = PackedInputs(
        q_THC=q,
        fresh_TB=fresh,
        window=window,
        entries=entries,
        paging=paging,
        ratio=ratio,
        selected_TK=selected,
        splits=splits,
        window_size=given.layer.window,
    )
    return few_attention_triton(inputs, sink, scale, (cos, sin), norm_eps)


SLIDING = replace(TINY, ratio=0, top_k=None)
CASES = [
    (TINY, [(700, 1), (5, 1)], 8),  # one token each: listed entries, and a window that fills
    (TINY, [(62, 2), (300, 1)], 2),  # all entries, pieces in a loop
    (replace(TINY, ratio=128, top_k=None), [(20000, 1)], 2),  # entries of many pages
    (replace(TINY, ratio=128, top_k=None), [(2000, 1)], 16),  # small pieces
    (replace(SLIDING, window=133), [(500, 2)], 8),  # four pages of the window
    (replace(TINY, heads=21, window=8, top_k=9), [(90, 1)], 1),
    (replace(TINY, nope=192), [(300, 1)], 9),
    (replace(FLASH, heads=16, top_k=64), [(290, 1)], 8),
]
REAL = [
    (layer, steps, splits)
    for layer in (FLASH, replace(FLASH, heads=128), replace(FLASH, ratio=128, top_k=None), replace(FLASH, ratio=0, top_k=None))
    for steps, splits in (([(0, 1), (1023, 1), (70000, 1)], 16), ([(40, 3), (9000, 2), (2600, 1)], 8), ([(700, 13)], 4))
]


@pytest.mark.parametrize(("layer", "steps", "splits"), CASES + (REAL if CUDA else []))
def test_kernel_equals_the_reference(layer: Layer, steps: list[tuple[int, int]], splits: int) -> None:
    given = case(layer, steps)
    close(kernel(given, splits), given.reference())


@pytest.mark.parametrize(("layer", "steps", "splits"), [CASES[0], CASES[4], CASES[5], CASES[6], *(REAL if CUDA else [])])
def test_queries_may_come_as_their_product_left_them(layer: Layer, steps: list[tuple[int, int]], splits: int) -> None:
    """Neither normed nor rotated, in rows that hold more."""
    given = case(layer, steps)
    rows = torch.nn.functional.pad(3 * given.q.flatten(1), (0, 128), value=torch.nan)
    raw = rows[:, : given.q[0].numel()].unflatten(1, given.q.shape[1:])
    wanted = replace(given, q=rope(rms_norm_heads(raw, 1e-6), given.cos, given.sin))
    close(kernel(replace(given, q=raw), splits, 1e-6), wanted.reference())


def test_fresh_rows_may_be_spread_out() -> None:
    given = case(TINY, [(300, 2)], aligned=True)
    assert given.fresh.stride(0) % 16 == 0
    close(kernel(given, 1), given.reference())


@pytest.mark.filterwarnings("ignore:overflow")  # the interpreter's; infinity is meant
def test_padding_gives_zeros_and_reads_nothing() -> None:
    given = case(SLIDING, [(200, 1)], padding=1)
    given.fresh[1:] = 0x7F
    got = kernel(given, 8)
    close(got, given.reference())
    assert got[1:].eq(0).all()


def test_a_token_alone_has_the_same_bits() -> None:
    given = case(TINY, [(5, 1), (254, 1)])
    together, p = kernel(given, 8), given.paging
    alone = replace(
        p,
        positions_T=p.positions_T[1:],
        sequence_T=p.sequence_T[:1],
        first_S=p.first_S[1:],
        rows_S=p.rows_S[:1],
        grow_SP=p.grow_SP[1:],
        window_SP=p.window_SP[1:],
        window_first_S=p.window_first_S[1:],
    )
    assert given.selected is not None
    part = {name: getattr(given, name)[1:] for name in ("q", "fresh", "cos", "sin", "selected")}
    for singles in (True, False):
        got = kernel(replace(given, **part, paging=replace(alone, singles=singles)), 8)
        assert torch.equal(got[0], together[1])
