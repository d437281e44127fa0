"""The kernels of experts of plain numbers against their reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.experts.unquantized import wide_experts_forward_ref

triton = pytest.importorskip("triton")

from dsv4lite.kernels.experts import unquantized_triton as wide_experts_triton  # noqa: E402
from dsv4lite.kernels.experts.unquantized_triton import (  # noqa: E402
    BLOCKS,
    Block,
    block_for,
    most_blocks,
    wide_experts_forward_triton,
)

pytestmark = pytest.mark.kernel

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
SIZES = [(0, 4, 2, 32, 64), (1, 5, 2, 48, 20), (7, 4, 2, 80, 72)]
SIZES += [(64, 256, 6, 4096, 2048), (1, 256, 6, 4096, 2048), (3000, 32, 6, 1024, 512)] if CUDA else []
DTYPES = [torch.float32, torch.bfloat16]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)


def case(tokens: int, experts: int, top_k: int, hidden: int, width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Inputs, routes (some to no expert), weights of the routes, both stacks, the shared result."""
    w13 = (random(experts, 2 * width, hidden, seed=1) * hidden**-0.5).to(dtype)
    w2 = (random(experts, hidden, width, seed=2) * width**-0.5).to(dtype)
    chosen = random(tokens, experts + 1, seed=3).topk(top_k).indices.sort(-1).values if tokens else random(0, top_k).long()
    x, shared = random(tokens, hidden, seed=4).to(dtype), random(tokens, hidden, seed=6).to(dtype)
    return x, chosen, random(tokens, top_k, seed=5).abs(), w13, w2, shared


def run(given: tuple[Tensor, ...], *, reference: bool = False) -> Tensor:
    op = wide_experts_forward_ref if reference else wide_experts_forward_triton
    return op(*given[:5], 0.9, given[5])


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("tokens", "experts", "top_k", "hidden", "width"), SIZES)
def test_kernels_agree(tokens: int, experts: int, top_k: int, hidden: int, width: int, dtype: torch.dtype) -> None:
    given = case(tokens, experts, top_k, hidden, width, dtype)
    got, wanted = run(given), run(given, reference=True)
    assert got.shape == wanted.shape and got.dtype == wanted.dtype == dtype
    if tokens:
        bound = 2**-14 if dtype == torch.float32 else 2**-6
        assert (got.float() - wanted.float()).abs().max() <= bound * wanted.float().abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("block", [block for _, block in BLOCKS], ids=lambda block: f"{block.rows}")
def test_every_block_and_number_of_tokens_gives_the_same_bits(
    block: Block, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = case(40 if CUDA else 5, 3, 2, 80, 72, dtype)
    wanted = run(given)
    monkeypatch.setattr(wide_experts_triton, "block_for", lambda pairs, experts: block)
    few = tuple(part if part.dim() == 3 else part[3:5].contiguous() for part in given)
    # The interpreter's products are a library's, which has an order of its own for every shape.
    bound = 0.0 if CUDA or dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(run(given), wanted, rtol=0, atol=bound)
    torch.testing.assert_close(run(few), wanted[3:5], rtol=0, atol=bound)


@pytest.mark.parametrize("tokens", [1, 20])
def test_padding_gets_the_shared_expert_alone(tokens: int) -> None:
    x, chosen, weights, *rest, shared = case(tokens, 4, 2, 32, 32, torch.bfloat16)
    given = (torch.full_like(x, float("nan")), torch.full_like(chosen, 4), weights, *rest, shared)
    assert torch.equal(run(given), shared)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_sum_without_a_shared_expert_is_not_rounded(dtype: torch.dtype) -> None:
    *given, shared = case(5, 4, 2, 32, 48, dtype)
    got = wide_experts_forward_triton(*given[:5], 0.9)
    assert got.dtype == torch.float32
    assert torch.equal((got + shared).to(dtype), run((*given, shared)))


def test_part_of_a_result_is_rounded_by_nobody() -> None:
    given = case(5, 4, 1, 32, 48, torch.bfloat16)[:5]
    exact, wanted = (op(*given, 0.9, partial=True) for op in (wide_experts_forward_triton, wide_experts_forward_ref))
    assert (exact - wanted).abs().max() <= 2**-6 * wanted.abs().max()
    assert not torch.equal(exact, exact.bfloat16().float())
    assert torch.equal(exact.bfloat16().float(), wide_experts_forward_triton(*given, 0.9))


def test_blocks_are_enough_for_any_routing() -> None:
    for pairs in (1, 6, 100, 4000):
        for experts in (1, 8, 256):
            rows = block_for(pairs, experts).rows
            spread = min(pairs, experts)  # each expert has one row too many
            worst = sum(-(-count // rows) for count in [*[1] * (spread - 1), pairs - spread + 1])
            assert worst <= most_blocks(pairs, experts, rows) <= pairs
