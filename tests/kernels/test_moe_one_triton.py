"""One token's experts in one launch: the bits of the kernels that do each part by themselves, or sums in any order."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.experts import Tiles
from dsv4lite.kernels.moe_few import ExpertSum, Held, Router, sum_experts_ref
from dsv4lite.kernels.moe_one import Shared, moe_one_ref
from dsv4lite.kernels.quantize import quantize_fp8
from tests.kernels.test_experts_triton import DEVICE, LIMIT, ON_GPU, assert_close, experts, generator

pytest.importorskip("triton")

from dsv4lite.kernels.gemm_pair_triton import pair_linear_triton
from dsv4lite.kernels.gemm_triton import counters_of
from dsv4lite.kernels.moe_few_triton import moe_few_triton
from dsv4lite.kernels.moe_one_triton import moe_one_triton
from tests.kernels.test_moe_few_triton import SIZES, poison, summed

__all__ = ["poison"]  # a fixture

pytestmark = pytest.mark.kernel


class Case(NamedTuple):
    """The arguments of ``moe_one``."""

    x: Tensor
    codes: Tensor
    scales: Tensor
    gate: Tensor
    router: Router
    shared: Shared
    w13: Tiles
    w2: Tiles
    limit: float


def case(
    count: int,
    hidden: int,
    width: int,
    top_k: int,
    *,
    shared_width: int = 0,
    hashed: bool = False,
    fp4: bool = True,
    position: int = 4,
) -> Case:
    rng = generator(hidden)
    x = torch.randn(1, hidden, generator=rng).bfloat16().to(DEVICE)
    gate = (3 * torch.randn(count, hidden, generator=rng) / hidden**0.5).bfloat16().to(DEVICE)
    table = torch.rand(50, count, generator=rng).argsort(-1)[:, :top_k].contiguous().to(DEVICE)
    bias = torch.rand(count, generator=rng).to(DEVICE)
    at = torch.tensor([7], device=DEVICE), torch.tensor([position], dtype=torch.int32, device=DEVICE)
    router = Router(top_k, 1.5, None if hashed else bias, table if hashed else None, *at)

    def matrix(outs: int, inputs: int) -> tuple[Tensor, Tensor]:
        scales = torch.randint(117, 124, (-(-outs // 128), -(-inputs // 128)), generator=rng, dtype=torch.uint8)
        return torch.randn(outs, inputs, generator=rng).to(torch.float8_e4m3fn).to(DEVICE), scales.to(DEVICE)

    wide = shared_width or width
    shared = Shared(*matrix(2 * wide, hidden), *matrix(hidden, wide))
    return Case(x, *quantize_fp8(x, 128), gate, router, shared, *experts(count, hidden, width, fp4=fp4), LIMIT)


def in_parts(given: Case, held: Held | None = None) -> ExpertSum:
    """What the launches for several tokens give."""
    x, codes, scales, gate, router, shared, *rest = given
    h, logits = pair_linear_triton(x, codes, scales, shared.w13, shared.w13_scales, gate)
    return moe_few_triton(logits, router, codes, scales, h, shared.w2, shared.w2_scales, *rest, held)


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize(("count", "hidden", "width", "top_k"), SIZES)
def test_one_launch_has_the_bits_of_several(count: int, hidden: int, width: int, top_k: int, hashed: bool) -> None:
    given = case(count, hidden, width, top_k, hashed=hashed)
    expected = in_parts(given)
    for _ in range(2):  # the second finds the gates as the first has left them
        parts = moe_one_triton(*given, Held(), any_order=False)
        assert torch.equal(parts.chosen_TK, expected.chosen_TK) and torch.equal(summed(parts), summed(expected))
        assert not counters_of(given.x.device).any()


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize(("count", "hidden", "width", "top_k"), SIZES)
def test_sums_in_any_order_agree_with_several_launches(count: int, hidden: int, width: int, top_k: int, hashed: bool) -> None:
    given = case(count, hidden, width, top_k, hashed=hashed)
    expected = in_parts(given)
    assert expected.shared_TD is not None
    for _ in range(2):  # the second finds the gates as the first has left them
        parts = moe_one_triton(*given, Held())
        assert torch.equal(parts.chosen_TK, expected.chosen_TK) and parts.shared_TD is not None
        assert_close(parts.shared_TD, expected.shared_TD)
        for k in range(top_k):
            assert_close(parts.outputs_TKD[:, k], expected.outputs_TKD[:, k])
        assert not counters_of(given.x.device).any()


# Two parts of four blocks of inputs: of the router and the first products, or of the shared expert's second.
@pytest.mark.parametrize(("hidden", "shared_width"), [(1024, 128), (128, 1024)])
def test_products_in_parts_have_their_order(hidden: int, shared_width: int) -> None:
    given = case(4, hidden, 128, 1, shared_width=shared_width)
    assert torch.equal(summed(moe_one_triton(*given, Held(), any_order=False)), summed(in_parts(given)))


@pytest.mark.parametrize("fp4", [True, False])
def test_sum_agrees_with_the_reference(fp4: bool) -> None:
    given = case(5, 256, 128, 2, fp4=fp4)
    parts, expected = moe_one_triton(*given, Held()), moe_one_ref(*given, held=Held())
    assert torch.equal(parts.chosen_TK, expected.chosen_TK)
    wanted = sum_experts_ref(expected)
    torch.testing.assert_close(summed(parts), wanted, rtol=0, atol=float(wanted.abs().max() / 32))  # the interpreter cuts


def test_experts_that_are_cut_return_parts_that_nobody_has_rounded() -> None:
    held, given = Held(partial=True, shared_partial=True), case(3, 128, 128, 2)
    parts, expected = moe_one_triton(*given, held, any_order=False), in_parts(given, held)
    assert parts.outputs_TKD.dtype == torch.float32 and parts.shared_TD is not None and expected.shared_TD is not None
    assert torch.equal(parts.outputs_TKD, expected.outputs_TKD) and torch.equal(parts.shared_TD, expected.shared_TD)


@pytest.mark.parametrize("hashed", [False, True])
def test_padding_has_no_experts(hashed: bool) -> None:
    given = case(4, 128, 128, 2, hashed=hashed, position=-1)
    parts = moe_one_triton(*given, Held())
    assert parts.shared_TD is not None and not counters_of(given.x.device).any()
    assert parts.chosen_TK.eq(4).all() and torch.equal(summed(parts), parts.shared_TD)


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_a_captured_graph_follows_new_routing() -> None:
    first = case(256, 512, 256, 6)
    torch.use_deterministic_algorithms(False)
    second = first._replace(x=-first.x)
    expected = [summed(moe_one_triton(*given, Held())) for given in (first, second)]
    x = first.x.clone()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        summed(moe_one_triton(*first._replace(x=x), Held()))  # a stream has its counters before anything is recorded on it
    with torch.cuda.graph(graph, stream=stream):
        got = summed(moe_one_triton(*first._replace(x=x), Held()))
    for given, wanted in zip((second, first), reversed(expected), strict=True):
        x.copy_(given.x)
        graph.replay()
        assert torch.equal(got, wanted)
