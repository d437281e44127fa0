"""Experts of few tokens in two launches: the bits of the kernels that do each part by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.experts import Tiles, sum_experts
from dsv4lite.kernels.experts.decode_small import DECODE_SMALL_TOKENS, Held, MoeInputs, moe_decode_small, most_decode_small
from dsv4lite.kernels.routing import Copies, Router
from tests.kernels.test_experts_triton import DEVICE, LIMIT, ON_GPU, assert_close, experts, forward, generator, inputs

pytest.importorskip("triton")

from dsv4lite.kernels.experts.decode_small_triton import moe_decode_small_triton
from dsv4lite.kernels.experts.triton import combine_triton
from dsv4lite.kernels.gemm.triton import fp8_linear_triton
from dsv4lite.kernels.routing.triton import route_triton
from dsv4lite.kernels.swiglu.triton import swiglu_quantize_triton

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("poison")]

SIZES = [pytest.param(5, 128, 128, 3, id="small")]
if ON_GPU:
    SIZES += [pytest.param(256, 4096, 2048, 6, id="flash"), pytest.param(48, 7168, 3072, 6, id="pro")]


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
) -> MoeInputs:
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
    return MoeInputs(*place, *experts(count, hidden, width, fp4=fp4), LIMIT)


def one_by_one(given: MoeInputs) -> tuple[Tensor, Tensor]:
    """What a launch for each part gives: the experts, and the sum."""
    routes = route_triton(given.logits_TE, given.router)
    shared = fp8_linear_triton(
        *swiglu_quantize_triton(given.h_TI, given.limit), given.shared_codes, given.shared_scales, row_tile=1
    )
    return routes[0], forward(given.x_codes, given.x_scales, *routes, given.w13, given.w2, given.limit, shared=shared)


summed = combine_triton


@pytest.mark.parametrize(("tokens", "padding", "hashed"), [(1, 0, False), (1, 0, True), (7, 3, True), (16, 0, False)])
@pytest.mark.parametrize(("count", "hidden", "width", "top_k"), SIZES)
def test_launches_have_the_bits_of_each_part_alone(
    count: int, hidden: int, width: int, top_k: int, tokens: int, padding: int, hashed: bool
) -> None:
    given = case(tokens, count, hidden, width, top_k, hashed=hashed, padding=padding)
    parts, (chosen, expected) = moe_decode_small_triton(given), one_by_one(given)
    assert torch.equal(parts.slots_TK, chosen)
    assert torch.equal(summed(parts), expected)
    torch.testing.assert_close(summed(parts), sum_experts.reference(parts), rtol=0, atol=0)


@pytest.mark.parametrize("fp4", [True, False])
def test_sum_agrees_with_the_reference(fp4: bool) -> None:
    given = case(6, 5, 256, 128, 2, fp4=fp4, padding=2)
    parts, expected = moe_decode_small_triton(given), moe_decode_small.reference(given)
    assert torch.equal(parts.slots_TK, expected.slots_TK)
    assert_close(summed(parts), sum_experts.reference(expected))


def test_shared_expert_that_is_cut_returns_parts_that_are_not_rounded() -> None:
    given = case(2, 3, 128, 128, 2)
    parts, whole = (
        moe_decode_small_triton(given._replace(held=Held(shared_partial=True))),
        moe_decode_small_triton(given),
    )
    part, rounded = parts.shared_TD, whole.shared_TD.float()
    assert part.dtype == torch.float32 and not torch.equal(part, rounded) and torch.equal(parts.outputs_TKD, whole.outputs_TKD)
    torch.testing.assert_close(part, rounded, rtol=2.0**-7, atol=0)  # the interpreter cuts
    torch.testing.assert_close(summed(parts), sum_experts.reference(parts), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("copied", [False, True], ids=["consecutive", "copied"])
def test_ranks_together_have_every_expert_once(copied: bool) -> None:
    """Slots are counted through the ranks; tokens take the two copies of the last expert in turn, and are counted."""
    count, ranks, top_k = 6, 2, 3
    given = case(7, count, 128, 128, top_k, padding=2)
    held = [0, 5, 1, 4, 2, 5, 3, 0] if copied else list(range(count))  # the expert in each slot
    places = [[slot for slot, expert in enumerate(held) if expert == e] for e in range(count)]
    table = [[*found, *[len(held)] * (2 - len(found))] for found in (*places, [])]
    copies = None
    if copied:
        counts = torch.tensor([*map(len, places), 1])
        copies = Copies(torch.tensor(table).to(DEVICE), counts.to(DEVICE), torch.zeros(count + 1, dtype=torch.int64, device=DEVICE))
    whole = moe_decode_small_triton(given)
    outputs = torch.zeros_like(whole.outputs_TKD)
    times = torch.zeros_like(whole.slots_TK)
    for rank in range(ranks):
        first, own = rank * len(held) // ranks, len(held) // ranks
        mine = [Tiles(t.codes[held[first : first + own]], t.scales[held[first : first + own]]) for t in (given.w13, given.w2)]
        what = Held(first=first, copies=copies if copies is None or rank == 0 else copies._replace(load_E=None))
        own_part = given._replace(w13=mine[0], w2=mine[1], held=what)
        part = moe_decode_small_triton(own_part if rank == 0 else own_part._replace(h_TI=None))
        reference = moe_decode_small.reference(own_part)
        assert torch.equal(part.slots_TK, reference.slots_TK) and part.experts == own
        found = part.slots_TK < own
        times += found
        outputs[found] = part.outputs_TKD[found]
        if part.shared_TD is None:
            assert rank == 1 and torch.equal(summed(part), sum_experts.reference(part))
        else:
            assert rank == 0 and torch.equal(part.shared_TD, whole.shared_TD)
    chosen = whole.slots_TK < count
    assert torch.equal(times, chosen.long()) and torch.equal(outputs[chosen], whole.outputs_TKD[chosen])
    if copies is not None and copies.load_E is not None:  # by the kernel and by the reference, of one rank
        assert copies.load_E.tolist() == [2 * n for n in whole.slots_TK.flatten().bincount(minlength=count + 1).tolist()]


def test_shared_expert_in_parts_has_their_order() -> None:
    given = case(3, 4, 128, 128, 2, shared_width=1000)  # two parts of four blocks of inputs
    assert torch.equal(summed(moe_decode_small_triton(given)), one_by_one(given)[1])


def test_all_tokens_may_choose_the_same_experts() -> None:
    given = case(16, 7, 128, 128, 2)
    given = given._replace(logits_TE=torch.zeros_like(given.logits_TE))
    assert torch.equal(summed(moe_decode_small_triton(given)), one_by_one(given)[1])


def test_padding_alone_has_no_block() -> None:
    given = case(5, 4, 128, 128, 2, padding=5)
    parts = moe_decode_small_triton(given)
    assert parts.slots_TK.eq(4).all() and torch.equal(summed(parts), parts.shared_TD)


def test_few_are_as_many_as_one_program_groups() -> None:
    assert most_decode_small(6) == most_decode_small(8) == DECODE_SMALL_TOKENS == 16 and most_decode_small(9) == 0


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_a_captured_graph_follows_new_routing() -> None:
    first, second = case(8, 256, 512, 256, 6), case(8, 256, 512, 256, 6, hashed=False)
    torch.set_deterministic_debug_mode("default")
    second = second._replace(logits_TE=-first.logits_TE)
    expected = [summed(moe_decode_small_triton(given)) for given in (first, second)]
    logits = first.logits_TE.clone()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        moe_decode_small_triton(first)  # a stream has its counters before it is captured
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        got = summed(moe_decode_small_triton(first._replace(logits_TE=logits)))
    for given, wanted in zip((second, first), reversed(expected), strict=True):
        logits.copy_(given.logits_TE)
        graph.replay()
        assert torch.equal(got, wanted)
