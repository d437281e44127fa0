"""The kernels of hyper-connections against the references."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.hc import (
    HcMix,
    HcWeights,
    hc_collapse_ref,
    hc_expand_ref,
    hc_head_ref,
    hc_leave_enter_ref,
    hc_normalise,
    hc_project,
)
from dsv4lite.kernels.quantize import quantize_fp8_ref

pytest.importorskip("triton")

from dsv4lite.kernels.hc import triton as hc_triton
from dsv4lite.kernels.hc.triton import TILES, Tile, collapse_triton, expand_triton, leave_enter_triton

pytestmark = pytest.mark.kernel

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
ITERS, EPS = 20, 1e-6
OPTIONS = {"iters": ITERS, "eps": EPS, "norm_eps": EPS}
# Rounded numbers: apart by one rounding at most, and rarely.
ROUNDED = {"rtol": 2.0**-7, "atol": 2.0**-9}

SHAPES = [(0, 64), (1, 256), (3, 100)]
if ON_GPU:
    SHAPES += [(1, 4096), (16, 4096), (63, 7168), (257, 4096), (1500, 4096), (8192, 4096), (1100, 7168)]
shapes = pytest.mark.parametrize(("tokens", "width"), SHAPES)


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Fill what is not initialised with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(DEVICE)


def weights_of(width: int, *, head: bool = False) -> HcWeights:
    rows = 4 if head else 24
    fn = random(rows, 4 * width, seed=1, scale=(4 * width) ** -0.5)
    return HcWeights(fn, random(rows, seed=2), 1 + random(1 if head else 3, seed=3, scale=0.2))


def pending_of(tokens: int, width: int) -> tuple[Tensor, HcMix]:
    mix = HcMix(random(tokens, 4, seed=6).sigmoid(), random(tokens, 4, 4, seed=7).softmax(-1))
    return random(tokens, width, seed=5).bfloat16(), mix


def streams_of(tokens: int, width: int) -> Tensor:
    return random(tokens, 4, width, scale=3.0).bfloat16()


def assert_rounded(got: Tensor, expected: Tensor, units: int = 1) -> None:
    """Compare after ``units`` roundings to bfloat16 in a row."""
    assert got.dtype == torch.bfloat16 and got.shape == expected.shape
    torch.testing.assert_close(got.float(), expected.float(), rtol=units * ROUNDED["rtol"], atol=ROUNDED["atol"])
    assert got.numel() < 200 or (got != expected).float().mean() < 0.02


@shapes
def test_leaving_agrees_with_the_reference(tokens: int, width: int) -> None:
    x, (y, mix) = streams_of(tokens, width), pending_of(tokens, width)
    assert_rounded(expand_triton(y, x, *mix), hc_expand_ref(y, x, mix))


@shapes
def test_entering_projects_what_it_leaves(tokens: int, width: int) -> None:
    assert_enters(leave_enter_triton, tokens, width)


def assert_enters(enter: Callable[..., tuple[Tensor, Tensor]], tokens: int, width: int) -> None:
    x, (y, mix), fn = streams_of(tokens, width), pending_of(tokens, width), weights_of(width).fn
    left, sums = enter(x, (y, *mix), fn)
    assert_rounded(left, hc_leave_enter_ref(x, (y, mix), fn)[0])
    # As good as float32: the same sums in float64.
    z = left.flatten(1).double()
    size = z.abs() @ fn.double().abs().T
    error = (sums.double().sum(0)[:, :-1] - z @ fn.double().T).abs() / size.clamp_min(1e-30)
    assert error.numel() == 0 or error.max() < 1e-6
    torch.testing.assert_close(sums.double().sum(0)[:, -1], z.square().sum(-1), rtol=1e-6, atol=0)
    torch.testing.assert_close(
        hc_normalise(sums, 4 * width, EPS), hc_project(left.cpu(), fn.cpu(), EPS).to(DEVICE), rtol=0, atol=1e-5
    )


def test_entering_without_leaving_returns_the_streams() -> None:
    x, fn = streams_of(3, 64), weights_of(64).fn
    left, sums = leave_enter_triton(x, None, fn)
    assert left is x
    torch.testing.assert_close(hc_normalise(sums, 256, EPS), hc_project(x, fn, EPS), rtol=0, atol=1e-5)


@shapes
def test_collapse_agrees_with_the_reference(tokens: int, width: int) -> None:
    x, w, norm = streams_of(tokens, width), weights_of(width), 1 + random(width, seed=8, scale=0.3)
    _, sums = leave_enter_triton(x, None, w.fn)
    entered, codes, scales, post, comb = collapse_triton(x, sums, w.base, w.scale, norm, **OPTIONS, fp8=True)
    expected, mix = hc_collapse_ref(x, sums, w.base, w.scale, norm, **OPTIONS)
    assert_rounded(entered, expected, units=2)
    torch.testing.assert_close(post, mix.post, rtol=0, atol=1e-5)
    torch.testing.assert_close(comb, mix.comb, rtol=0, atol=1e-5)
    wanted_codes, wanted_scales = quantize_fp8_ref(entered, 128)
    assert torch.equal(codes, wanted_codes.view(torch.uint8)) and torch.equal(scales, wanted_scales)
    plain = collapse_triton(x, sums, w.base, w.scale, norm, **OPTIONS, fp8=False)
    assert_rounded(plain[0], entered, units=2)
    for ours, theirs in zip(plain[3:], (post, comb), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_mixing_agrees_for_uneven_matrices() -> None:
    x, w = streams_of(9, 64), weights_of(64)
    w = w._replace(scale=torch.tensor([3.0, 5.0, 12.0], device=DEVICE))
    _, sums = leave_enter_triton(x, None, w.fn)
    *_, post, comb = collapse_triton(x, sums, w.base, w.scale, torch.ones(64, device=DEVICE), **OPTIONS, fp8=False)
    _, mix = hc_collapse_ref(x, sums, w.base, w.scale, torch.ones(64, device=DEVICE), **OPTIONS)
    torch.testing.assert_close(post, mix.post, rtol=0, atol=1e-5)
    torch.testing.assert_close(comb, mix.comb, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [256, 4096])
def test_few_tokens_are_mixed_one_by_a_program(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of many tokens takes a hundred times as long, and a small model's few tokens once waited for one."""
    grids: list[tuple[int, ...]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **constants: grids.append((*grid, constants["num_warps"]))

    monkeypatch.setattr(hc_triton, "collapse_kernel", Kernel())
    x, w = streams_of(3, width), weights_of(width)
    sums = torch.empty(8 * hc_triton.units_of(width), 3, 25, device=DEVICE)
    collapse_triton(x, sums, w.base, w.scale, torch.ones(width, device=DEVICE), **OPTIONS, fp8=True)
    assert grids[0][0] == 3 + 3 and grids[0][1] >= 4


@shapes
def test_head_agrees_with_the_reference(tokens: int, width: int) -> None:
    x, w = streams_of(tokens, width), weights_of(width, head=True)
    _, sums = leave_enter_triton(x, None, w.fn)
    got = collapse_triton(x, sums, w.base, w.scale, None, iters=1, eps=EPS, norm_eps=EPS, fp8=False)[0]
    assert_rounded(got, hc_head_ref(x, w, eps=EPS, norm_eps=EPS))


def everything(x: Tensor, y: Tensor, mix: HcMix, w: HcWeights, norm: Tensor) -> list[Tensor]:
    left, sums = leave_enter_triton(x, (y, *mix), w.fn)
    return [left, *collapse_triton(left, sums, w.base, w.scale, norm, **OPTIONS, fp8=True)]


@pytest.mark.parametrize("tile", [tile for _, tile in TILES], ids=lambda tile: f"{tile.tokens}-{tile.whole}")
@pytest.mark.parametrize("width", [640, 4096, 7168] if ON_GPU else [288])
def test_every_tile_and_number_of_tokens_gives_the_same_bits(width: int, tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = 130 if ON_GPU else 3
    x, (y, mix), w = streams_of(tokens, width), pending_of(tokens, width), weights_of(width)
    norm = 1 + random(width, seed=8, scale=0.3)
    expected = everything(x, y, mix, w, norm)
    monkeypatch.setattr(hc_triton, "tile_for", lambda tokens: tile)
    for part in (slice(0, tokens), slice(tokens - 1, tokens)):
        got = everything(x[part], y[part], HcMix(mix.post[part], mix.comb[part]), w, norm)
        assert all(torch.equal(a, b[part]) for a, b in zip(got, expected, strict=True))
