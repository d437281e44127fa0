"""The kernels of hyper-connections against the references."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.experts import ExpertSum, sum_experts_ref
from dsv4lite.kernels.hc import (
    COLLAPSED_CHANNELS,
    DECODE_SMALL_TOKENS,
    DECODE_SMALL_WIDTH,
    HcEntered,
    HcMix,
    HcSettings,
    HcWeights,
    hc_collapse_ref,
    hc_expand_ref,
    hc_head_ref,
    hc_normalise,
    hc_project,
    hc_sums,
)
from dsv4lite.kernels.norm import rms_norm
from dsv4lite.kernels.quantize import quantize_fp8

pytest.importorskip("triton")

from dsv4lite.kernels.counters import COUNTERS, counters_of
from dsv4lite.kernels.hc import general_triton
from dsv4lite.kernels.hc import triton as hc_triton
from dsv4lite.kernels.hc.decode_small_triton import enter_triton, room_of, sizes_of
from dsv4lite.kernels.hc.triton import TILES, Tile, collapse_triton, leave_enter_triton

pytestmark = pytest.mark.kernel

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
ITERS, EPS = 20, 1e-6
SETTINGS = HcSettings(ITERS, EPS, EPS)
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


def weights_of(width: int, *, streams: int = 4, head: bool = False) -> HcWeights:
    rows = streams if head else streams * (streams + 2)
    fn = random(rows, streams * width, seed=1, scale=(streams * width) ** -0.5)
    return HcWeights(fn, random(rows, seed=2), 1 + random(1 if head else 3, seed=3, scale=0.2))


def norm_of(width: int) -> Tensor:
    return 1 + random(width, seed=8, scale=0.3)


def pending_of(tokens: int, width: int, streams: int = 4) -> tuple[Tensor, HcMix]:
    mix = HcMix(random(tokens, streams, seed=6).sigmoid(), random(tokens, streams, streams, seed=7).softmax(-1))
    return random(tokens, width, seed=5).bfloat16(), mix


def streams_of(tokens: int, width: int) -> Tensor:
    return random(tokens, 4, width, scale=3.0).bfloat16()


def assert_rounded(got: Tensor, expected: Tensor, units: int = 1) -> None:
    """Compare after ``units`` roundings to bfloat16 in a row."""
    assert got.dtype == torch.bfloat16 and got.shape == expected.shape
    torch.testing.assert_close(got.float(), expected.float(), rtol=units * ROUNDED["rtol"], atol=ROUNDED["atol"])
    assert got.numel() < 200 or (got != expected).float().mean() < 0.02


def assert_quantized(entered: Tensor, rounded: tuple[Tensor, Tensor] | None) -> None:
    assert rounded is not None
    codes, scales = quantize_fp8.reference(entered, 128)
    assert torch.equal(rounded[0].view(torch.uint8), codes.view(torch.uint8)) and torch.equal(rounded[1], scales)


@shapes
def test_leaving_and_entering_agree_with_the_references(tokens: int, width: int) -> None:
    x, (y, mix), fn = streams_of(tokens, width), pending_of(tokens, width), weights_of(width).fn
    assert_rounded(leave_enter_triton(x, (y, mix), None, None)[0], hc_expand_ref(y, x, mix))
    left, sums = leave_enter_triton(x, (y, mix), fn, None)
    assert_rounded(left, hc_expand_ref(y, x, mix))
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
    left, sums = leave_enter_triton(x, None, fn, None)
    assert left is x
    torch.testing.assert_close(hc_normalise(sums, 256, EPS), hc_project(x, fn, EPS), rtol=0, atol=1e-5)


@shapes
def test_collapse_agrees_with_the_reference(tokens: int, width: int) -> None:
    x, w, norm = streams_of(tokens, width), weights_of(width), norm_of(width)
    _, sums = leave_enter_triton(x, None, w.fn, None)
    entered, rounded, mix = collapse_triton(x, sums, w, norm, SETTINGS, quantize=True)
    expected, wanted = hc_collapse_ref(x, sums, w, norm, SETTINGS)
    assert_rounded(entered, expected, units=2)
    torch.testing.assert_close(mix, wanted, rtol=0, atol=1e-5)
    assert_quantized(entered, rounded)
    plain, nothing, same = collapse_triton(x, sums, w, norm, SETTINGS, quantize=False)
    assert_rounded(plain, entered, units=2)
    assert nothing is None
    torch.testing.assert_close(same, mix, rtol=0, atol=1e-6)


def test_mixing_agrees_for_uneven_matrices() -> None:
    x, w = streams_of(9, 64), weights_of(64)
    w, norm = w._replace(scale=torch.tensor([3.0, 5.0, 12.0], device=DEVICE)), torch.ones(64, device=DEVICE)
    _, sums = leave_enter_triton(x, None, w.fn, None)
    _, _, got = collapse_triton(x, sums, w, norm, SETTINGS, quantize=False)
    torch.testing.assert_close(got, hc_collapse_ref(x, sums, w, norm, SETTINGS)[1], rtol=1e-5, atol=1e-5)


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
    collapse_triton(x, sums, w, torch.ones(width, device=DEVICE), SETTINGS, quantize=True)
    assert grids[0][0] == 3 + 3 and grids[0][1] >= 4


@shapes
def test_head_agrees_with_the_reference(tokens: int, width: int) -> None:
    x, w = streams_of(tokens, width), weights_of(width, head=True)
    _, sums = leave_enter_triton(x, None, w.fn, None)
    got = collapse_triton(x, sums, w, None, SETTINGS, quantize=False)[0]
    assert_rounded(got, hc_head_ref(x, w, eps=EPS, norm_eps=EPS))


def everything(x: Tensor, y: Tensor, mix: HcMix, w: HcWeights, norm: Tensor) -> list[Tensor]:
    left, sums = leave_enter_triton(x, (y, mix), w.fn, None)
    entered, rounded, returned = collapse_triton(left, sums, w, norm, SETTINGS, quantize=True)
    assert rounded is not None
    return [left, entered, rounded[0].view(torch.uint8), rounded[1], *returned]


@pytest.mark.parametrize("tile", [tile for _, tile in TILES], ids=lambda tile: f"{tile.tokens}-{tile.whole}")
@pytest.mark.parametrize("width", [640, 4096, 7168] if ON_GPU else [288])
def test_every_tile_and_number_of_tokens_gives_the_same_bits(width: int, tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = 130 if ON_GPU else 3
    x, (y, mix), w = streams_of(tokens, width), pending_of(tokens, width), weights_of(width)
    norm = norm_of(width)
    expected = everything(x, y, mix, w, norm)
    monkeypatch.setattr(hc_triton, "tile_for", lambda tokens: tile)
    for part in (slice(0, tokens), slice(tokens - 1, tokens)):
        got = everything(x[part], y[part], HcMix(mix.post[part], mix.comb[part]), w, norm)
        assert all(torch.equal(a, b[part]) for a, b in zip(got, expected, strict=True))


# Any number of streams, in float32 or bfloat16.

GENERAL_SHAPES = [(0, 4, 32), (3, 4, 48), (2, 3, 20)] + ([(16, 4, 4096), (300, 2, 1024)] if ON_GPU else [])


@pytest.mark.parametrize(("tokens", "streams", "width"), GENERAL_SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_general_kernels_agree_with_the_references(tokens: int, streams: int, width: int, dtype: torch.dtype) -> None:
    def close(got: Tensor, wanted: Tensor) -> None:
        assert got.dtype == wanted.dtype and got.shape == wanted.shape
        rtol, atol = (2e-5, 2e-5) if got.dtype == torch.float32 else (2**-6, 2**-8)
        torch.testing.assert_close(got, wanted, rtol=rtol, atol=atol)

    x, w, norm = random(tokens, streams, width, seed=4).to(dtype), weights_of(width, streams=streams), norm_of(width)
    y, mix = pending_of(tokens, width, streams)
    y = y.to(dtype)
    left, sums = general_triton.leave_enter_triton(x, (y, mix), w.fn, None)
    close(left, hc_expand_ref(y, x, mix))
    close(sums, hc_sums(left, w.fn))
    entered, rounded, returned = general_triton.collapse_triton(left, sums, w, norm, SETTINGS, quantize=True)
    wanted, wanted_mix = hc_collapse_ref(left, sums, w, norm, SETTINGS)
    close(entered, wanted)
    close(returned.post, wanted_mix.post)
    close(returned.comb, wanted_mix.comb)
    assert_quantized(entered, rounded)
    head = weights_of(width, streams=streams, head=True)
    same, sums = general_triton.leave_enter_triton(x, None, head.fn, None)
    assert same is x
    got, nothing, _ = general_triton.collapse_triton(x, sums, head, None, SETTINGS, quantize=False)
    close(got, hc_head_ref(x, head, eps=EPS, norm_eps=EPS))
    assert nothing is None


# Few tokens, in one launch.

FEW_SETTINGS = SETTINGS if ON_GPU else HcSettings(2, EPS, EPS)
FEW_SHAPES = [(2, 260)] + ([(1, 4096), (16, 4096), (7, 7168)] if ON_GPU else [])


def test_launch_has_the_memory_and_programs_that_its_dispatch_counts() -> None:
    widest = max(range(32, DECODE_SMALL_WIDTH + 1, 32), key=lambda width: room_of(sizes_of(1, width, gpu=True)))
    assert DECODE_SMALL_TOKENS * room_of(sizes_of(1, widest, gpu=True)) <= COUNTERS
    for width in (100, 512, 513, 4096, 7168):
        assert sizes_of(1, width, gpu=True)["SHARES"] == -(-width // COLLAPSED_CHANNELS)


def entered(x: Tensor, pending: tuple[Tensor | ExpertSum, HcMix] | None, *, quantize: bool = True) -> HcEntered:
    found = enter_triton(x, pending, weights_of(x.shape[2]), norm_of(x.shape[2]), FEW_SETTINGS, quantize=quantize)
    assert not counters_of(x.device).any(), "the next kernel would take these numbers for its own"
    return found


def numbers(found: HcEntered) -> list[Tensor]:
    assert found.rounded is not None
    return [found.streams_TND, found.x_TD, found.rounded[0].view(torch.uint8), found.rounded[1], *found.mix]


def assert_enters(found: HcEntered, x: Tensor, pending: tuple[Tensor, HcMix] | None) -> None:
    left, w, norm = found.streams_TND, weights_of(x.shape[2]), norm_of(x.shape[2])
    assert_rounded(left, x if pending is None else hc_expand_ref(pending[0], x, pending[1]))
    expected, mix = hc_collapse_ref(left, hc_sums(left.cpu(), w.fn.cpu()).to(DEVICE), w, norm, FEW_SETTINGS)
    assert_rounded(found.x_TD, expected, units=2)
    torch.testing.assert_close(found.mix, mix, rtol=0, atol=1e-5)
    if found.rounded is not None:
        assert_quantized(found.x_TD, found.rounded)


@pytest.mark.parametrize(("tokens", "width"), FEW_SHAPES)
def test_few_tokens_enter_as_the_references_do(tokens: int, width: int) -> None:
    x, pending = streams_of(tokens, width), pending_of(tokens, width)
    found = entered(x, pending)
    assert_enters(found, x, pending)
    assert found.rounded is not None


def test_head_of_few_tokens_agrees_with_the_reference() -> None:
    width = 4096 if ON_GPU else 100
    x, w = streams_of(2, width), weights_of(width, head=True)
    got = enter_triton(x, None, w, norm_of(width), HcSettings(0, EPS, EPS), quantize=False)
    assert not counters_of(x.device).any() and got.rounded is None and not any(tensor.numel() for tensor in got.mix)
    assert_rounded(got.x_TD, rms_norm.reference(hc_head_ref(x, w, eps=EPS, norm_eps=EPS), norm_of(width), EPS), units=2)


def test_few_tokens_without_a_pending_output_keep_their_streams_and_zeros_arrive() -> None:
    """Memory that nothing has been written to is zero, too: a sum of nothing is sent as -0."""
    x = streams_of(2, 64)
    x[0] = 0.0
    found = entered(x, None, quantize=False)
    assert found.streams_TND is x and not found.x_TD[0].any() and found.rounded is None
    assert_enters(found, x, None)


@pytest.mark.skipif(not ON_GPU, reason="NumPy warns of what the interpreter does with NaN")
def test_numbers_that_are_not_finite_arrive() -> None:
    x = streams_of(3, 64)
    expected = numbers(entered(x, None))
    x[2, 1, 5] = torch.nan
    got = numbers(entered(x, None))
    assert all(torch.equal(a[:2], b[:2]) for a, b in zip(got[1:], expected[1:], strict=True))
    assert all(tensor[2].isnan().all() for tensor in (got[1], *got[4:]))


@pytest.mark.parametrize("width", [100, 4096] if ON_GPU else [100])
def test_few_tokens_sum_experts_on_the_way(width: int) -> None:
    """To the bit; where there is no expert, nothing is added of what has not been written."""
    x, (y, mix) = streams_of(2, width), pending_of(2, width)
    outputs = torch.empty(2, 3, width, dtype=torch.bfloat16, device=DEVICE)
    chosen = torch.tensor([[0, 2, 9], [9] * 3], device=DEVICE)
    outputs[chosen < 9] = random(2, width, seed=9).bfloat16()
    parts = ExpertSum(chosen, outputs, y, 9)
    assert outputs.isnan().any() and sum_experts_ref(parts).isfinite().all()
    got, expected = (numbers(entered(x, (each, mix))) for each in (parts, sum_experts_ref(parts)))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("width", [640, 4096] if ON_GPU else [100])
def test_every_small_number_of_tokens_gives_the_same_bits(width: int) -> None:
    tokens = 16 if ON_GPU else 3
    x, (y, mix) = streams_of(tokens, width), pending_of(tokens, width)
    expected = numbers(entered(x, (y, mix)))
    part = slice(1, tokens - 1)
    got = numbers(entered(x[part], (y[part], HcMix(mix.post[part], mix.comb[part]))))
    assert all(torch.equal(a, b[part]) for a, b in zip(got, expected, strict=True))
