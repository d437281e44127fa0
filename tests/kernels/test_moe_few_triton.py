"""Experts of few tokens in two launches: the bits of the kernels that do each part by itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.all_reduce import part_of_experts, part_of_experts_ref
from dsv4lite.kernels.experts import Tiles
from dsv4lite.kernels.experts.decode_small import MOE_FEW_TOKENS, ExpertSum, Held, Router, moe_few_ref, suits_few, sum_experts_ref
from dsv4lite.kernels.routing import Copies
from tests.kernels.test_experts_triton import DEVICE, LIMIT, ON_GPU, assert_close, experts, generator, inputs

pytest.importorskip("triton")

from dsv4lite.kernels.experts.decode_small_triton import moe_few_triton
from dsv4lite.kernels.experts.triton import combine_triton, experts_forward_triton
from dsv4lite.kernels.gemm.triton import fp8_linear_triton
from dsv4lite.kernels.routing.triton import route_triton
from dsv4lite.kernels.swiglu.triton import swiglu_quantize_triton

pytestmark = pytest.mark.kernel

Case = tuple[Tensor, Router, Tensor, Tensor, Tensor, Tensor, Tensor, Tiles, Tiles, float]
SIZES = [pytest.param(5, 128, 128, 3, id="small")]
if ON_GPU:
    SIZES += [pytest.param(256, 4096, 2048, 6, id="flash"), pytest.param(48, 7168, 3072, 6, id="pro")]


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Fill what is not initialised with NaN and the largest integers."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def case(
    tokens: int,
    count: int,
    hidden: int,
    width: int,
    top_k: int,
    *,
    shared_width: int = 0,
    hashed: bool = False,
    fp4: bool = True,
    padding: int = 0,
) -> Case:
    """Every argument; the last tokens are padding."""
    rng = generator(tokens)
    codes, scales, _, _ = inputs(tokens, hidden, count, 1)
    table = torch.rand(50, count, generator=rng).argsort(-1)[:, :top_k].contiguous()
    positions = torch.arange(tokens, dtype=torch.int32)
    positions[tokens - padding :] = -1
    router = Router(
        top_k,
        1.5,
        None if hashed else torch.rand(count, generator=rng).to(DEVICE),
        table.to(DEVICE) if hashed else None,
        torch.randint(0, 50, (tokens,), generator=rng).to(DEVICE),
        positions.to(DEVICE),
    )
    shared_width = shared_width or width
    shared = torch.randn(hidden, shared_width, generator=rng).to(torch.float8_e4m3fn)
    shared_scales = torch.randint(117, 124, (-(-hidden // 128), -(-shared_width // 128)), generator=rng, dtype=torch.uint8)
    h = (2 * torch.randn(tokens, 2 * shared_width, generator=rng)).bfloat16()
    logits = 3 * torch.randn(tokens, count, generator=rng)
    place = (logits.to(DEVICE), router, codes, scales, h.to(DEVICE), shared.to(DEVICE), shared_scales.to(DEVICE))
    return (*place, *experts(count, hidden, width, fp4=fp4), LIMIT)


def one_by_one(
    logits: Tensor, router: Router, codes: Tensor, scales: Tensor, h: Tensor, *rest: Tensor | Tiles | float
) -> tuple[Tensor, Tensor]:
    """What a launch for each part gives: the experts, and the sum."""
    shared_codes, shared_scales, w13, w2, limit = rest
    ids = None if router.table_VK is None else router.token_ids_T
    chosen, weights = route_triton(logits, router.top_k, router.scale, router.bias_E, router.table_VK, ids, router.positions_T)
    shared = fp8_linear_triton(*swiglu_quantize_triton(h, limit), shared_codes, shared_scales)
    return chosen, experts_forward_triton(codes, scales, chosen, weights, w13, w2, limit, shared)


def summed(parts: ExpertSum) -> Tensor:
    return combine_triton(parts.outputs_TKD.flatten(0, 1), parts.chosen_TK, parts.experts, parts.shared_TD)


@pytest.mark.parametrize(("tokens", "padding", "hashed"), [(1, 0, False), (1, 0, True), (7, 3, True), (16, 0, False)])
@pytest.mark.parametrize(("count", "hidden", "width", "top_k"), SIZES)
def test_launches_have_the_bits_of_each_part_alone(
    count: int, hidden: int, width: int, top_k: int, tokens: int, padding: int, hashed: bool
) -> None:
    given = case(tokens, count, hidden, width, top_k, hashed=hashed, padding=padding)
    parts, (chosen, expected) = moe_few_triton(*given), one_by_one(*given)
    assert torch.equal(parts.chosen_TK, chosen)
    assert torch.equal(summed(parts), expected)
    torch.testing.assert_close(summed(parts), sum_experts_ref(parts), rtol=0, atol=0)


@pytest.mark.parametrize("fp4", [True, False])
def test_sum_agrees_with_the_reference(fp4: bool) -> None:
    given = case(6, 5, 256, 128, 2, fp4=fp4, padding=2)
    parts, expected = moe_few_triton(*given), moe_few_ref(*given)
    assert torch.equal(parts.chosen_TK, expected.chosen_TK)
    assert_close(summed(parts), sum_experts_ref(expected))


def test_experts_that_are_cut_return_parts_that_nobody_has_rounded() -> None:
    given = case(2, 3, 128, 128, 2)
    parts, whole = moe_few_triton(*given, Held(partial=True, shared_partial=True)), moe_few_triton(*given)
    for part, rounded in ((parts.outputs_TKD, whole.outputs_TKD.float()), (parts.shared_TD, whole.shared_TD.float())):
        assert part.dtype == torch.float32 and not torch.equal(part, rounded)
        torch.testing.assert_close(part, rounded, rtol=2.0**-7, atol=0)  # the interpreter cuts
    torch.testing.assert_close(part_of_experts(parts), part_of_experts_ref(parts), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("copied", [False, True], ids=["consecutive", "copied"])
def test_ranks_together_have_every_expert_once(copied: bool) -> None:
    """Slots are counted through the ranks; tokens take the two copies of the last expert in turn, and are counted."""
    count, ranks, top_k = 6, 2, 3
    given = case(7, count, 128, 128, top_k, padding=2)
    logits, router, codes, scales, h, *shared, w13, w2, limit = given
    held = [0, 5, 1, 4, 2, 5, 3, 0] if copied else list(range(count))  # the expert in each slot
    places = [[slot for slot, expert in enumerate(held) if expert == e] for e in range(count)]
    table = [[*found, *[len(held)] * (2 - len(found))] for found in (*places, [])]
    copies = None
    if copied:
        counts = torch.tensor([*map(len, places), 1])
        copies = Copies(torch.tensor(table).to(DEVICE), counts.to(DEVICE), torch.zeros(count + 1, dtype=torch.int64, device=DEVICE))
    whole = moe_few_triton(*given)
    outputs = torch.zeros_like(whole.outputs_TKD)
    times = torch.zeros_like(whole.chosen_TK)
    for rank in range(ranks):
        first, own = rank * len(held) // ranks, len(held) // ranks
        mine = [Tiles(t.codes[held[first : first + own]], t.scales[held[first : first + own]]) for t in (w13, w2)]
        what = Held(first=first, copies=copies if copies is None or rank == 0 else copies._replace(load_E=None))
        part = moe_few_triton(logits, router, codes, scales, h if rank == 0 else None, *shared, *mine, limit, what)
        reference = moe_few_ref(logits, router, codes, scales, h, *shared, *mine, limit, held=what)
        assert torch.equal(part.chosen_TK, reference.chosen_TK) and part.experts == own
        found = part.chosen_TK < own
        times += found
        outputs[found] = part.outputs_TKD[found]
        if part.shared_TD is None:
            assert rank == 1 and torch.equal(part_of_experts(part), part_of_experts_ref(part))
        else:
            assert rank == 0 and torch.equal(part.shared_TD, whole.shared_TD)
    chosen = whole.chosen_TK < count
    assert torch.equal(times, chosen.long()) and torch.equal(outputs[chosen], whole.outputs_TKD[chosen])
    if copies is not None and copies.load_E is not None:  # by the kernel and by the reference, of one rank
        assert copies.load_E.tolist() == [2 * n for n in whole.chosen_TK.flatten().bincount(minlength=count + 1).tolist()]


def test_shared_expert_in_parts_has_their_order() -> None:
    given = case(3, 4, 128, 128, 2, shared_width=1000)  # two parts of four blocks of inputs
    assert torch.equal(summed(moe_few_triton(*given)), one_by_one(*given)[1])


def test_all_tokens_may_choose_the_same_experts() -> None:
    logits, *rest = case(16, 7, 128, 128, 2)
    given = (torch.zeros_like(logits), *rest)
    assert torch.equal(summed(moe_few_triton(*given)), one_by_one(*given)[1])


def test_padding_alone_has_no_block() -> None:
    given = case(5, 4, 128, 128, 2, padding=5)
    parts = moe_few_triton(*given)
    assert parts.chosen_TK.eq(4).all() and torch.equal(summed(parts), parts.shared_TD)


def test_few_are_as_many_as_one_program_groups() -> None:
    assert [tokens for tokens in range(40) if suits_few(tokens, 6)] == list(range(1, MOE_FEW_TOKENS + 1))
    assert suits_few(1, 8) and not suits_few(1, 9)


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_a_captured_graph_follows_new_routing() -> None:
    first, second = case(8, 256, 512, 256, 6), case(8, 256, 512, 256, 6, hashed=False)
    torch.use_deterministic_algorithms(False)
    second = (-first[0], *second[1:])
    expected = [summed(moe_few_triton(*given)) for given in (first, second)]
    logits = first[0].clone()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        moe_few_triton(*first)  # a stream has its counters before it is captured
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        got = summed(moe_few_triton(logits, *first[1:]))
    for given, wanted in zip((second, first), reversed(expected), strict=True):
        logits.copy_(given[0])
        graph.replay()
        assert torch.equal(got, wanted)
