"""Rotary embedding against complex multiplication in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.rope import rope, rope_angles, rope_first, rope_frequencies
from tests.kernels.tensors import assert_independent
from tests.kernels.tensors import cpu_random as random

YARN = {"factor": 16.0, "original": 65536, "beta_fast": 32.0, "beta_slow": 1.0}


def turned(x: Tensor, positions: Tensor, freq: Tensor, sign: int) -> Tensor:
    """Multiply pairs, as complex numbers, by exp(i angle); the angle is the float32 product."""
    angle = (positions.float()[:, None] * freq).double() * sign
    if x.dim() == 3:
        angle = angle[:, None]
    width = 2 * len(freq)
    pairs = torch.view_as_complex(x[..., -width:].double().unflatten(-1, (-1, 2)).contiguous())
    return torch.cat(
        [x[..., :-width].double(), torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)], -1
    )


def test_frequencies_without_yarn_have_the_published_values() -> None:
    freq = rope_frequencies(64, 10000.0)
    for i, value in ((0, 1.0), (1, 0.7498942), (16, 1.0e-2), (31, 1.3335214e-4)):
        assert freq[i].item() == pytest.approx(value, rel=1e-6)


def test_frequencies_with_yarn_have_the_published_values() -> None:
    freq = rope_frequencies(64, 160000.0, **YARN)
    published = {
        0: 1.0,
        1: 0.68765604,
        14: 5.2868566e-3,
        15: 3.6355385e-3,
        16: 2.2656249e-3,
        20: 2.9697779e-4,
        24: 1.9531253e-5,
        25: 5.3723124e-6,
        31: 5.6805288e-7,
    }
    for i, value in published.items():
        assert freq[i].item() == pytest.approx(value, rel=2e-6)


@pytest.mark.parametrize("original", [4, 64, 1024, 65536])
@pytest.mark.parametrize("rope_dim", [2, 8, 64])
def test_yarn_blends_between_its_corrections(rope_dim: int, original: int) -> None:
    theta, factor = 160000.0, 16.0
    freq = rope_frequencies(rope_dim, theta, factor=factor, original=original)
    turns = [rope_dim * math.log(original / (2 * math.pi * beta)) / (2 * math.log(theta)) for beta in (32.0, 1.0)]
    low, high = max(math.floor(turns[0]), 0), min(math.ceil(turns[1]), rope_dim - 1)
    for i in range(rope_dim // 2):
        plain = theta ** (-2 * i / rope_dim)
        blend = min(max((i - low) / (high - low or 1e-3), 0.0), 1.0)
        assert freq[i].item() == pytest.approx(plain * (1 - blend) + plain / factor * blend, rel=1e-5)


@pytest.mark.parametrize("shape", [(0, 32), (1, 32), (63, 32), (257, 3, 24)])
@pytest.mark.parametrize("inverse", [False, True])
def test_rotation_equals_complex_multiplication(shape: tuple[int, ...], inverse: bool) -> None:
    x, freq = random(*shape), rope_frequencies(8, 10000.0)
    positions = torch.arange(shape[0]) * 37 % 1009
    got = rope(x, *rope_angles(positions, freq), inverse=inverse)
    torch.testing.assert_close(got.double(), turned(x, positions, freq, -1 if inverse else 1), rtol=0, atol=2e-6)
    assert torch.equal(got[..., :-8], x[..., :-8])


def test_inverse_undoes_the_rotation() -> None:
    x, angles = random(63, 4, 24), rope_angles(torch.arange(63) * 1000, rope_frequencies(8, 10000.0))
    torch.testing.assert_close(rope(rope(x, *angles), *angles, inverse=True), x, rtol=0, atol=1e-6)


def test_bfloat16_is_rotated_in_float32_and_rounded_once() -> None:
    x, freq = random(63, 4, 24).to(torch.bfloat16), rope_frequencies(8, 10000.0)
    angles = rope_angles(torch.arange(63), freq)
    assert torch.equal(rope(x, *angles), rope(x.float(), *angles).to(torch.bfloat16))


def test_angles_at_a_million_are_the_float32_product() -> None:
    freq = rope_frequencies(64, 160000.0, **YARN)
    positions = torch.tensor([1_000_003])
    cos, sin = rope_angles(positions, freq)
    angle = (torch.tensor(1_000_003.0) * freq).double()
    torch.testing.assert_close(cos[0].double(), angle.cos(), rtol=0, atol=1e-6)
    torch.testing.assert_close(sin[0].double(), angle.sin(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rope_dim", [2, 8, 64])
def test_rotating_a_token_does_not_depend_on_the_others(dtype: torch.dtype, rope_dim: int) -> None:
    x, freq, positions = random(100, 3, 72).to(dtype), rope_frequencies(rope_dim, 160000.0, **YARN), torch.arange(5, 105)
    assert_independent(lambda part: [rope(x[part], *rope_angles(positions[part], freq))])


@pytest.mark.parametrize("heads", [0, 3])
def test_first_channels_turn_in_neighbours_or_in_halves(heads: int) -> None:
    """The same turn as that of the last channels, once channels are in its order."""
    positions, freq = torch.tensor([0, 1, 5, 163839]), rope_frequencies(8, 10000.0)
    x = random(4, *([heads] if heads else []), 20)
    angles = rope_angles(positions, freq)
    for interleaved in (True, False):
        pairs = torch.arange(8) if interleaved else torch.arange(8).view(2, 4).t().flatten()
        order = torch.cat([torch.arange(8, 20), pairs])
        got = rope_first(x, *angles, interleaved=interleaved)
        assert torch.equal(got[..., order], rope(x[..., order], *angles))
