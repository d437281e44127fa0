"""Adding the shares of attention against the formula in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4lite.kernels.rope import rope
from tests.kernels.paged import attention_bound
from tests.kernels.test_attention_triton import TINY, Case, case

pytest.importorskip("triton")

from dsv4lite.kernels.attention.inputs import PackedInputs
from dsv4lite.kernels.attention.merge_triton import merged

pytestmark = pytest.mark.kernel

ROWS = 64  # of a piece


def inputs_of(given: Case, splits: int) -> PackedInputs:
    names = {"q_THC": given.q, "fresh_TB": given.fresh, "selected_TK": given.selected, "ratio": given.layer.ratio}
    stores = {"window": given.window, "entries": given.entries, "window_size": given.layer.window}
    return PackedInputs(**names, **stores, paging=given.paging, splits=splits)


@pytest.mark.filterwarnings("ignore:overflow")  # the interpreter's; infinity is meant
@pytest.mark.parametrize(
    ("splits", "fills", "used"),
    [(2, True, [2, 1, 2, 0]), (4, False, [4, 2, 4, 2]), (16, False, [10, 2, 6, 2])],
    ids=["two", "four", "in two chunks"],
)
def test_used_shares_are_added_and_others_ignored(splits: int, fills: bool, used: list[int]) -> None:
    """Of tokens with 500, 0 and 251 entries, the second in a window that fills; and padding."""
    given = case(replace(TINY, top_k=None), [(1999, 1), (2, 1), (1003, 1)], padding=1)
    inputs = inputs_of(given, splits)
    generator = torch.Generator().manual_seed(0)
    parts, stats = (part.copy_(torch.randn(part.shape, generator=generator)) for part in inputs.shares())
    stats[..., 1] = stats[..., 1].abs() + 1
    for t, count in enumerate(used):
        parts[count:, t], stats[count:, t] = float("nan"), float("nan")
    parts[:, 3], stats[:, 3, :, 0], stats[:, 3, :, 1] = 0.0, -1e30, 0.0
    got = merged(inputs, parts, stats, given.sink, (given.cos, given.sin), ROWS, fills=fills)
    assert got[3].eq(0).all()
    for t, count in enumerate(used[:3]):
        weight = torch.exp2(stats[:count, t, :, 0].double())
        total = (weight * stats[:count, t, :, 1]).sum(0) + given.sink.double().exp()
        exact = (weight[..., None] * parts[:count, t]).sum(0) / total[:, None]
        wanted = rope(exact.float()[None], given.cos[t : t + 1], given.sin[t : t + 1], inverse=True)
        assert ((got[t].float() - wanted).abs() <= attention_bound(wanted)).all()
