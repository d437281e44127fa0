"""Random tensors where kernels are tested: on a GPU, or on the CPU, where Triton's interpreter runs them."""

from __future__ import annotations

import torch
from torch import Tensor

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")


def random(*shape: int, seed: int = 0, scale: float = 1.0, device: torch.device = DEVICE) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(device)


def fp8_weights(*shape: int, per_row: bool = False, seed: int = 1, device: torch.device = DEVICE) -> tuple[Tensor, Tensor]:
    """Return codes [..., N, K] and scale bytes, of blocks of 128 x 128 of their rows or of each row, that differ between blocks."""
    rows = torch.Size(shape[:-1]).numel()
    generator = torch.Generator().manual_seed(seed)
    count = (rows if per_row else -(-rows // 128), -(-shape[-1] // 128))
    scales = torch.randint(117, 124, count, generator=generator, dtype=torch.uint8)
    return random(*shape, seed=seed, device=device).to(torch.float8_e4m3fn), scales.to(device)
