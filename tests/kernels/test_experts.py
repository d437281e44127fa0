"""Expert weights in tiles, and the references of quantized, unquantized and few tokens' experts against the formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.experts import (
    ExpertInputs,
    ExpertSum,
    Tiles,
    can_tile,
    experts_forward,
    experts_outputs,
    scale_words,
    sum_experts,
)
from dsv4lite.kernels.experts.decode_small import MoeInputs, moe_decode_small
from dsv4lite.kernels.gemm import fp8_linear
from dsv4lite.kernels.quantize import dequantize_fp8, dequantize_matrix, quantize_fp8, round_fp8
from dsv4lite.kernels.routing import Router, route
from dsv4lite.kernels.swiglu import swiglu, swiglu_quantize
from tests.kernels.tensors import cpu_random as random


def forward(*given: Tensor | Tiles | float, shared: Tensor | None = None) -> Tensor:
    return experts_forward(ExpertInputs(*given), shared)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def matrix(rows: int, columns: int, kind: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A matrix as a checkpoint stores it."""
    rng = generator(seed)
    if kind == "fp4":
        codes = torch.randint(-128, 128, (rows, columns // 2), generator=rng).to(torch.int8)
        scale = torch.randint(0, 27, (rows, columns // 32), generator=rng) + torch.randint(90, 120, (rows, 1), generator=rng)
        scale = scale.to(torch.uint8)
        return codes, scale.view(torch.float8_e8m0fnu)
    codes = torch.randn(rows, columns, generator=rng).to(torch.float8_e4m3fn)
    blocks = (-(-rows // 128), -(-columns // 128))
    if kind == "fp8":
        return codes, torch.randint(100, 140, blocks, generator=rng).to(torch.uint8).view(torch.float8_e8m0fnu)
    return codes, torch.rand(blocks, generator=rng) + 0.1


def stack(count: int, rows: int, columns: int, kind: str) -> Tiles:
    codes, scales = Tiles.shapes(count, rows, columns, fp4=kind == "fp4")
    return Tiles(torch.full(codes, 255, dtype=torch.uint8), torch.full(scales, -1, dtype=torch.int32))


@pytest.mark.parametrize("kind", ["fp4", "fp8", "fp8 float scales"])
@pytest.mark.parametrize(("rows", "columns"), [(64, 128), (192, 384)])
def test_tiles_give_back_what_was_stored(kind: str, rows: int, columns: int) -> None:
    tiles = stack(2, rows, columns, kind)
    assert tiles.shape == (2, rows, columns)
    stored = [matrix(rows, columns, kind, seed) for seed in range(2)]
    for expert, (weight, scale) in enumerate(stored):
        tiles.store(expert, weight, scale)
    for expert, (weight, scale) in enumerate(stored):
        assert torch.equal(tiles.dequantize(expert), dequantize_matrix(weight, scale))
        codes, scales = tiles.load(expert)
        assert torch.equal(codes.view(torch.uint8), weight.view(torch.uint8))
        if kind == "fp4":
            assert torch.equal(scales, scale.view(torch.uint8))


@pytest.mark.parametrize("kind", ["fp4", "fp8", "fp8 float scales"])
def test_gate_and_up_share_tiles(kind: str) -> None:
    tiles = stack(1, 2 * 160, 256, kind)
    gate, up = (matrix(160, 256, kind, seed) for seed in range(2))
    tiles.store(0, *up, half=1)
    tiles.store(0, *gate, half=0)
    assert torch.equal(tiles.dequantize(0, 0), dequantize_matrix(*gate))
    assert torch.equal(tiles.dequantize(0, 1), dequantize_matrix(*up))
    whole = tiles.dequantize(0).unflatten(0, (-1, 2, 8))
    assert torch.equal(whole[:, 0].flatten(0, 1), dequantize_matrix(*gate))


def test_scales_far_below_their_rows_largest_round_their_codes() -> None:
    tiles = stack(1, 64, 128, "fp4")
    weight, _ = matrix(64, 128, "fp4")
    scale = torch.full((64, 4), 126, dtype=torch.uint8)
    scale[:, 1], scale[:, 2], scale[:, 3] = 100, 99, 0
    tiles.store(0, weight, scale.view(torch.float8_e8m0fnu))
    exact, got = dequantize_matrix(weight, scale.view(torch.float8_e8m0fnu)), tiles.dequantize(0)
    assert torch.equal(got[:, :64], exact[:, :64])
    assert (got - exact).abs().max() == 2.0 ** (126 - 127 - 28) and not got[:, 96:].any()


def test_rows_of_the_least_scales_are_kept() -> None:
    tiles = stack(1, 64, 128, "fp4")
    weight, _ = matrix(64, 128, "fp4")
    scale = torch.tensor([1, 2, 3, 20], dtype=torch.uint8).repeat(64, 1).view(torch.float8_e8m0fnu)
    tiles.store(0, weight, scale)
    assert torch.equal(tiles.dequantize(0), dequantize_matrix(weight, scale))


def test_tiles_take_no_more_room_than_the_checkpoint() -> None:
    codes, scales = Tiles.shapes(3, 256, 512, fp4=True)
    weight, scale = matrix(256, 512, "fp4")
    assert torch.Size(codes).numel() == 3 * weight.nbytes and 4 * torch.Size(scales).numel() == 3 * scale.nbytes


@pytest.mark.parametrize(
    ("hidden", "width", "expected"), [(4096, 2048, True), (7168, 3072, True), (64, 128, False), (128, 96, False)]
)
def test_odd_sizes_stay_out_of_tiles(hidden: int, width: int, expected: bool) -> None:
    assert can_tile(hidden, width) is expected


@pytest.mark.parametrize("kind", ["fp4", "fp8"])
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_reference_is_the_published_sum(kind: str, tokens: int) -> None:
    count, hidden, width, top_k, limit, rng = 4, 128, 256, 2, 0.5, generator(7)
    w13, w2 = stack(count, 2 * width, hidden, kind), stack(count, hidden, width, kind)
    gates, ups, downs = [], [], []
    for expert in range(count):
        for matrices, home, rows, columns, half in (
            (gates, w13, width, hidden, 0),
            (ups, w13, width, hidden, 1),
            (downs, w2, hidden, width, None),
        ):
            codes, scale = matrix(rows, columns, kind, seed=3 * expert + (2 if half is None else half))
            scale = (scale.view(torch.uint8) // 20 + 116).view(torch.float8_e8m0fnu)  # of about one
            home.store(expert, codes, scale, half)
            matrices.append(dequantize_matrix(codes, scale))
    x = torch.randn(tokens, hidden, generator=rng).bfloat16()
    chosen = torch.rand(tokens, count, generator=rng).topk(top_k).indices.sort(-1).values
    weights = torch.rand(tokens, top_k, generator=rng)
    codes, scales = quantize_fp8(x, 128)
    expected = torch.zeros(tokens, hidden)
    for t in range(tokens):
        v = dequantize_fp8(codes[t], scales[t], 128)
        for k in range(top_k):
            e = int(chosen[t, k])
            u = (swiglu((gates[e] @ v).bfloat16(), (ups[e] @ v).bfloat16(), limit) * weights[t, k]).bfloat16()
            expected[t] += (downs[e] @ round_fp8(u, 128).float()).bfloat16().float()
    got = forward(codes, scales, chosen, weights, w13, w2, limit)
    torch.testing.assert_close(got, expected, rtol=2**-7, atol=2**-7 * float(expected.abs().max()) if tokens else 0)
    shared = torch.randn(tokens, hidden, generator=rng).bfloat16()
    with_shared = forward(codes, scales, chosen, weights, w13, w2, limit, shared=shared)
    assert torch.equal(with_shared, (got + shared.float()).bfloat16())
    chosen[:1, 1] = count  # none
    outputs = experts_outputs(ExpertInputs(codes, scales, chosen, weights, w13, w2, limit))
    assert torch.equal(outputs.float().sum(1), forward(codes, scales, chosen, weights, w13, w2, limit))
    assert not outputs[:1, 1].any()


def assert_parts_of_the_whole(first: Tensor, second: Tensor, whole: Tensor) -> None:
    """Each of three numbers is rounded once to bfloat16, by at most 2^-8 of it; sums in float32 have another order."""
    assert first.dtype == second.dtype == whole.dtype == torch.bfloat16
    first, second, whole = first.float(), second.float(), whole.float()
    bound = 2**-8 * (first.abs() + second.abs() + whole.abs()) + 1e-6 * whole.abs().max()
    assert ((first + second - whole).abs() <= bound).all() and not torch.equal((first + second).bfloat16().float(), whole)


def test_parts_of_the_width_are_rounded_each_and_add_up_to_the_whole() -> None:
    hidden, width, rng = 128, 256, generator(3)
    whole = stack(1, 2 * width, hidden, "fp4"), stack(1, hidden, width, "fp4")
    parts = [(stack(1, width, hidden, "fp4"), stack(1, hidden, width // 2, "fp4")) for _ in range(2)]
    for seed, (home, half, dim) in enumerate(((0, 0, 0), (0, 1, 0), (1, None, 1))):
        codes, scale = matrix(*((width, hidden) if home == 0 else (hidden, width)), "fp4", seed)
        scale = (scale.view(torch.uint8) // 20 + 116).view(torch.float8_e8m0fnu)
        whole[home].store(0, codes, scale, half)
        for part, *piece in zip(parts, codes.chunk(2, dim), scale.view(torch.uint8).chunk(2, dim), strict=True):
            part[home].store(0, piece[0].contiguous(), piece[1].contiguous().view(scale.dtype), half)
    codes, scales = quantize_fp8(torch.randn(9, hidden, generator=rng).bfloat16(), 128)
    routed = torch.zeros(9, 1, dtype=torch.int64), torch.rand(9, 1, generator=rng)
    outputs = [experts_outputs(ExpertInputs(codes, scales, *routed, *held, 0.5))[:, 0] for held in (*parts, whole)]
    assert_parts_of_the_whole(*outputs)


# Few tokens, all parts together.


def random_tiles(count: int, rows: int, columns: int) -> Tiles:
    codes, scales = Tiles.shapes(count, rows, columns, fp4=True)
    words = scale_words(torch.randint(118, 120, (*scales, 4)), torch.tensor([92]))[..., 0]
    return Tiles(torch.randint(0, 256, codes, dtype=torch.uint8), words.contiguous())


def test_sum_of_few_tokens_is_that_of_each_part_by_itself() -> None:
    torch.manual_seed(0)
    tokens, count, hidden, width, top_k = 5, 6, 256, 128, 3
    x, h, logits = torch.randn(tokens, hidden).bfloat16(), torch.randn(tokens, 2 * width).bfloat16(), torch.randn(tokens, count)
    bias, ids, positions = torch.rand(count), torch.arange(tokens), torch.tensor([4, -1, 0, 7, -1])
    shared = torch.randn(hidden, width).to(torch.float8_e4m3fn), torch.full((2, 1), 120, dtype=torch.uint8)
    w13, w2 = random_tiles(count, 2 * width, hidden), random_tiles(count, hidden, width)
    rounded = quantize_fp8(x, 128)
    for router in (
        Router(top_k, 1.5, bias, None, ids, positions),
        Router(top_k, 2.0, None, torch.rand(9, count).topk(top_k).indices, ids, None),
    ):
        parts = moe_decode_small(MoeInputs(logits, router, *rounded, h, *shared, w13, w2, 10.0))
        chosen, weights = route(logits, router)
        added = fp8_linear(*swiglu_quantize(h, 10.0), *shared)
        assert torch.equal(parts.slots_TK, chosen) and torch.equal(parts.shared_TD, added)
        expected = experts_forward(ExpertInputs(*rounded, chosen, weights, w13, w2, 10.0), added)
        assert torch.equal(sum_experts(parts), expected) and not torch.equal(expected, added)


def test_what_no_expert_has_written_is_not_added() -> None:
    chosen = torch.tensor([[0, 2], [1, 3], [3, 3]])
    outputs = torch.tensor([1.0, 2.0, 4.0, torch.nan, torch.inf, torch.nan], dtype=torch.bfloat16).view(3, 2, 1)
    shared = torch.full((3, 1), 0.5, dtype=torch.bfloat16)
    assert sum_experts(ExpertSum(chosen, outputs, shared, 3)).tolist() == [[3.5], [4.5], [0.5]]


# Unquantized.

EXPERTS, HIDDEN, WIDTH, LIMIT = 5, 24, 12, 0.8
W13, W2 = random(EXPERTS, 2 * WIDTH, HIDDEN, seed=1) / 4, random(EXPERTS, HIDDEN, WIDTH, seed=2) / 4


def unquantized(x: Tensor, *given: Tensor | float, shared: Tensor | None = None, **options: int) -> Tensor:
    return experts_forward(ExpertInputs(x, None, *given, **options), shared)


def one(x: Tensor, expert: int, weight: float) -> Tensor:
    """The formula for one token, in float64."""
    gate, up = (W13[expert].double() @ x.double()).split(WIDTH)
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return W2[expert].double() @ (torch.nn.functional.silu(gate) * up * weight)


@pytest.mark.parametrize("tokens", [0, 1, 13])
def test_each_token_sums_its_experts_and_the_shared_one(tokens: int) -> None:
    x, shared, weights = random(tokens, HIDDEN, seed=3), random(tokens, HIDDEN, seed=4), random(tokens, 2, seed=5).abs()
    chosen = torch.stack([torch.arange(tokens) % 3, 3 + torch.arange(tokens) % 3], 1)  # 5 is none
    got = unquantized(x, chosen, weights, W13, W2, LIMIT, shared=shared)
    assert got.shape == (tokens, HIDDEN)
    for t in range(tokens):
        wanted = shared[t].double()
        for expert, weight in zip(chosen[t].tolist(), weights[t].tolist(), strict=True):
            wanted = wanted + one(x[t], expert, weight) if expert < EXPERTS else wanted
        torch.testing.assert_close(got[t].double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 4])
def test_padding_of_unquantized_experts_gets_the_shared_expert_alone(tokens: int) -> None:
    x, shared = torch.full((tokens, HIDDEN), float("nan")), random(tokens, HIDDEN)
    chosen = torch.full((tokens, 2), EXPERTS)
    assert torch.equal(unquantized(x, chosen, torch.zeros(tokens, 2), W13, W2, LIMIT, shared=shared), shared)


@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_sum_without_a_shared_expert_is_not_rounded(tokens: int) -> None:
    x, weights = random(tokens, HIDDEN, seed=3).bfloat16(), random(tokens, 2, seed=5).abs()
    chosen = torch.stack([torch.arange(tokens) % 3, 3 + torch.arange(tokens) % 3], 1)
    got = unquantized(x, chosen, weights, W13, W2, LIMIT)
    shared = random(tokens, HIDDEN, seed=4).bfloat16()
    assert got.dtype == torch.float32 and got.shape == x.shape
    assert torch.equal((got + shared).bfloat16(), unquantized(x, chosen, weights, W13, W2, LIMIT, shared=shared))
    assert tokens == 0 or not torch.equal(got, got.bfloat16().float())


@pytest.mark.parametrize("tokens", [1, 6])
def test_unquantized_parts_of_the_width_are_rounded_each_and_add_up_to_the_whole(tokens: int) -> None:
    x, weights, chosen = (
        random(tokens, HIDDEN, seed=3).bfloat16(),
        random(tokens, 1, seed=5).abs(),
        torch.arange(tokens)[:, None] % 5,
    )
    gate, up = W13.split(WIDTH, 1)
    halves = [slice(0, WIDTH // 2), slice(WIDTH // 2, WIDTH)]
    parts = [(torch.cat([gate[:, half], up[:, half]], 1), W2[:, :, half].contiguous()) for half in halves]
    parts, whole = ([tuple(w.bfloat16() for w in pair) for pair in pairs] for pairs in (parts, [(W13, W2)]))
    outputs = (experts_outputs(ExpertInputs(x, None, chosen, weights, *held, LIMIT))[:, 0] for held in (*parts, *whole))
    assert_parts_of_the_whole(*outputs)


def test_quantized_models_round_the_inputs_of_both_products() -> None:
    x, shared, weights = random(3, HIDDEN, seed=3), torch.zeros(3, HIDDEN), torch.ones(3, 1)
    chosen = torch.tensor([[0], [2], [4]])
    got = unquantized(x, chosen, weights, W13, W2, LIMIT, shared=shared, round_inputs=True)
    again = unquantized(round_fp8(x, 128), chosen, weights, W13, W2, LIMIT, shared=shared, round_inputs=True)
    assert torch.equal(got, again)
    assert not torch.equal(got, unquantized(round_fp8(x, 128), chosen, weights, W13, W2, LIMIT, shared=shared))


def test_a_token_alone_has_the_same_bits() -> None:
    x, shared, weights = random(9, HIDDEN, seed=3), random(9, HIDDEN, seed=4), random(9, 2, seed=5).abs()
    chosen = torch.stack([torch.arange(9) % 2, 2 + torch.arange(9) % 3], 1)
    together = unquantized(x, chosen, weights, W13, W2, LIMIT, shared=shared, row_tile=16)
    alone = unquantized(x[4:5], chosen[4:5], weights[4:5], W13, W2, LIMIT, shared=shared[4:5], row_tile=16)
    assert torch.equal(alone[0], together[4])
