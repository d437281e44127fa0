"""Attention of few tokens (``decode_attention_triton``), whose KV splits ``merged`` adds: the kernels against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.test_attention_triton import CUDA, FLASH, TINY, Layer, Steps, case, close, equals_the_reference, kernel, only

pytest.importorskip("triton")

from dsv4lite.kernels.attention import paged_attention
from dsv4lite.kernels.attention.merge_triton import merged
from dsv4lite.kernels.rope import rope
from tests.kernels.paged import attention_bound

pytestmark = pytest.mark.kernel

SLIDING = replace(TINY, ratio=0, top_k=None)
CASES: list[tuple[Layer, Steps, int]] = [
    (TINY, [(700, 1), (5, 1)], 8),  # one token each: listed entries, and a window that fills
    (replace(TINY, top_k=256), [(62, 2), (600, 1)], 4),  # all entries, pieces in a loop
    (replace(TINY, ratio=128, top_k=None), [(40000, 1)], 4),  # entries of many pages
    (replace(TINY, ratio=128, top_k=None), [(2000, 1)], 16),  # small pieces
    (replace(SLIDING, window=133), [(500, 2)], 8),  # four pages of the window
    (replace(TINY, heads=21, window=8, top_k=9), [(90, 1)], 4),
    (replace(TINY, nope=192), [(300, 1)], 9),
    (replace(FLASH, heads=16, top_k=64), [(290, 1)], 8),
]
REAL: list[tuple[Layer, Steps, int]] = [
    (layer, steps, splits)
    for layer in (FLASH, replace(FLASH, heads=128), replace(FLASH, ratio=128, top_k=None), replace(FLASH, ratio=0, top_k=None))
    for steps, splits in (([(0, 1), (1023, 1), (70000, 1)], 16), ([(40, 3), (9000, 2), (2600, 1)], 8), ([(700, 13)], 4))
]


@pytest.mark.parametrize(("layer", "steps", "splits"), CASES + (REAL if CUDA else []))
def test_kernel_equals_the_reference(layer: Layer, steps: Steps, splits: int) -> None:
    equals_the_reference(case(layer, steps, splits))


@pytest.mark.parametrize(("layer", "steps", "splits"), [CASES[0], CASES[4], CASES[5], CASES[6], *(REAL if CUDA else [])])
def test_queries_may_come_as_their_product_left_them(layer: Layer, steps: Steps, splits: int) -> None:
    """Neither normed nor rotated, in rows that hold more."""
    given = case(layer, steps, splits)
    rows = torch.nn.functional.pad(3 * given.q_THC.flatten(1), (0, 128), value=torch.nan)
    raw = rows[:, : given.q_THC[0].numel()].unflatten(1, given.q_THC.shape[1:])
    given = given._replace(q_THC=raw, norm_eps=1e-6)
    close(kernel(given), paged_attention.reference(given))


def test_fresh_rows_may_be_spread_out() -> None:
    given = case(TINY, [(300, 2)], 4, room=8)
    assert given.fresh_TB.stride(0) % 16 == 0
    equals_the_reference(given)


@pytest.mark.filterwarnings("ignore:overflow")  # the interpreter's; infinity is meant
def test_padding_gives_zeros_and_reads_nothing() -> None:
    given = case(SLIDING, [(200, 1)], 8, padding=1)
    given.fresh_TB[1:] = 0x7F
    equals_the_reference(given)
    assert kernel(given)[1:].eq(0).all()


def test_a_token_alone_has_the_same_bits() -> None:
    given = case(TINY, [(5, 1), (254, 1)], 8)
    together = kernel(given)
    for singles in (True, False):
        assert torch.equal(kernel(only(given, 1, singles=singles))[0], together[1])


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
    parts, stats = (part.copy_(torch.randn(part.shape, generator=generator)) for part in given.room_for_splits())
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
