"""The kernels of hyper-connections against the references."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.hc import (
    COLLAPSED_CHANNELS,
    DECODE_SMALL_TOKENS,
    DECODE_SMALL_WIDTH,
    HcEntered,
    HcInputs,
    HcMix,
    HcSettings,
    HcWeights,
    has_kernel,
    hc_enter,
    hc_expand,
    hc_project,
    hc_split,
    suits_decode_small,
)
from dsv4lite.kernels.quantize import quantize_fp8
from tests.kernels.tensors import DEVICE, ON_GPU, random
from tests.kernels.test_hc import weights_of

pytest.importorskip("triton")

from dsv4lite.kernels.counters import COUNTERS, counters_of
from dsv4lite.kernels.hc import prefill_triton
from dsv4lite.kernels.hc.decode_small_triton import enter_triton, exchange_words, launch_sizes
from dsv4lite.kernels.hc.prefill_triton import TILES, Tile, collapse_triton, expand_project_triton
from dsv4lite.kernels.hc.triton import hc_enter_triton, hc_expand_triton

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("poison")]

EPS = 1e-6
SETTINGS = HcSettings(20, EPS, EPS)
FEW_SETTINGS = SETTINGS if ON_GPU else HcSettings(2, EPS, EPS)  # the interpreter takes its time
ROW_TILE = 1  # any number leaves few tokens to the kernels of many


def norm_of(width: int) -> Tensor:
    return 1 + random(width, seed=8, scale=0.3)


def pending_of(tokens: int, width: int, streams: int = 4, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, HcMix]:
    mix = HcMix(random(tokens, streams, seed=6).sigmoid(), random(tokens, streams, streams, seed=7).softmax(-1))
    return random(tokens, width, seed=5).to(dtype), mix


def streams_of(tokens: int, width: int) -> Tensor:
    return random(tokens, 4, width, scale=3.0).bfloat16()


def inputs(
    x: Tensor,
    pending: tuple[Tensor, HcMix] | None,
    settings: HcSettings = SETTINGS,
    *,
    head: bool = False,
    quantize: bool = False,
    row_tile: int | None = ROW_TILE,
) -> HcInputs:
    _, streams, width = x.shape
    return HcInputs(x, pending, weights_of(streams, width, head=head, device=DEVICE), norm_of(width), settings, quantize, row_tile)


def on_cpu(given: HcInputs) -> HcInputs:
    """Return the inputs of a step without a pending output where float32 products are exact enough to compare with."""
    weights = HcWeights(*(each.cpu() for each in given.weights))
    norm_weight = None if given.norm_weight is None else given.norm_weight.cpu()
    return given._replace(streams_TND=given.streams_TND.cpu(), pending=None, weights=weights, norm_weight=norm_weight)


def assert_rounded(got: Tensor, expected: Tensor, units: int = 1) -> None:
    """Compare after ``units`` roundings in a row: apart by one each at most, and rarely."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    rtol, atol = (2e-5, 2e-5) if got.dtype == torch.float32 else (units * 2.0**-7, 2.0**-9)
    torch.testing.assert_close(got.float().cpu(), expected.float().cpu(), rtol=rtol, atol=atol)
    if got.dtype == torch.bfloat16 and got.numel() >= 200:
        assert (got.cpu() != expected.cpu()).float().mean() < 0.02


def assert_enters(given: HcInputs) -> HcEntered:
    """Compare with the references: the streams with what is written to them, the rest with what comes of these streams."""
    found = hc_enter_triton(given)
    assert not counters_of(given.streams_TND.device).any(), "the next kernel would take these numbers for its own"
    if given.pending is None:
        assert found.streams_TND is given.streams_TND
    else:
        assert_rounded(found.streams_TND, hc_expand.reference(given.pending[0], given.streams_TND, given.pending[1]))
    expected = hc_enter.reference(on_cpu(given._replace(streams_TND=found.streams_TND)))
    assert_rounded(found.x_TD, expected.x_TD, units=1 if given.norm_weight is None else 2)
    assert (found.mix is None) == (expected.mix is None) == given.is_head
    if found.mix is not None and expected.mix is not None:
        torch.testing.assert_close(found.mix, HcMix(*(each.to(DEVICE) for each in expected.mix)), rtol=0, atol=1e-5)
    assert (found.rounded is None) is not given.quantize
    if found.rounded is not None:
        for got, wanted in zip(found.rounded, quantize_fp8.reference(found.x_TD, 128), strict=True):
            assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
    return found


