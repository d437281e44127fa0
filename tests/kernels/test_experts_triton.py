"""The kernels of routed experts against the reference."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.experts import (
    TILE_ROWS,
    ExpertInputs,
    ExpertSum,
    Tiles,
    experts_outputs,
    scale_words,
    store_matrix,
    sum_experts,
)
from dsv4lite.kernels.quantize import quantize_fp8
from tests.kernels.tensors import DEVICE, ON_GPU, launch
from tests.kernels.test_experts import matrix

pytest.importorskip("triton")

from dsv4lite.kernels.experts import grouping_triton, prefill_bf16_triton, prefill_fp4_triton, prefill_fp8_triton
from dsv4lite.kernels.experts.grouping_triton import BlockConfig, Groups, group_triton, max_blocks
from dsv4lite.kernels.experts.triton import BLOCKS, DECODE_BLOCKS, block_for, combine_triton, experts_outputs_triton
from dsv4lite.kernels.experts.weight_only_triton import UNQUANTIZED_BLOCKS

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("poison")]

LIMIT = 10.0


def forward(*given: Tensor | Tiles | float, shared: Tensor | None = None, block: BlockConfig | None = None) -> Tensor:
    """What the kernels make of ``ExpertInputs``, summed; without tiles ``weight_only_outputs_triton`` runs."""
    inputs = ExpertInputs(*given)
    return combine_triton(ExpertSum(inputs.slots_TK, experts_outputs_triton(inputs, block=block), shared, inputs.sizes[0]))


def forward_ref(*given: Tensor | Tiles | float, shared: Tensor | None = None) -> Tensor:
    inputs = ExpertInputs(*given)
    return sum_experts.reference(ExpertSum(inputs.slots_TK, experts_outputs.reference(inputs), shared, inputs.sizes[0]))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def experts(count: int, hidden: int, width: int, *, fp4: bool, seed: int = 0) -> tuple[Tiles, Tiles]:
    """Random tiles whose scales differ from group to group, and whose bases differ from row to row."""
    rng, stacks = generator(seed), []
    for rows, columns in ((2 * width, hidden), (hidden, width)):
        codes, scales = Tiles.shapes(count, rows, columns, fp4=fp4)
        bytes_ = torch.randint(0, 256, codes, generator=rng, dtype=torch.uint8)
        if fp4:
            least = torch.randint(1, 24, (*scales[:2], 1, TILE_ROWS, 1), generator=rng)  # over the base: rows use all exponents
            words = scale_words(torch.randint(118, 122, (*scales, 4), generator=rng), 118 - least)[..., 0]
        else:
            bytes_ = bytes_ & 0xBF  # below 2, and never NaN
            words = (torch.rand(scales, generator=rng) * 0.1 + 0.02).view(torch.int32)
        stacks.append(Tiles(bytes_.to(DEVICE), words.contiguous().to(DEVICE)))
    return stacks[0], stacks[1]


def inputs(tokens: int, hidden: int, count: int, top_k: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes and scales that differ from block to block, ascending expert ids, and weights."""
    rng = generator(seed)
    sizes = torch.exp2(torch.randint(-3, 4, (tokens, hidden // 128), generator=rng)).repeat_interleave(128, 1)
    codes, scales = quantize_fp8((torch.randn(tokens, hidden, generator=rng) * sizes).bfloat16(), 128)
    chosen = torch.rand(tokens, count, generator=rng).topk(top_k).indices.sort(-1).values
    weights = torch.rand(tokens, top_k, generator=rng) + 0.1
    return codes.to(DEVICE), scales.to(DEVICE), chosen.to(DEVICE), weights.to(DEVICE)


def assert_close(got: Tensor, expected: Tensor) -> None:
    """The bound of the op file."""
    got, expected = got.float(), expected.float()
    assert got.isfinite().all()
    error, size = got - expected, expected.abs().max()
    assert error.abs().max() <= size / 32, float(error.abs().max() / size)
    assert error.square().mean().sqrt() <= size / 512, float(error.square().mean().sqrt() / size)


# What the interpreter sees of a block is its size.
EVERY_BLOCK = list({block if ON_GPU else (block.rows, block.tiles): block for _, block in (*DECODE_BLOCKS, *BLOCKS)}.values())
SHAPES = [pytest.param(5, 256, 128, 2, id="small")]
if ON_GPU:
    SHAPES += [pytest.param(256, 4096, 2048, 6, id="flash"), pytest.param(48, 7168, 3072, 6, id="pro")]


@pytest.mark.parametrize("fp4", [True, False])
@pytest.mark.parametrize("tokens", [1, 3, 21])
@pytest.mark.parametrize(("count", "hidden", "width", "top_k"), SHAPES)
def test_kernels_agree_with_the_reference(count: int, hidden: int, width: int, top_k: int, tokens: int, fp4: bool) -> None:
    w13, w2 = experts(count, hidden, width, fp4=fp4)
    given = inputs(tokens, hidden, count, top_k)
    assert_close(forward(*given, w13, w2, LIMIT), forward_ref(*given, w13, w2, LIMIT))


@pytest.mark.skipif(not ON_GPU, reason="too many for the interpreter")
@pytest.mark.parametrize("tokens", [8, 64, 257, 1024, 3000])
@pytest.mark.parametrize("fp4", [True, False])
def test_kernels_agree_with_the_reference_for_many_tokens(tokens: int, fp4: bool) -> None:
    w13, w2 = experts(64, 2048, 1024, fp4=fp4)
    given = inputs(tokens, 2048, 64, 6)
    assert_close(forward(*given, w13, w2, LIMIT), forward_ref(*given, w13, w2, LIMIT))


@pytest.mark.skipif(not ON_GPU or torch.cuda.get_device_capability() != (9, 0), reason="the kernels are for Hopper")
@pytest.mark.parametrize(
    ("tokens", "count", "hidden", "width", "top_k", "fp4"),
    [
        *((700, 8, 7168, 2048, 4, fp4) for fp4 in (False, True)),
        *((4096, 64, 2048, 512, 6, fp4) for fp4 in (False, True)),
        (640, 16, 1024, 384, 4, False),
        (640, 16, 768, 768, 4, True),
        *((tokens, 5, 256, 128, 2, False) for tokens in (200, 3)),
        *((tokens, 5, 256, 256, 2, True) for tokens in (200, 3)),
    ],
)
def test_blocks_on_hopper_have_the_bits_of_any_chip(
    tokens: int, count: int, hidden: int, width: int, top_k: int, fp4: bool
) -> None:
    """``outputs_of_blocks``, ``grouped`` and ``tables_of``, for all pairs that have an expert, for none, for all with one.

    Helpers: ``place_of``, ``barriers_of``, ``give_item``, ``take_item``, ``next_item``, ``tell``, ``told``, ``pairs_to_bfloat16``.
    """
    codes, scales, chosen, weights = inputs(tokens, hidden, count, top_k)
    chosen = torch.where(weights < 0.2, count, chosen).sort(-1).values  # some have no expert
    hopper, small, large = prefill_fp4_triton if fp4 else prefill_fp8_triton, BLOCKS[-2][1], BLOCKS[-1][1]
    for slots in (chosen, torch.full_like(chosen, count), torch.full_like(chosen, count - 1)):
        given = ExpertInputs(codes, scales, slots, weights, *experts(count, hidden, width, fp4=fp4), LIMIT)
        assert hopper.takes_blocks(given)
        got, wanted = (experts_outputs_triton(given, block=block)[slots < count] for block in (large, small))
        assert got.isfinite().all() and torch.equal(got, wanted)


def test_other_sizes_formats_and_chips_take_the_kernels_for_any_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(module: ModuleType, hidden: int, width: int, *, fp4: bool) -> bool:
        given = ExpertInputs(*inputs(3, hidden, 4, 2), *experts(4, hidden, width, fp4=fp4), LIMIT)
        monkeypatch.setattr(module, "capability_of", lambda device: capability)
        return bool(module.takes_blocks(given))

    for capability in (80, 89, 90, 100, 120):
        sizes = [(256, 128), (384, 128), (384, 256), (256, 256)]
        assert [taken(prefill_fp8_triton, *size, fp4=False) for size in sizes] == [capability == 90, False, False, capability == 90]
        assert [taken(prefill_fp4_triton, *size, fp4=True) for size in sizes] == [False, False, False, capability == 90]
        assert not taken(prefill_fp8_triton, 256, 256, fp4=True) and not taken(prefill_fp4_triton, 256, 256, fp4=False)


@pytest.fixture(scope="module")
def by_block() -> Callable[[BlockConfig], Tensor]:
    """The same experts run in blocks of a size."""
    w13, w2 = experts(3, 128, 256, fp4=True)
    given = inputs(19, 128, 3, 2)
    return cache(lambda block: forward(*given, w13, w2, LIMIT, block=block))


@pytest.mark.parametrize(
    "block", EVERY_BLOCK[1:], ids=lambda block: f"{block.rows}x{block.tiles}x{block.num_stages}x{block.unroll}"
)
def test_every_block_size_gives_the_same_bits(by_block: Callable[[BlockConfig], Tensor], block: BlockConfig) -> None:
    assert torch.equal(by_block(block), by_block(EVERY_BLOCK[0]))


def test_a_token_does_not_depend_on_the_others() -> None:
    w13, w2 = experts(4, 128, 128, fp4=True)
    given = inputs(40, 128, 4, 2)
    together = forward(*given, w13, w2, LIMIT)
    for part in (slice(0, 1), slice(7, 8), slice(5, 18)):
        assert torch.equal(forward(*(x[part].contiguous() for x in given), w13, w2, LIMIT), together[part])


@pytest.mark.parametrize("counted", [False, True])
def test_all_tokens_may_choose_the_same_experts(counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouping_triton, "COUNT_FROM", 1 if counted else 1 << 30)
    w13, w2 = experts(7, 128, 128, fp4=True)
    codes, scales, chosen, weights = inputs(35, 128, 7, 2)
    chosen = torch.tensor([2, 5], device=DEVICE).repeat(35, 1)
    given = codes, scales, chosen, weights
    assert_close(forward(*given, w13, w2, LIMIT), forward_ref(*given, w13, w2, LIMIT))


def test_clamps_bite() -> None:
    w13, w2 = experts(3, 128, 128, fp4=True)
    given = inputs(5, 128, 3, 2)
    small, large = (forward(*given, w13, w2, limit) for limit in (0.05, LIMIT))
    assert_close(small, forward_ref(*given, w13, w2, 0.05))
    assert not torch.equal(small, large)


def test_shared_expert_is_added_last_and_rounded_once() -> None:
    w13, w2 = experts(3, 128, 128, fp4=True)
    given = inputs(5, 128, 3, 2)
    shared = torch.randn(5, 128, generator=generator(3)).bfloat16().to(DEVICE)
    got = forward(*given, w13, w2, LIMIT, shared=shared)
    assert got.dtype == torch.bfloat16 and torch.equal(got, (forward(*given, w13, w2, LIMIT) + shared.float()).bfloat16())


def test_outputs_are_those_of_each_expert_where_there_is_one() -> None:
    codes, scales, chosen, weights = inputs(6, 256, 3, 2)
    w13, w2 = experts(3, 256, 128, fp4=True)
    given, here = (codes, scales, torch.where(chosen == 1, 3, chosen), weights), chosen != 1
    outputs, expected = (run(ExpertInputs(*given, w13, w2, LIMIT)) for run in (experts_outputs_triton, experts_outputs.reference))
    assert outputs.dtype == expected.dtype == torch.bfloat16
    assert_close(outputs[here], expected[here])


def test_no_tokens_give_nothing() -> None:
    w13, w2 = experts(3, 128, 128, fp4=True)
    assert forward(*inputs(0, 128, 3, 2), w13, w2, LIMIT).shape == (0, 128)


def test_outputs_are_summed_in_order_and_rounded_once() -> None:
    y, shared = torch.randn(6, 128, generator=generator(4)).bfloat16().to(DEVICE), torch.ones(3, 128, device=DEVICE).bfloat16()
    chosen = torch.tensor([[0, 1], [1, 2], [0, 3]], device=DEVICE)
    y[5] = torch.nan  # of no expert: never written
    expected = y.float()[0::2] + y.float()[1::2].nan_to_num(0.0)
    parts = ExpertSum(chosen, y.view(3, 2, 128), None, 3)
    assert torch.equal(combine_triton(parts), expected)
    assert torch.equal(combine_triton(parts._replace(shared_TD=shared)), (expected + 1).bfloat16())
    assert torch.equal(combine_triton(parts._replace(shared_TD=shared.float() / 3)), expected + shared.float() / 3)


def test_tokens_without_experts_get_the_shared_one_alone() -> None:
    w13, w2 = experts(3, 128, 128, fp4=True)
    codes, scales, chosen, weights = inputs(6, 128, 3, 2)
    shared = torch.randn(6, 128, generator=generator(3)).bfloat16().to(DEVICE)
    whole = forward(codes, scales, chosen, weights, w13, w2, LIMIT, shared=shared)
    chosen[[1, 4]] = 3
    for op in (forward, forward_ref):
        got = op(codes, scales, chosen, weights, w13, w2, LIMIT, shared=shared)
        assert torch.equal(got[[1, 4]], shared[[1, 4]])
        assert_close(got[[0, 2, 3, 5]], whole[[0, 2, 3, 5]])
    chosen[:] = 3
    assert torch.equal(forward(codes, scales, chosen, weights, w13, w2, LIMIT, shared=shared), shared)


def test_blocks_grow_with_the_pairs_of_each_expert() -> None:
    few = [block_for(pairs, 256) for pairs in (1, 8, 9, 16, 17, 24, 25, 96)]
    assert few == [DECODE_BLOCKS[at][1] for at in (0, 0, 1, 1, 2, 2, 3, 3)]
    many = [block_for(pairs, 8) for pairs in (97, 128, 129, 256, 257, 10**6)]
    assert [block.rows for block in many] == [16, 16, 32, 32, 64, 64]


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_a_captured_graph_follows_new_routing() -> None:
    w13, w2 = experts(16, 512, 256, fp4=True)
    first, second = inputs(24, 512, 16, 4), inputs(24, 512, 16, 4, seed=2)
    torch.set_deterministic_debug_mode("default")
    expected = [forward(*given, w13, w2, LIMIT) for given in (first, second)]
    held = tuple(x.clone() for x in first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = forward(*held, w13, w2, LIMIT)
    for given, wanted in zip((second, first), reversed(expected), strict=True):
        for place, x in zip(held, given, strict=True):
            place.copy_(x)
        graph.replay()
        assert torch.equal(got, wanted)


# Unquantized.

UNQUANTIZED_SIZES = [(0, 4, 2, 32, 64), (1, 5, 2, 48, 20), (7, 4, 2, 80, 72)]
UNQUANTIZED_SIZES += [(64, 256, 6, 4096, 2048), (1, 256, 6, 4096, 2048), (3000, 32, 6, 1024, 512)] if ON_GPU else []
DTYPES = [torch.float32, torch.bfloat16]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)


def unquantized(tokens: int, experts: int, top_k: int, hidden: int, width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Inputs, routes (some to no expert), weights of the routes, both stacks, the shared result."""
    w13 = (random(experts, 2 * width, hidden, seed=1) * hidden**-0.5).to(dtype)
    w2 = (random(experts, hidden, width, seed=2) * width**-0.5).to(dtype)
    chosen = random(tokens, experts + 1, seed=3).topk(top_k).indices.sort(-1).values if tokens else random(0, top_k).long()
    x, shared = random(tokens, hidden, seed=4).to(dtype), random(tokens, hidden, seed=6).to(dtype)
    return x, chosen, random(tokens, top_k, seed=5).abs(), w13, w2, shared


def run(given: tuple[Tensor, ...], *, reference: bool = False, block: BlockConfig | None = None) -> Tensor:
    x, *rest, shared = given
    if reference:
        return forward_ref(x, None, *rest, 0.9, shared=shared)
    return forward(x, None, *rest, 0.9, shared=shared, block=block)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("tokens", "experts", "top_k", "hidden", "width"), UNQUANTIZED_SIZES)
def test_unquantized_kernels_agree(tokens: int, experts: int, top_k: int, hidden: int, width: int, dtype: torch.dtype) -> None:
    given = unquantized(tokens, experts, top_k, hidden, width, dtype)
    got, wanted = run(given), run(given, reference=True)
    assert got.shape == wanted.shape and got.dtype == wanted.dtype == dtype
    if tokens:
        bound = 2**-14 if dtype == torch.float32 else 2**-6
        assert (got.float() - wanted.float()).abs().max() <= bound * wanted.float().abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("block", [block for _, block in UNQUANTIZED_BLOCKS], ids=lambda block: f"{block.rows}")
def test_every_unquantized_block_gives_the_same_bits(block: BlockConfig, dtype: torch.dtype) -> None:
    given = unquantized(40 if ON_GPU else 5, 3, 2, 80, 72, dtype)
    wanted = run(given)
    few = tuple(part if part.dim() == 3 else part[3:5].contiguous() for part in given)
    # The interpreter's products are a library's, which has an order of its own for every shape.
    bound = 0.0 if ON_GPU or dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(run(given, block=block), wanted, rtol=0, atol=bound)
    torch.testing.assert_close(run(few, block=block), wanted[3:5], rtol=0, atol=bound)


@pytest.mark.skipif(not ON_GPU or torch.cuda.get_device_capability() != (9, 0), reason="the kernels are for Hopper")
@pytest.mark.parametrize(
    ("tokens", "count", "hidden", "width", "top_k"),
    [(1400, 64, 2048, 1408, 6), (3000, 16, 5120, 704, 6), (200, 5, 64, 192, 2), (1000, 3, 448, 64, 2)],
)
def test_unquantized_blocks_on_hopper_have_the_bits_of_any_chip(
    tokens: int, count: int, hidden: int, width: int, top_k: int
) -> None:
    """Columns that fill the last tile, and do not; a few pairs without an expert, all pairs with the last one."""
    x, chosen, weights, w13, w2, _ = unquantized(tokens, count, top_k, hidden, width, torch.bfloat16)
    for slots in (chosen, torch.full_like(chosen, count - 1)):
        given = ExpertInputs(x, None, slots, weights, w13, w2, 0.9)
        assert prefill_bf16_triton.takes_blocks(given)
        got, wanted = (experts_outputs_triton(given, block=block)[slots < count] for block in (None, UNQUANTIZED_BLOCKS[-1][1]))
        assert got.isfinite().all() and torch.equal(got, wanted)
        assert torch.equal(experts_outputs_triton(given)[slots < count], wanted), "a second time, in the memory of the first"


def test_unquantized_blocks_on_hopper_are_for_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(tokens: int, hidden: int, width: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        x, *rest, _ = unquantized(tokens, 2, 2, hidden, width, dtype)
        return prefill_bf16_triton.takes_blocks(ExpertInputs(x, None, *rest, 0.9))

    for capability in (80, 90, 100):
        monkeypatch.setattr(prefill_bf16_triton, "capability_of", lambda device, capability=capability: capability)
        assert taken(64, 64, 192) == (capability == 90)
        assert not taken(63, 64, 192), "too few tokens"
        assert not taken(64, 64, 96) and not taken(64, 96, 64), "inputs are no whole chunks"
        assert not taken(64, 64, 192, torch.float32)


@pytest.mark.parametrize("tokens", [1, 20])
def test_padding_of_unquantized_experts_gets_the_shared_expert_alone(tokens: int) -> None:
    x, chosen, weights, *rest, shared = unquantized(tokens, 4, 2, 32, 32, torch.bfloat16)
    given = (torch.full_like(x, float("nan")), torch.full_like(chosen, 4), weights, *rest, shared)
    assert torch.equal(run(given), shared)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_unquantized_sum_without_a_shared_expert_is_not_rounded(dtype: torch.dtype) -> None:
    *given, shared = unquantized(5, 4, 2, 32, 48, dtype)
    got = forward(given[0], None, *given[1:], 0.9)
    assert got.dtype == torch.float32
    assert torch.equal((got + shared).to(dtype), run((*given, shared)))


# Grouping.


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("quantized", [False, True])
def test_every_pair_has_one_place_among_those_of_its_expert(
    quantized: bool, counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouping_triton, "COUNT_FROM", 1 if counted else 1 << 30)
    tokens, top_k, count, rows = 37, 3, 5, 16
    rng = torch.Generator().manual_seed(0)
    chosen = torch.rand(tokens, count + 2, generator=rng).topk(top_k).indices.clamp_max(count)  # some are none
    scales = torch.randint(100, 130, (tokens, 2), generator=rng, dtype=torch.uint8)
    groups = Groups.allocate(tokens, top_k, count, (256, 128), rows, torch.device(DEVICE), by_token=False)
    group_triton(chosen.to(DEVICE), scales.to(DEVICE) if quantized else None, count, groups)
    blocks = int(groups.num_blocks)
    order, owner, words = groups.block_pairs[:blocks].cpu(), groups.block_expert[:blocks].cpu(), groups.x_words[:blocks].cpu()
    found = order < tokens * top_k
    pairs = order[found].long()
    assert sorted(pairs.tolist()) == (chosen.flatten() < count).nonzero().flatten().tolist()
    assert torch.equal(chosen.flatten()[pairs], owner.long()[:, None].expand_as(order)[found])
    for block, (first, mine) in enumerate(groups.block_span[:blocks].tolist()):
        same = (owner == owner[block]).nonzero().flatten().tolist()
        assert same == list(range(first, first + mine))
    if quantized:
        assert torch.equal(words.transpose(1, 2)[found], scales[pairs // top_k].int() << 23)
        assert not groups.arrivals[:blocks].any()


def test_blocks_suffice_for_any_routing() -> None:
    rng = torch.Generator().manual_seed(0)
    for tokens, count, top_k, rows in ((1, 8, 6, 16), (7, 8, 2, 16), (100, 8, 3, 16), (300, 64, 6, 64)):
        for skew in (0.0, 3.0, 30.0):
            pull = skew * torch.rand(count, generator=rng)
            chosen = (torch.rand(tokens, count, generator=rng) + pull).topk(top_k).indices
            needed = int((torch.bincount(chosen.flatten(), minlength=count) + rows - 1).div(rows, rounding_mode="floor").sum())
            assert needed <= max_blocks(tokens * top_k, count, rows) <= tokens * top_k


@pytest.mark.parametrize("half", [None, 0, 1])
@pytest.mark.parametrize("kind", ["fp4", "fp8", "fp8 float scales"])
@pytest.mark.parametrize(("rows", "columns"), [(64, 128), (192, 384), (512, 1536)] if ON_GPU else [(64, 384)])
def test_matrices_are_stored_as_by_the_reference(rows: int, columns: int, kind: str, half: int | None) -> None:
    weight, scale = (part.to(DEVICE) for part in matrix(rows, columns, kind))
    if kind == "fp4":  # groups whose scales are too small for their row: by one power of two, by some, and by all
        low = scale.view(torch.uint8)
        low[3, 1:4] = (low[3].amax() - torch.tensor([27, 29, 200], device=DEVICE).clamp_max(low[3].amax())).to(torch.uint8)
        low[5] = torch.arange(columns // 32, device=DEVICE)
    shapes = Tiles.shapes(1, rows * (1 if half is None else 2), columns, fp4=kind == "fp4")
    stored = []
    for store in (store_matrix.reference, lambda *given: launch(store_matrix, *given)):
        codes = torch.full(shapes[0][1:], 255, dtype=torch.uint8, device=DEVICE)
        words = torch.full(shapes[1][1:], -1, dtype=torch.int32, device=DEVICE)
        store(codes, words, weight, scale, half)
        stored.append((codes, words))
    for wanted, got in zip(*stored, strict=True):
        assert torch.equal(got, wanted)
