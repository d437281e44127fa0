"""The kernels of the matrix products against their references, and which products take those of a single row."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.gemm import (
    MANY_ROWS,
    ROW_TILE,
    dequantize_fp8_rows,
    float_linear,
    fp8_linear,
    fp8_weight_linear,
    fp8_weight_linear_quantize,
    pair_linear,
)
from dsv4lite.kernels.quantize import dequantize_fp8, e8m0_to_float, quantize_fp8
from tests.kernels.tensors import DEVICE, ON_GPU, fp8_weights, random

triton = pytest.importorskip("triton")

from dsv4lite.kernels.counters import COUNTERS, counters_of  # noqa: E402
from dsv4lite.kernels.gemm import prefill_triton as gemm_prefill_triton  # noqa: E402
from dsv4lite.kernels.gemm import triton as gemm_triton  # noqa: E402
from dsv4lite.kernels.gemm.decode_1_triton import (  # noqa: E402
    float_row,
    fp8_row,
    groups_row,
    pair_row,
    takes_float,
    takes_fp8,
    takes_groups,
    takes_pair,
)
from dsv4lite.kernels.gemm.prefill_fp8_triton import many_rows_fp8, takes_many_fp8  # noqa: E402
from dsv4lite.kernels.gemm.prefill_triton import fills_chip, many_rows, takes_many  # noqa: E402
from dsv4lite.kernels.gemm.triton import (  # noqa: E402
    FEW_ROWS,
    float_linear_triton,
    fp8_linear_triton,
    fp8_weight_linear_quantize_triton,
    fp8_weight_linear_triton,
    pair_linear_triton,
    splits_of,
    tile_for,
    widen_triton,
)

pytestmark = pytest.mark.kernel

# V4-Flash: wq_a and wkv, wq_b with the indexer's, wo_b; rows of a decode step, of a large batch, of a prefill.
REAL_WEIGHTS = ((1536, 4096), (40960, 1024), (4096, 8192))
REAL = [(rows, outs, inputs) for outs, inputs in REAL_WEIGHTS for rows in (1, 16, 33, 128, 500, 2048)]
SMALL = [(0, 8, 128), (1, 3, 128), (5, 70, 131), (16, 64, 256), (17, 130, 60), (33, 65, 260), (65, 129, 128), (130, 40, 130)]
TURNS = [(70, 768, 200), (70, 768, 1024)]  # two blocks in a turn of the loop, if they are whole
FP8_SHAPES = [*SMALL, *TURNS, (3, 64, 2048), (129, 40, 1300), (MANY_ROWS + 3, 40, 1300)] + (REAL if ON_GPU else [])
KINDS = (gemm_triton._FP8_TILES, gemm_triton._UNQUANTIZED_TILES, gemm_triton._WEIGHT_ONLY_TILES)
GROUPED = [(1, 2, 40, 128), (5, 3, 70, 130), (17, 2, 64, 1024), (65, 2, 40, 130), (130, 2, 70, 1100)]
GROUPED_SHAPES = GROUPED + ([(rows, 8, 1024, 4096) for rows in (1, 16, 64, 300, 2048)] if ON_GPU else [])


def close(got: Tensor, wanted: Tensor, unrounded: Tensor, absolute: Tensor, share: float) -> None:
    """Compare as the docstring of ``gemm`` promises; ``absolute`` is the sum of absolute products."""
    assert got.dtype == wanted.dtype and got.shape == wanted.shape
    unit = 2**-7 if got.dtype == torch.bfloat16 else 2**-20
    excess = (got.float() - wanted.float()).abs() - unit * unrounded.abs() - share * absolute
    assert (excess <= 0).all(), excess.max()


def magnitudes(codes: Tensor) -> Tensor:
    return codes.float().abs().to(torch.float8_e4m3fn)


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize(("rows", "outs", "inputs"), FP8_SHAPES)
def test_fp8_linear_agrees(rows: int, outs: int, inputs: int, per_row: bool) -> None:
    x_codes, x_scales = quantize_fp8(random(rows, inputs), 128)
    w_codes, w_scales = fp8_weights(outs, inputs, per_row=per_row)
    exact = fp8_linear.reference(x_codes, x_scales, w_codes, w_scales, torch.float32)
    absolute = fp8_linear.reference(magnitudes(x_codes), x_scales, magnitudes(w_codes), w_scales, torch.float32)
    for dtype, row_tile in itertools.product((torch.bfloat16, torch.float32), (None, ROW_TILE)):
        got = fp8_linear_triton(x_codes, x_scales, w_codes, w_scales, dtype, row_tile)
        close(got, exact.to(dtype), exact, absolute, 2**-10)


FLOAT_SHAPES = [(1, 12, 256), (5, 130, 300), (40, 70, 512)]
FLOAT_SHAPES += [(rows, 2112, 7168) for rows in (1, 16, 64, 600)] + [(1, 7168, 16384)] if ON_GPU else []


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize(("rows", "outs", "inputs"), FLOAT_SHAPES)
def test_fp8_linear_takes_scales_in_float32(rows: int, outs: int, inputs: int, per_row: bool) -> None:
    x_codes, x_scales = quantize_fp8(random(rows, inputs), 128)
    w_codes, w_bytes = fp8_weights(outs, inputs, per_row=per_row)
    w_scales = e8m0_to_float(w_bytes) * (1.0 + 0.9 * random(*w_bytes.shape, seed=3).abs().clamp(max=1.0))
    exact = fp8_linear.reference(x_codes, x_scales, w_codes, w_scales, torch.float32)
    absolute = fp8_linear.reference(magnitudes(x_codes), x_scales, magnitudes(w_codes), w_scales, torch.float32)
    for row_tile in (None, ROW_TILE):
        close(fp8_linear_triton(x_codes, x_scales, w_codes, w_scales, row_tile=row_tile), exact.bfloat16(), exact, absolute, 2**-10)


@pytest.mark.parametrize("row_tile", [None, ROW_TILE])
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize(("rows", "groups", "outs", "inputs"), GROUPED_SHAPES)
def test_fp8_weight_linear_agrees(rows: int, groups: int, outs: int, inputs: int, per_row: bool, row_tile: int | None) -> None:
    x = random(rows, groups, inputs).bfloat16()
    w_codes, w_scales = fp8_weights(groups, outs, inputs, per_row=per_row)
    exact = fp8_weight_linear.reference(x.float(), w_codes, w_scales)
    absolute = fp8_weight_linear.reference(x.float().abs(), magnitudes(w_codes), w_scales)
    close(fp8_weight_linear_triton(x, w_codes, w_scales, row_tile=row_tile), exact.bfloat16(), exact, absolute, 2**-16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "groups", "outs", "inputs"), [*GROUPED_SHAPES, (0, 1, 5, 128), (3, 1, 64, 2048)])
def test_float_linear_agrees(rows: int, groups: int, outs: int, inputs: int, dtype: torch.dtype) -> None:
    x, w = random(rows, groups, inputs).bfloat16(), random(groups, outs, inputs, seed=1).bfloat16()
    exact, absolute = float_linear.reference(x, w, torch.float32), float_linear.reference(x.abs(), w.abs(), torch.float32)
    for row_tile in (None, ROW_TILE):
        close(float_linear_triton(x, w, dtype, row_tile=row_tile), exact.to(dtype), exact, absolute, 2**-16)


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize(("groups", "outs", "inputs"), [(1, 3, 128), (2, 70, 130), (2, 9, 1100)])
def test_widened_weights_are_exact(groups: int, outs: int, inputs: int, per_row: bool) -> None:
    codes, scales = fp8_weights(groups, outs, inputs, per_row=per_row)
    assert torch.equal(widen_triton(codes, scales).float(), dequantize_fp8_rows(codes, scales))


# Tiles that results and inputs fill and do not fill, of either size; rows of 130 inputs are not aligned.
MANY = [(2, 24, 128), (3, 130, 130), (1, 40, 200), (2, 256, 64)]
MANY += [(8, 1024, 64), (8, 1024, 4096), (1, 2624, 4096), (1, 12800, 576), (16, 512, 128), (1, 5632, 2048)] if ON_GPU else []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("groups", "outs", "inputs"), MANY)
def test_many_rows_of_groups_are_multiplied_as_they_lie(
    groups: int, outs: int, inputs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not ON_GPU:  # so that few tiles are several for each program, and some products take the large ones
        monkeypatch.setattr(gemm_prefill_triton, "multiprocessors_of", lambda device: 4)
    for rows in (FEW_ROWS + 8, 200, MANY_ROWS + 3, 2500) if ON_GPU else (FEW_ROWS + 1, MANY_ROWS + 3):
        x = random(rows, groups, 2 * inputs).bfloat16()[..., :inputs]
        codes, scales = fp8_weights(groups, outs, inputs, per_row=True)
        wide = widen_triton(codes, scales)
        exact = float_linear.reference(x, wide, torch.float32)
        absolute = float_linear.reference(x.abs(), wide.abs(), torch.float32)
        got = float_linear_triton(x, wide, dtype)
        close(got, exact.to(dtype), exact, absolute, 2**-16)
        if dtype == x.dtype and rows > MANY_ROWS:
            assert torch.equal(fp8_weight_linear_triton(x, codes, scales), got)
        if splits_of(groups * outs, -(-inputs // 128)) == 1 and ON_GPU:  # few rows sum in one part too
            assert torch.equal(float_linear_triton(x[:9], wide, dtype, ROW_TILE), got[:9])


def test_large_weights_are_summed_in_one_part_from_fewer_rows_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fills_chip(129, 1, 2048) and fills_chip(256, 4, 512) and fills_chip(MANY_ROWS, 1, 1024)
    assert not fills_chip(128, 1, 12800) and not fills_chip(256, 1, 1920) and not fills_chip(MANY_ROWS, 1, 896)
    x, w = random(130, 1, 64).bfloat16(), random(1, 1928, 64, seed=1).bfloat16()
    launched: list[int] = []
    monkeypatch.setattr(gemm_triton, "many_rows", lambda x, w, out: launched.append(len(x)) or many_rows(x, w, out))
    for row_tile, numbers in ((None, [130]), (ROW_TILE, [])):
        launched.clear()
        monkeypatch.setattr(gemm_triton, "splits_of", lambda outs, blocks: 2)
        wanted = float_linear.reference(x, w, torch.float32)
        torch.testing.assert_close(float_linear_triton(x, w, torch.float32, row_tile), wanted, rtol=2**-7, atol=1e-3)
        assert launched == numbers


def test_only_rows_at_aligned_addresses_are_copied_by_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, out = random(40, 1, 80).bfloat16(), random(1, 24, 72, seed=1).bfloat16(), torch.empty(40, 1, 24, device=DEVICE)
    assert takes_many(x[..., :72], w, out)
    many_rows(x[..., :72], w, out)
    torch.testing.assert_close(out, float_linear.reference(x[..., :72], w, torch.float32))
    assert not takes_many(x[..., 1:73], w, out) and not takes_many(x[..., :72], w, out[..., :23].contiguous())
    monkeypatch.setattr(gemm_prefill_triton, "on_gpu", lambda device: True)
    for capability, takes in ((80, False), (89, False), (90, True), (100, True), (120, False)):
        monkeypatch.setattr(gemm_prefill_triton, "capability_of", lambda device, capability=capability: capability)
        assert takes_many(x[..., :72], w, out) == takes


@pytest.mark.skipif(not ON_GPU or torch.cuda.get_device_capability() != (9, 0), reason="the kernel is for Hopper")
@pytest.mark.parametrize(
    ("rows", "outs", "inputs"), [(129, 6528, 16384), (200, 24576, 1536), (2048, 1536, 4096), (2050, 400, 128), (8191, 144, 256)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("floats", [False, True])
def test_many_fp8_rows_have_the_same_bits_on_hopper(
    rows: int, outs: int, inputs: int, dtype: torch.dtype, floats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operands are ``described`` to the hardware, which copies whole tiles; the last ones are partly empty."""
    x, x_scales = quantize_fp8(random(rows, inputs), 128)
    w, w_scales = fp8_weights(outs, inputs)
    if floats:
        w_scales = e8m0_to_float(w_scales) * 1.37
    assert takes_many_fp8(x, w, 128) and not takes_many_fp8(x[:128], w, 128) and not takes_many_fp8(x, w, 1)
    monkeypatch.setattr(gemm_triton, "takes_many_fp8", lambda *_: False)
    for row_tile in (None, ROW_TILE):
        parts = 1 if row_tile is None and rows > MANY_ROWS else splits_of(outs, inputs // 128)
        out = torch.full((rows, outs), float("nan"), dtype=dtype, device=DEVICE)
        many_rows_fp8(x, x_scales, w, w_scales, out, parts)
        assert torch.equal(out, fp8_linear_triton(x, x_scales, w, w_scales, dtype, row_tile))


def test_every_code_counts() -> None:
    """All e4m3 numbers, subnormals included, meet a one."""
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8, device=DEVICE)
    numbers = codes.view(torch.float8_e4m3fn)
    inputs = 128
    w = torch.zeros(len(codes), inputs, device=DEVICE).to(torch.float8_e4m3fn)
    w[:, 5] = numbers
    w_scales = torch.full((len(codes), 1), 127, dtype=torch.uint8, device=DEVICE)
    x_codes, x_scales = quantize_fp8(torch.ones(1, inputs, device=DEVICE), 128)
    assert torch.equal(fp8_linear_triton(x_codes, x_scales, w, w_scales, torch.float32, ROW_TILE)[0], numbers.float())
    ones = torch.ones(1, 1, inputs, dtype=torch.bfloat16, device=DEVICE)
    assert torch.equal(fp8_weight_linear_triton(ones, w[None], w_scales)[0, 0], numbers.bfloat16())