def assert_heads(x: Tensor) -> None:
    """Compare the head, normed and not."""
    given = inputs(x, None, head=True)
    for norm_weight in (None, given.norm_weight):
        assert_enters(given._replace(norm_weight=norm_weight))


MANY = [(0, 64), (1, 256), (3, 100)]
MANY += [(1, 4096), (16, 4096), (63, 7168), (257, 4096), (1500, 4096), (8192, 4096), (1100, 7168)] if ON_GPU else []
FEW = [(2, 260)] + ([(1, 4096), (16, 4096), (7, 7168)] if ON_GPU else [])
# Those in bfloat16 have another number of streams: four have kernels of their own.
GENERAL = [(0, 4, 32, torch.float32), (3, 4, 48, torch.float32), (0, 3, 32, torch.bfloat16), (3, 2, 48, torch.bfloat16)]
GENERAL += [(2, 3, 20, dtype) for dtype in (torch.float32, torch.bfloat16)]
GENERAL += [(16, 4, 4096, torch.float32), (16, 3, 4096, torch.bfloat16)] if ON_GPU else []
GENERAL += [(300, 2, 1024, dtype) for dtype in (torch.float32, torch.bfloat16)] if ON_GPU else []


@pytest.mark.parametrize(("tokens", "width"), MANY)
def test_four_streams_in_bfloat16_agree_with_the_references(tokens: int, width: int) -> None:
    x, pending = streams_of(tokens, width), pending_of(tokens, width)
    assert_rounded(hc_expand_triton(pending[0], x, pending[1]), hc_expand.reference(pending[0], x, pending[1]))
    both = [assert_enters(inputs(x, pending, quantize=quantize)) for quantize in (False, True)]
    assert_rounded(both[0].x_TD, both[1].x_TD, units=2)
    torch.testing.assert_close(both[0].mix, both[1].mix, rtol=0, atol=1e-6)
    assert_enters(inputs(x, None, FEW_SETTINGS))
    assert_heads(x)


@pytest.mark.parametrize(("tokens", "width"), FEW)
def test_few_tokens_agree_with_the_references(tokens: int, width: int) -> None:
    x = streams_of(tokens, width)
    assert suits_decode_small(x, None)
    given = inputs(x, pending_of(tokens, width), FEW_SETTINGS, quantize=True, row_tile=None)
    assert torch.equal(assert_enters(given).x_TD, enter_triton(given).x_TD)
    assert_enters(inputs(x, None, FEW_SETTINGS, head=True, row_tile=None))


@pytest.mark.parametrize(("tokens", "streams", "width", "dtype"), GENERAL)
def test_other_streams_agree_with_the_references(tokens: int, streams: int, width: int, dtype: torch.dtype) -> None:
    assert not has_kernel(dtype, streams)
    x, pending = random(tokens, streams, width, seed=4).to(dtype), pending_of(tokens, width, streams, dtype)
    assert_rounded(hc_expand_triton(pending[0], x, pending[1]), hc_expand.reference(pending[0], x, pending[1]))
    assert_enters(inputs(x, pending, quantize=True))
    assert_heads(x)


def normalised(sums: Tensor, columns: int) -> Tensor:
    """Return the projection from its partial sums."""
    total = sums.sum(0)
    return total[:, :-1] * torch.rsqrt(total[:, -1:] / columns + EPS)


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize(("tokens", "width"), MANY)
def test_projection_is_as_good_as_float32(tokens: int, width: int, written: bool) -> None:
    x, fn = streams_of(tokens, width), weights_of(4, width, device=DEVICE).fn
    left, sums = expand_project_triton(x, pending_of(tokens, width) if written else None, fn, None)
    z, total = left.flatten(1).double(), sums.double().sum(0)
    size = z.abs() @ fn.double().abs().T
    error = (total[:, :-1] - z @ fn.double().T).abs() / size.clamp_min(1e-30)
    assert error.numel() == 0 or error.max() < 1e-6
    torch.testing.assert_close(total[:, -1], z.square().sum(-1), rtol=1e-6, atol=0)
    wanted = hc_project(left.cpu(), fn.cpu(), EPS).to(DEVICE)
    torch.testing.assert_close(normalised(sums, 4 * width), wanted, rtol=0, atol=1e-5)


