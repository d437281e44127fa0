"""The official model and its outputs, made once for all tests of this folder."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dsv4lite.models.deepseek_v4.model import DeepseekV4
from tests.golden import OFFICIAL_OUTPUTS, official_checkpoint, official_model


@pytest.fixture(scope="session")
def official_weights() -> dict[str, Tensor]:
    return official_checkpoint()


@pytest.fixture(scope="session")
def official(official_weights: dict[str, Tensor]) -> DeepseekV4:
    return official_model(official_weights).requires_grad_(False)


@pytest.fixture(scope="session")
def official_deterministic(official_weights: dict[str, Tensor]) -> DeepseekV4:
    return official_model(official_weights, deterministic=True).requires_grad_(False)


@pytest.fixture(scope="session")
def outputs() -> dict[str, Tensor]:
    tensors = load_file(OFFICIAL_OUTPUTS)
    assert all(not t.is_floating_point() or torch.isfinite(t[t != float("-inf")]).all() for t in tensors.values())
    return tensors
