"""Every kernel compiles to some work for every GPU it is launched on, within that chip's shared memory, on a machine without one.

A module of kernels lists its launches in ``variants()``, the least demanding first. Some of each kernel's are compiled, the last
among them: more for the chip at hand, both ends for the oldest, which lacks instructions. Processes share the work; an unchanged
kernel comes from Triton's cache.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pkgutil
import re
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass

import pytest

import dsv4lite.kernels

triton = pytest.importorskip("triton")

# Bytes of shared memory that one program may use.
SHARED_MEMORY = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
MOST = {80: 2, 89: 1, 90: 4, 100: 1, 120: 1}  # variants of one kernel
WRITES = re.compile(r"^\s*(?:@!?%p\d+\s+)?(?:st|red|atom)\.(?:\w+\.)*global\b", re.MULTILINE)  # PTX, with or without a predicate
# The wait for the kernel before, and whatever touches global memory.
TOUCHES = re.compile(
    r"griddepcontrol\.wait|^\s*(?:@!?%p\d+\s+)?(?:ld|st|red|atom|cp|prefetch)\.(?:[\w:]+\.)*global\b", re.MULTILINE
)
# Layouts in which a thread's four codes are of one row, as assembly wants them that takes one row's scales (``widen_triton``). The
# compiler is free to choose others: keys that the matrix unit took from registers were once of two rows.
FOUR_OF_A_ROW = re.compile(r"register = \[\[0, 1\], \[0, 2\]|sizePerThread = \[1, (?:4|8|16|32)\]")


@dataclass(frozen=True, slots=True)
class Case:
    """One variant of a module, for one chip."""

    module: str
    index: int
    capability: int


def modules() -> list[str]:
    """Names of the modules that hold Triton kernels."""
    return [info.name for info in pkgutil.iter_modules(dsv4lite.kernels.__path__) if info.name.endswith("_triton")]


def cases() -> Iterator[object]:
    for module in modules():
        found: dict[tuple[str, int], list[Case]] = {}
        for i, variant in enumerate(importlib.import_module(f"dsv4lite.kernels.{module}").variants()):
            for capability in variant.capabilities:
                found.setdefault((variant.kernel.__name__, capability), []).append(Case(module, i, capability))
        for (kernel, capability), every in found.items():
            for case in spread(every, MOST[capability]):
                yield pytest.param(case, id=f"{module}-{kernel}-{case.index}-sm{capability}")


def spread(every: list[Case], most: int) -> list[Case]:
    """Return the last and others at even distances, the first if there are two."""
    last, gaps = len(every) - 1, max(1, most - 1)
    return [every[at] for at in sorted({last - round(i * last / gaps) for i in range(most)})]


@dataclass(frozen=True, slots=True)
class Compiled:
    """What came of it.

    Attributes:
        shared: Bytes of shared memory of one program.
        stores: Instructions in PTX that write to global memory.
        waits: How often it waits for the kernel before.
        late: Whether something else touches global memory before that.
        mixed: Layouts in which codes of several rows would be given one row's scales.
    """

    shared: int
    stores: int
    waits: int
    late: bool
    mixed: tuple[str, ...]


def compile_case(case: Case) -> Compiled:
    """Compile a variant."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    variant = importlib.import_module(f"dsv4lite.kernels.{case.module}").variants()[case.index]
    signature = {**variant.signature, **dict.fromkeys(variant.constants, "constexpr")}
    # Memory from PyTorch is aligned, and launches say so.
    pointers = [i for i, name in enumerate(variant.kernel.arg_names) if signature[name].startswith("*")]
    aligned = {(i,): [["tt.divisibility", 16]] for i in pointers}
    source = ASTSource(fn=variant.kernel, signature=signature, constexprs=dict(variant.constants), attrs=aligned)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, "enable_fp_fusion": True}
    options["launch_pdl"] = case.capability >= 90  # as ``dependent_launch`` says
    if variant.max_registers is not None:
        options["maxnreg"] = variant.max_registers
    kernel = triton.compile(source, target=GPUTarget("cuda", case.capability, 32), options=options)
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", kernel.asm["ttgir"], re.MULTILINE))
    registers = re.escape(importlib.import_module("dsv4lite.kernels.widen_triton")._WIDEN_REGISTERS.value)
    assembly = rf'inline_asm "[^"]*" {{constraints = "{registers}", packed_element = 4 .*-> tensor<[^,]*, (#\w+)>'
    used = {layouts[name] for name in re.findall(assembly, kernel.asm["ttgir"])}
    mixed = tuple(layout for layout in used if not FOUR_OF_A_ROW.search(layout))
    ptx = kernel.asm["ptx"]
    waits, first = ptx.count("griddepcontrol.wait"), TOUCHES.search(ptx)
    late = waits > 0 and first is not None and first.group() != "griddepcontrol.wait"
    return Compiled(kernel.metadata.shared, len(WRITES.findall(ptx)), waits, late, mixed)


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> Iterator[dict[Case, Future[Compiled]]]:
    """What the chosen tests want to know, under way."""
    wanted = [item.callspec.params["case"] for item in request.session.items if item.path == request.path]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            yield {case: pool.submit(compile_case, case) for case in wanted}
        finally:
            pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("case", list(cases()))
def test_kernel_compiles(case: Case, compiled: dict[Case, Future[Compiled]]) -> None:
    """One that writes nothing was optimised away: wide tiles on sm_100 once were, without a word."""
    kernel = compiled[case].result()
    assert kernel.shared <= SHARED_MEMORY[case.capability]
    assert kernel.stores > 0
    assert kernel.waits <= (case.capability >= 90) and not kernel.late
    assert kernel.mixed == ()
