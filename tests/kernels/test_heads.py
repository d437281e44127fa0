"""The heads' norms against the model's own composition of them."""

from __future__ import annotations

import pytest
import torch

from dsv4lite.kernels.norm import rms_norm_heads
from dsv4lite.kernels.qk_norm_rope import head_norms, head_norms_ref
from dsv4lite.kernels.quantize import hadamard
from dsv4lite.kernels.rope import rope, rope_angles, rope_frequencies
from dsv4lite.kernels.rows import Fp4Key


@pytest.mark.parametrize("index_heads", [0, 4])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_heads_are_those_of_the_model(tokens: int, index_heads: int) -> None:
    query = torch.randn(tokens, 3 * 128 + index_heads * 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    angles = rope_angles(torch.arange(7, 7 + tokens), rope_frequencies(64, 10000.0))
    q, iq, _ = head_norms(query, 3, 128, index_heads, 128, *angles, 1e-6)
    assert torch.equal(q, rope(rms_norm_heads(query[:, : 3 * 128].view(tokens, 3, 128), 1e-6), *angles))
    if index_heads == 0:
        assert iq is None
        return
    plain = query[:, 3 * 128 :].view(tokens, index_heads, 128)
    assert iq is not None and torch.equal(iq, Fp4Key(128).simulate(hadamard(rope(plain, *angles))))


def test_reference_is_what_a_cpu_runs() -> None:
    query = torch.randn(2, 256).bfloat16()
    angles = rope_angles(torch.arange(2), rope_frequencies(64, 10000.0))
    for got, wanted in zip(
        head_norms(query, 1, 128, 1, 128, *angles, 1e-6)[:2], head_norms_ref(query, 1, 128, 1, 128, *angles, 1e-6)
    ):
        assert got is not None and wanted is not None and torch.equal(got, wanted)
