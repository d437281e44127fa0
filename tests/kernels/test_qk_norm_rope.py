"""The heads' norms against the model's own composition of them, and their kernel against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.norm import rms_norm_heads
from dsv4lite.kernels.qk_norm_rope import HeadInputs, head_norms
from dsv4lite.kernels.quantize import hadamard
from dsv4lite.kernels.rope import rope, rope_angles, rope_frequencies
from dsv4lite.kernels.rows import Fp4Key
from tests.kernels.paged import simulate
from tests.kernels.tensors import DEVICE, ON_GPU, cpu_random, launch, random


@pytest.mark.parametrize("index_heads", [0, 4])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_heads_are_those_of_the_model(tokens: int, index_heads: int) -> None:
    query = cpu_random(tokens, 3 * 128 + index_heads * 128).bfloat16()
    angles = rope_angles(torch.arange(7, 7 + tokens), rope_frequencies(64, 10000.0))
    q, iq, _ = head_norms(HeadInputs(query, 3, 128, index_heads, 128, *angles, 1e-6))
    assert torch.equal(q, rope(rms_norm_heads(query[:, : 3 * 128].view(tokens, 3, 128), 1e-6), *angles))
    if index_heads == 0:
        assert iq is None
        return
    plain = query[:, 3 * 128 :].view(tokens, index_heads, 128)
    assert iq is not None and torch.equal(iq, simulate(Fp4Key(128), hadamard(rope(plain, *angles))))


Sizes = tuple[int, int, int, int, int]  # heads, channels, index heads, their channels, rotated channels
PACKED: list[tuple[int, Sizes]] = [
    (1, (8, 128, 0, 128, 64)),
    (3, (3, 512, 16, 128, 64)),
    (2, (5, 192, 17, 64, 64)),
    (0, (2, 128, 2, 128, 64)),
]
UNQUANTIZED: list[tuple[int, Sizes]] = [(3, (5, 32, 12, 16, 8)), (2, (3, 96, 5, 66, 64))]
UNQUANTIZED += [(2, (2, 16, 0, 8, rope)) for rope in (4, 6)]
if ON_GPU:
    shapes = ((1, 64, 64), (16, 64, 64), (1024, 128, 64), (300, 64, 0))
    PACKED += [(tokens, (heads, 512, index_heads, 128, 64)) for tokens, heads, index_heads in shapes]
    UNQUANTIZED += [(300, (64, 512, 64, 128, 64))]
CASES = [(torch.bfloat16, True, *case) for case in PACKED]
CASES += [(dtype, False, *case) for case in UNQUANTIZED for dtype in (torch.float32, torch.bfloat16)]


def close(got: Tensor, wanted: Tensor, most: float) -> None:
    """Compare float32 to some units in the last place, bfloat16 to one, in at most this part of the heads."""
    assert got.shape == wanted.shape and got.dtype == wanted.dtype and got.is_contiguous()
    if got.dtype == torch.float32:
        torch.testing.assert_close(got, wanted, rtol=2e-6, atol=1e-6)
    elif got.numel():
        assert (got != wanted).any(-1).float().mean() <= most
        assert ((got.float() - wanted.float()).abs() <= 2**-6 * wanted.float().abs() + 1e-5).all()


@pytest.mark.kernel
@pytest.mark.parametrize(("dtype", "fp4", "tokens", "sizes"), CASES)
def test_head_norms_agree(dtype: torch.dtype, fp4: bool, tokens: int, sizes: Sizes) -> None:
    heads, channels, index_heads, index_dim, rope = sizes
    columns = heads * channels + index_heads * index_dim
    query = random(tokens, columns + 16, scale=3.0).to(dtype)[:, :columns]
    angles = rope_angles(torch.arange(900, 900 + tokens, device=DEVICE), rope_frequencies(rope, 10000.0).to(DEVICE))
    given = HeadInputs(query, heads, channels, index_heads, index_dim, *angles, 1e-6, fp4)
    got, index, _ = launch(head_norms, given)
    wanted, wanted_index, _ = head_norms.reference(given)
    close(got, wanted, 1e-3 if ON_GPU else 0.1 if fp4 else 0.2)  # heads whose mean lies between two numbers of bfloat16
    assert (index is None) == (wanted_index is None)
    if index is not None and wanted_index is not None:
        close(index, wanted_index, 0.0)
        assert not fp4 or torch.equal(index.view(torch.int16), wanted_index.view(torch.int16))


@pytest.mark.kernel
def test_head_norms_do_not_depend_on_other_tokens() -> None:
    query = random(9, 5 * 128 + 3 * 128).bfloat16()
    angles = rope_angles(torch.arange(9, device=DEVICE), rope_frequencies(64, 10000.0).to(DEVICE))
    everything = launch(head_norms, HeadInputs(query, 5, 128, 3, 128, *angles, 1e-6))
    alone = launch(head_norms, HeadInputs(query[4:5], 5, 128, 3, 128, *(part[4:5] for part in angles), 1e-6))
    for many, one in zip(everything[:2], alone[:2], strict=True):
        assert many is not None and one is not None and torch.equal(many[4:5], one)
