"""The heads' norms against the model's own composition of them."""

from __future__ import annotations

import pytest
import torch

from dsv4lite.kernels.norm import rms_norm_heads
from dsv4lite.kernels.qk_norm_rope import HeadInputs, head_norms
from dsv4lite.kernels.quantize import hadamard
from dsv4lite.kernels.rope import rope, rope_angles, rope_frequencies
from dsv4lite.kernels.rows import Fp4Key
from tests.kernels.paged import simulate


@pytest.mark.parametrize("index_heads", [0, 4])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_heads_are_those_of_the_model(tokens: int, index_heads: int) -> None:
    query = torch.randn(tokens, 3 * 128 + index_heads * 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    angles = rope_angles(torch.arange(7, 7 + tokens), rope_frequencies(64, 10000.0))
    q, iq = head_norms(HeadInputs(query, 3, 128, index_heads, 128, *angles, 1e-6, fp4=True))
    assert torch.equal(q, rope(rms_norm_heads(query[:, : 3 * 128].view(tokens, 3, 128), 1e-6), *angles))
    if index_heads == 0:
        assert iq is None
        return
    plain = query[:, 3 * 128 :].view(tokens, index_heads, 128)
    assert iq is not None and torch.equal(iq, simulate(Fp4Key(128), hadamard(rope(plain, *angles))))