def test_mixing_agrees_for_uneven_matrices() -> None:
    x, scale = streams_of(9, 64), torch.tensor([3.0, 5.0, 12.0], device=DEVICE)
    given = inputs(x, None)
    given = given._replace(weights=given.weights._replace(scale=scale))
    _, sums = expand_project_triton(x, None, given.weights.fn, ROW_TILE)
    _, *wanted = hc_split(normalised(sums, 4 * 64), given.weights.base, scale, SETTINGS.iters, EPS)
    torch.testing.assert_close(collapse_triton(x, sums, given).mix, HcMix(*wanted), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [256, 4096])
def test_few_tokens_are_mixed_one_by_a_program(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of many tokens takes a hundred times as long, and a small model's few tokens once waited for one."""
    grids: list[tuple[int, ...]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **constants: grids.append((*grid, constants["num_warps"]))

    monkeypatch.setattr(prefill_triton, "collapse_kernel", Kernel())
    sums = torch.empty(8 * prefill_triton.units_of(width), 3, 25, device=DEVICE)
    collapse_triton(streams_of(3, width), sums, inputs(streams_of(3, width), None, quantize=True))
    assert grids[0][0] == 3 + 3 and grids[0][1] >= 4


def numbers(given: HcInputs) -> list[Tensor]:
    found = hc_enter_triton(given)
    assert found.rounded is not None and found.mix is not None
    return [found.streams_TND, found.x_TD, found.rounded[0].view(torch.uint8), found.rounded[1], *found.mix]


def part_of(given: HcInputs, part: slice) -> HcInputs:
    assert given.pending is not None and isinstance(given.pending[0], Tensor)
    y, mix = given.pending
    return given._replace(streams_TND=given.streams_TND[part], pending=(y[part], HcMix(mix.post[part], mix.comb[part])))


@pytest.mark.parametrize("tile", [tile for _, tile in TILES], ids=lambda tile: f"{tile.tokens}-{tile.whole}")
@pytest.mark.parametrize("width", [640, 4096, 7168] if ON_GPU else [288])
def test_every_tile_and_number_of_tokens_gives_the_same_bits(width: int, tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = 130 if ON_GPU else 3
    given = inputs(streams_of(tokens, width), pending_of(tokens, width), quantize=True)
    expected = numbers(given)
    monkeypatch.setattr(prefill_triton, "tile_for", lambda tokens: tile)
    for part in (slice(0, tokens), slice(tokens - 1, tokens)):
        assert all(torch.equal(a, b[part]) for a, b in zip(numbers(part_of(given, part)), expected, strict=True))


@pytest.mark.parametrize("width", [640, 4096] if ON_GPU else [100])
def test_every_small_number_of_tokens_gives_the_same_bits(width: int) -> None:
    tokens = 16 if ON_GPU else 3
    given = inputs(streams_of(tokens, width), pending_of(tokens, width), FEW_SETTINGS, quantize=True, row_tile=None)
    part = slice(1, tokens - 1)
    assert all(torch.equal(a, b[part]) for a, b in zip(numbers(part_of(given, part)), numbers(given), strict=True))


def test_launch_has_the_memory_and_programs_that_its_dispatch_counts() -> None:
    widest = max(range(32, DECODE_SMALL_WIDTH + 1, 32), key=lambda width: exchange_words(launch_sizes(1, width, gpu=True)))
    assert DECODE_SMALL_TOKENS * exchange_words(launch_sizes(1, widest, gpu=True)) <= COUNTERS
    for width in (100, 512, 513, 4096, 7168):
        assert launch_sizes(1, width, gpu=True)["CHUNKS"] == -(-width // COLLAPSED_CHANNELS)


def test_zeros_of_few_tokens_arrive() -> None:
    """Memory that nothing has been written to is zero, too: a sum of nothing is sent as -0."""
    x = streams_of(2, 64)
    x[0] = 0.0
    assert not assert_enters(inputs(x, None, FEW_SETTINGS, row_tile=None)).x_TD[0].any()


@pytest.mark.skipif(not ON_GPU, reason="NumPy warns of what the interpreter does with NaN")
def test_numbers_that_are_not_finite_arrive() -> None:
    given = inputs(streams_of(3, 64), None, quantize=True, row_tile=None)
    expected = numbers(given)
    given.streams_TND[2, 1, 5] = torch.nan
    got = numbers(given)
    assert all(torch.equal(a[:2], b[:2]) for a, b in zip(got[1:], expected[1:], strict=True))
    assert all(tensor[2].isnan().all() for tensor in (got[1], *got[4:]))
