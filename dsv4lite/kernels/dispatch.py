"""When an op runs its Triton kernel, and what every kernel says about itself so that it can be compiled without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


def use_triton(x: Tensor) -> bool:
    """Return whether an op on ``x`` runs its kernel: on CUDA, unless gradients are wanted."""
    return x.device.type == "cuda" and not x.requires_grad


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way in which a kernel is launched, enough to compile it ahead of time.

    Attributes:
        kernel: The ``@triton.jit`` function.
        signature: Type of each argument that is not a constant, as Triton spells them: ``*bf16``, ``*fp8e4nv``, ``i32`` …
        constants: The ``tl.constexpr`` arguments.
        num_warps, num_stages: Launch options.
        max_registers: Per thread, where the launch limits them.
        capabilities: Compute capabilities this variant is launched on.
    """

    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int | None = None
    capabilities: tuple[int, ...] = (80, 89, 90, 100, 120)
