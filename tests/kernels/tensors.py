"""How kernels are tested: on a GPU, or on the CPU, where Triton's interpreter runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import ParamSpec, TypeVar

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.dispatch import Op

P = ParamSpec("P")
R = TypeVar("R")
CPU = torch.device("cpu")
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")


def kernel_test(test: Callable[P, None]) -> Callable[P, None]:
    """Mark a test of kernels; memory that they do not initialise holds NaN or the largest integers."""
    return pytest.mark.kernel(pytest.mark.usefixtures("poison")(test))


def launch(op: Op[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run the kernel of an op."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dsv4lite.kernels.dispatch.use_triton", lambda *_: True)
        assert op.launches(*args, **kwargs)
        return op(*args, **kwargs)


def random(*shape: int, seed: int = 0, scale: float = 1.0, device: torch.device = DEVICE) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(device)


cpu_random = partial(random, device=CPU)


def fp8_weights(*shape: int, per_row: bool = False, seed: int = 1, device: torch.device = DEVICE) -> tuple[Tensor, Tensor]:
    """Return codes [..., N, K] and scale bytes, of blocks of 128 x 128 of their rows or of each row, that differ between blocks."""
    rows = torch.Size(shape[:-1]).numel()
    generator = torch.Generator().manual_seed(seed)
    count = (rows if per_row else -(-rows // 128), -(-shape[-1] // 128))
    scales = torch.randint(117, 124, count, generator=generator, dtype=torch.uint8)
    return random(*shape, seed=seed, device=device).to(torch.float8_e4m3fn), scales.to(device)


def assert_independent(run: Callable[[slice], Iterable[Tensor]], counts: Iterable[int] = (1, 2, 5, 23)) -> None:
    """Check that each of 100 rows has the same bits beside any number of others; ``run`` returns what comes of some of them."""
    everything = list(run(slice(0, 100)))
    for first in range(0, 100, 7):
        for count in counts:
            part = slice(first, first + count)
            for some, every in zip(run(part), everything, strict=True):
                assert torch.equal(some, every[part])