def test_codes_are_widened_alike_without_fp8_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """By integer arithmetic, for chips older than FP8."""
    monkeypatch.setattr(gemm_triton, "capability_of", lambda device: 80)
    given = (*quantize_fp8(random(5, 256), 128), *fp8_weights(70, 256))
    got, exact = fp8_linear_triton(*given, torch.float32), fp8_linear.reference(*given, torch.float32)
    torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-5)


def test_row_does_not_depend_on_the_others() -> None:
    """Whatever number of rows, and so whatever tile."""
    outs, inputs = 72, 1100
    assert splits_of(outs, 9) > 1
    x = random(MANY_ROWS + 2 if ON_GPU else 130, inputs)
    w_codes, w_scales = fp8_weights(outs, inputs, per_row=True)
    plain = random(1, outs, inputs, seed=2).bfloat16()
    codes, scales = quantize_fp8(x, 128)
    wide = x.bfloat16()[:, None]

    def products(rows: int) -> tuple[Tensor, ...]:
        fp8 = fp8_linear_triton(codes[:rows], scales[:rows], w_codes, w_scales, torch.float32, ROW_TILE)
        half = fp8_weight_linear_triton(wide[:rows], w_codes[None], w_scales, ROW_TILE)
        return fp8, half, float_linear_triton(wide[:rows], plain, torch.float32, ROW_TILE)

    # The interpreter leaves the order inside a block to numpy, which asks for the number of rows.
    everything = products(len(x))
    for rows in (1, 17, 33, 65, 130, MANY_ROWS) if ON_GPU else (1,):
        for got, wanted in zip(products(rows), everything, strict=True):
            if ON_GPU:
                assert torch.equal(got, wanted[:rows]), rows
            else:
                torch.testing.assert_close(got, wanted[:rows], rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("kind", ["fp8", "half", "plain"])
def test_every_choice_of_a_tile_gives_the_same_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts as programs or folded, one or two blocks in a turn."""
    rows, outs, inputs = (260, 200, 4096) if ON_GPU else (70, 40, 1024)
    splits = splits_of(outs, inputs // 128)
    assert splits > 1
    x, weights = random(rows, inputs), fp8_weights(outs, inputs)
    plain, codes, wide = random(outs, inputs, seed=2).bfloat16(), quantize_fp8(x, 128), x.bfloat16()[:, None]
    products = {
        "fp8": (gemm_triton._FP8_TILES, lambda: fp8_linear_triton(*codes, *weights, torch.float32)),
        "half": (gemm_triton._WEIGHT_ONLY_TILES, lambda: fp8_weight_linear_triton(wide, weights[0][None], weights[1])[:, 0]),
        "plain": (gemm_triton._UNQUANTIZED_TILES, lambda: float_linear_triton(wide[:, 0], plain, torch.float32)),
    }
    tiles, multiply = products[kind]
    usual = multiply()
    for _, fold, tile in tiles.between:
        monkeypatch.setattr(gemm_triton, "tile_for", lambda *given, tile=tile, fold=fold: (tile, fold))
        got = multiply()
        if ON_GPU:
            assert torch.equal(got, usual), tile
        else:
            torch.testing.assert_close(got, usual, rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize(
    ("rows", "groups", "outs", "inputs"),
    [(1, 2, 128, 128), (5, 2, 128, 1300)] + ([(rows, 8, 1024, 4096) for rows in (1, 8, 16)] if ON_GPU else []),
)
def test_products_are_quantized_as_one_row(
    rows: int, groups: int, outs: int, inputs: int, per_row: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsv4lite.kernels.dispatch.use_triton", lambda *given: True)
    given = (random(rows, groups, inputs).bfloat16(), *fp8_weights(groups, outs, inputs, per_row=per_row))
    codes, scales = fp8_weight_linear_quantize(*given, ROW_TILE)
    wanted, wanted_scales = quantize_fp8.reference(fp8_weight_linear_triton(*given, ROW_TILE).flatten(1), 128)
    assert codes.shape == wanted.shape and codes.dtype == wanted.dtype and torch.equal(scales, wanted_scales)
    assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))
    assert not counters_of(DEVICE).any()


PAIRS = [(1, 70, 130, 1100), (5, 65, 40, 256), (16, 24, 70, 1024), (3, 130, 3, 60)]  # one or several parts of each
# V4-Flash: the hidden layer of the shared expert and the router, latents and the inputs of both kinds of compressors.
REAL_PAIRS = [(rows, *outs, 4096) for outs in ((4096, 256), (1536, 2624), (1536, 1024)) for rows in (1, 8, 16, 32, 64, 256, 512)]


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize(("rows", "fp8_outs", "outs", "inputs"), PAIRS + (REAL_PAIRS if ON_GPU else []))
def test_pair_has_the_bits_of_products_alone(
    rows: int, fp8_outs: int, outs: int, inputs: int, per_row: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsv4lite.kernels.dispatch.use_triton", lambda *given: True)
    x, w = random(rows, inputs).bfloat16(), random(outs, inputs, seed=3).bfloat16()
    given = (*quantize_fp8(x, 128), *fp8_weights(fp8_outs, inputs, per_row=per_row))
    for _ in range(2):  # the second finds the counters as the first has left them
        quantized, unquantized = pair_linear(x, *given, w, ROW_TILE)
        assert torch.equal(quantized, fp8_linear_triton(*given, row_tile=ROW_TILE))
        assert torch.equal(unquantized, float_linear_triton(x[:, None], w[None], torch.float32, ROW_TILE)[:, 0])
    assert not counters_of(DEVICE).any()


def test_counters_are_zero_after_a_product() -> None:
    x, w = random(40, 1, 1024).bfloat16(), random(1, 70, 1024, seed=1).bfloat16()
    assert splits_of(70, 8) == 2
    assert torch.equal(float_linear_triton(x, w, torch.float32), float_linear_triton(x, w, torch.float32))
    assert not counters_of(DEVICE).any()


def test_counters_suffice_for_every_product_in_parts() -> None:
    for outs in range(1, 20_000):
        if splits_of(outs, 1 << 20) > 1:
            most = outs  # tiles of results, if every group has one result
    for tiles in KINDS:
        assert all(-(-rows // tile.rows) * most <= COUNTERS for rows, tile in tiles.few)
        for _, fold, tile in tiles.between:
            assert fold or -(-MANY_ROWS // tile.rows) * most <= COUNTERS
            # Of two products that run at the same time, each with one group, each has half of the counters.
            assert fold or -(-MANY_ROWS // tile.rows) * -(-most // tile.outs) <= COUNTERS // 2


@pytest.mark.skipif(not ON_GPU, reason="streams")
def test_streams_multiply_side_by_side() -> None:
    x, w = random(9, 1, 4096).bfloat16(), random(1, 1536, 4096, seed=1).bfloat16()
    wanted = float_linear_triton(x, w, torch.float32)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    got = []
    for i in range(200):
        with torch.cuda.stream(streams[i % 4]):
            got.append(float_linear_triton(x, w, torch.float32))
    torch.cuda.synchronize()
    assert all(torch.equal(each, wanted) for each in got)


@pytest.mark.skipif(not ON_GPU, reason="graphs")
def test_product_in_parts_can_be_captured_after_one_on_the_same_stream() -> None:
    x, w = random(9, 1, 4096).bfloat16(), random(1, 1536, 4096, seed=1).bfloat16()
    wanted = float_linear_triton(x, w, torch.float32)
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        float_linear_triton(x, w, torch.float32)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            got = float_linear_triton(x, w, torch.float32)
        for _ in range(20):
            got.zero_()
            graph.replay()
        stream.synchronize()
    assert torch.equal(got, wanted)


def test_nan_stays_in_its_row() -> None:
    x = random(20, 256)
    w_codes, w_scales = fp8_weights(24, 256)
    clean = fp8_linear_triton(*quantize_fp8(x, 128), w_codes, w_scales)
    x[7, 200] = float("nan")
    got = fp8_linear_triton(*quantize_fp8(x, 128), w_codes, w_scales)
    assert torch.equal(got[:7], clean[:7]) and torch.equal(got[8:], clean[8:])
    assert got[7].isnan().all() or not ON_GPU  # the interpreter takes the NaN code for 480


def test_slices_of_wider_tensors_are_taken_as_they_are() -> None:
    wide, w = random(20, 3 * 256).bfloat16(), random(1, 24, 256, seed=1).bfloat16()
    part = wide[:, None, 256:512]
    assert torch.equal(float_linear_triton(part, w, torch.float32), float_linear_triton(part.contiguous(), w, torch.float32))


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("rows", [1, 16, 17, 64, 128, 129, 513, 100_000])
@pytest.mark.parametrize(("outs", "splits"), [(40, 8), (1536, 8), (4096, 4), (129280, 1)])
def test_tile_fits_the_chip_with_two_stages_at_least(outs: int, splits: int, rows: int, capability: int) -> None:
    for tiles in KINDS:
        tile, _ = tile_for(tiles, rows, outs, 1, splits, capability)
        assert tile.num_stages >= 2
        limit = {80: 163, 90: 227, 100: 227}.get(capability, 99) << 10
        assert tile.num_stages * tile.turn * 128 * (tile.rows * tiles.x_bytes + tile.outs * tiles.w_bytes) <= limit
        assert 128 % tile.outs == 0  # or a tile would have several scales


def test_parts_are_folded_where_tiles_fill_the_chip() -> None:
    def programs(tiles: gemm_triton.Tiles, rows: int, outs: int, splits: int) -> tuple[int, int, int, bool]:
        tile, fold = tile_for(tiles, rows, outs, 1, splits, 90)
        return tile.rows, tile.outs, -(-rows // tile.rows) * -(-outs // tile.outs) * (1 if fold else splits), fold

    assert programs(gemm_triton._FP8_TILES, 512, 4096, 4) == (64, 128, 256, True)
    assert programs(gemm_triton._FP8_TILES, 256, 1536, 8) == (64, 64, 96, True)
    assert programs(gemm_triton._FP8_TILES, 64, 1536, 8) == (64, 32, 48, True)
    assert programs(gemm_triton._FP8_TILES, 64, 1024, 8) == (64, 64, 128, False)
    assert programs(gemm_triton._UNQUANTIZED_TILES, 64, 256, 8) == (32, 64, 64, False)
    assert programs(gemm_triton._UNQUANTIZED_TILES, 512, 256, 8) == (64, 64, 256, False)
    assert programs(gemm_triton._UNQUANTIZED_TILES, 16, 4096, 4) == (16, 64, 256, False)


def test_splits_follow_from_the_weights_and_fill_the_chip() -> None:
    assert [splits_of(outs, blocks) for outs, blocks in ((1536, 32), (40960, 8), (4096, 64), (256, 32))] == [8, 1, 4, 8]
    assert splits_of(1, 3) == splits_of(1 << 20, 1000) == 1


# ------------------------------------------------------------------------------------------------------------- a single row


def assert_rounded(got: Tensor, x: Tensor, xs: Tensor, w: Tensor, ws: Tensor) -> None:
    """Check an FP8 product for one rounding to bfloat16, and 2^-16 of the sums of absolute products."""
    wanted = fp8_linear.reference(x, xs, w, ws, torch.float32)
    sums = fp8_linear.reference(x.float().abs().to(x.dtype), xs, w.float().abs().to(w.dtype), ws, torch.float32)
    error = (got.float() - wanted).abs()
    assert got.dtype == torch.bfloat16 and bool((error <= 2**-8 * wanted.abs() + 2**-16 * sums).all()), error.max()


@pytest.mark.parametrize(
    ("outs", "inputs"), [(12, 256), (132, 384), (4, 2048), *([(4096, 8192), (1536, 4096), (7168, 16384)] if ON_GPU else [])]
)
def test_fp8_row_agrees_with_its_reference(outs: int, inputs: int) -> None:
    given = (*quantize_fp8(random(1, inputs), 128), *fp8_weights(outs, inputs))
    assert takes_fp8(given[0], *given[2:])
    got = fp8_row(*given, torch.bfloat16)
    assert_rounded(got, *given)
    assert torch.equal(fp8_row(*given, torch.float32).bfloat16(), got)
    assert torch.equal(fp8_row(*given, torch.bfloat16), got)


@pytest.mark.parametrize(
    ("groups", "outs", "inputs"), [(1, 128, 256), (3, 256, 384), *([(8, 1024, 4096), (16, 1024, 4096)] if ON_GPU else [])]
)
def test_groups_row_agrees_with_its_reference(groups: int, outs: int, inputs: int) -> None:
    x = random(2, groups, 2 * inputs).bfloat16()[1:, :, :inputs]
    w, ws = fp8_weights(groups, outs, inputs)
    assert takes_groups(x, w, ws)
    wanted = fp8_weight_linear.reference(x, w, ws).flatten(1)
    wanted_codes, _ = quantize_fp8.reference(wanted, 128)
    for _ in range(2):  # the second finds the counters as the first has left them
        codes, scales = groups_row(x, w, ws)
        got = dequantize_fp8(codes, scales, 128)
        # A last bit of bfloat16 before an e4m3 rounding: half a step of e4m3, and where that changes the code, a whole one.
        largest = wanted.float().view(-1, 128).abs().amax(1).repeat_interleave(128)[None]
        assert bool(((got - wanted.float()).abs() <= 2**-3 * wanted.float().abs() + 2**-9 * largest).all())
        same = (codes.view(torch.uint8) == wanted_codes.view(torch.uint8)).float().mean()
        assert same > 0.98, same
    assert not counters_of(DEVICE).any()


@pytest.mark.parametrize(
    ("fp8_outs", "outs", "inputs"),
    [(8, 12, 256), (132, 4, 1152), *([(1536, 2624, 4096), (4096, 256, 4096), (6144, 384, 7168)] if ON_GPU else [])],
)
def test_pair_row_agrees_with_its_reference(fp8_outs: int, outs: int, inputs: int) -> None:
    x, unquantized = random(1, inputs).bfloat16(), random(outs, inputs, seed=3).bfloat16()
    given = (*quantize_fp8(x, 128), *fp8_weights(fp8_outs, inputs))
    assert takes_pair(x, *given[2:], unquantized)
    quantized, exact = pair_row(x, *given, unquantized)
    assert_rounded(quantized, *given)
    wanted, sums = x.float() @ unquantized.float().T, x.float().abs() @ unquantized.float().abs().T
    assert bool(((exact - wanted).abs() <= 2**-16 * sums).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("outs", "inputs"), [(12, 256), (2, 2816), (64, 384), *([(5632, 2048), (2048, 2816), (256, 7168)] if ON_GPU else [])]
)
def test_float_row_agrees_with_its_reference(outs: int, inputs: int, dtype: torch.dtype) -> None:
    x, w = random(2, 1, 2 * inputs).bfloat16()[1:, :, :inputs], random(1, outs, inputs, seed=3).bfloat16()
    assert takes_float(x, w)
    out = torch.full((1, outs), float("nan"), dtype=dtype, device=DEVICE)
    float_row(x[0], w[0], out)
    assert torch.equal(float_linear_triton(x[:, 0], w[0], dtype), out)
    wanted, sums = x[0].float() @ w[0].float().T, x[0].float().abs() @ w[0].float().abs().T
    close(out, wanted.to(dtype), wanted, sums, 2**-16)


def test_others_are_left_to_tensor_cores() -> None:
    x, _ = quantize_fp8(random(2, 256), 128)
    w, ws = fp8_weights(128, 256)
    assert takes_fp8(x[:1], w, ws)
    assert not takes_fp8(x, w, ws), "two rows"
    assert not takes_fp8(x[:1, :128], *fp8_weights(128, 128)), "no longer than there are results"
    assert not takes_fp8(x[:1], *fp8_weights(127, 256)), "not a whole number of strips"
    assert not takes_fp8(x[:1], *fp8_weights(128, 256, per_row=True)), "scales of rows"
    assert not takes_pair(x[:1], w, ws, random(3, 256)), "not a whole number of strips"
    rows, weights = random(2, 1, 256).bfloat16(), random(1, 4, 256).bfloat16()
    assert takes_float(rows[:1], weights) and not takes_float(rows, weights) and not takes_float(rows[:1], weights[:, :3])
    assert not takes_float(rows[:1], weights[:, :1].expand(-1, 65538, -1))
    assert not takes_float(rows[:1, :, :64], weights[..., :64]) and not takes_float(rows[:1].float(), weights.float())
    assert takes_groups(random(1, 2, 256), *fp8_weights(2, 128, 256))
    assert not takes_groups(random(1, 2, 256), *fp8_weights(2, 64, 256)), "blocks of results across groups"


def test_single_rows_take_these_kernels_unless_the_order_of_summation_is_fixed() -> None:
    x, grouped, unquantized = random(1, 256).bfloat16(), random(1, 2, 256).bfloat16(), random(4, 256, seed=3).bfloat16()
    row, groups = (*quantize_fp8(x, 128), *fp8_weights(128, 256)), (grouped, *fp8_weights(2, 128, 256))

    def same(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> bool:
        return all(torch.equal(a.float(), b.float()) for a, b in zip(got, wanted, strict=True))

    assert same((fp8_linear_triton(*row),), (fp8_row(*row, torch.bfloat16),))
    assert same(pair_linear_triton(x, *row, unquantized), pair_row(x, *row, unquantized))
    assert same(fp8_weight_linear_quantize_triton(*groups), groups_row(*groups))
    # A fixed order is that of many rows.
    many = (*(each.expand(2, -1).contiguous() for each in row[:2]), *row[2:])
    fixed = pair_linear_triton(x, *row, unquantized, ROW_TILE)
    assert same(fixed[:1], (fp8_linear_triton(*many)[:1],))
    assert same(fixed[1:], (float_linear_triton(x.expand(2, -1)[:, None], unquantized[None], torch.float32)[:1, 0],))
    several = quantize_fp8(fp8_weight_linear_triton(grouped.expand(2, -1, -1).contiguous(), *groups[1:]).flatten(1), 128)
    assert same(fp8_weight_linear_quantize_triton(*groups, ROW_TILE), tuple(each[:1] for each in several))
