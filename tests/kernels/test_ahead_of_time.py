"""Every kernel compiles for every GPU it is launched on, within that chip's shared memory, on a machine without one.

A module of kernels lists its launches in ``variants()``.
"""

import importlib
import pkgutil
from collections.abc import Iterator

import pytest

import dsv4lite.kernels
from dsv4lite.kernels.dispatch import Variant

triton = pytest.importorskip("triton")

# Bytes of shared memory that one program may use.
SHARED_MEMORY = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


def modules() -> list[str]:
    """Names of the modules that hold Triton kernels."""
    return [info.name for info in pkgutil.iter_modules(dsv4lite.kernels.__path__) if info.name.endswith("_triton")]


def cases() -> Iterator[object]:
    for module in modules():
        variants = importlib.import_module(f"dsv4lite.kernels.{module}").variants()
        for i, variant in enumerate(variants):
            for capability in variant.capabilities:
                yield pytest.param(variant, capability, id=f"{module}-{variant.kernel.__name__}-{i}-sm{capability}")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("variant", "capability"), cases())
def test_kernel_compiles(variant: Variant, capability: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {**variant.signature, **dict.fromkeys(variant.constants, "constexpr")}
    source = ASTSource(fn=variant.kernel, signature=signature, constexprs=dict(variant.constants))
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert compiled.metadata.shared <= SHARED_MEMORY[capability]
