"""Programmatic dependent launch: a kernel comes to the multiprocessors while the last programs of the one before it still work.

    @triton.jit
    def some_kernel(...):
        wait_for_predecessor()       before it touches memory
        ...
        let_successor_in()           when little is left to do
        tl.store(...)
    some_kernel[grid](..., launch_pdl=dependent_launch(device))

What is gained is the time that a launch takes. Nothing else depends on it: a kernel's first instruction waits until everything that
the kernel before has written can be seen, and every kernel that is launched this way waits, whether or not it needs what the one
before has written, for those after it wait for it alone. Kernels without ``launch_pdl``, copies, and what libraries launch begin
when all before them have ended, as ever.

A successor's programs come only when each of its predecessor's has called ``let_successor_in`` or has ended, so every one of these
has a place by then. Kernels whose programs wait for each other are safe for that: no place they need is ever taken by one who waits
for them. But places they hold are counted: programs that come early are spread over the multiprocessors unevenly, which costs more
than the launch where they are few and long. So a kernel with much to do lets them in late.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from dsv4lite.kernels.dispatch import capability_of, on_gpu


def dependent_launch(device: torch.device) -> bool:
    """Return whether kernels on ``device`` are launched this way: from compute capability 9.0 on."""
    return on_gpu(device) and capability_of(device) >= 90


def wait_for_predecessor(_semantic: Any = None) -> None:
    """Inside a kernel: wait until all that the kernels before have written can be seen. Nothing without ``launch_pdl``."""
    if _dependent(_semantic):
        tl.extra.cuda.gdc_wait(_semantic=_semantic)


def let_successor_in(_semantic: Any = None) -> None:
    """Inside a kernel: let programs of the next kernel come once all programs are as far. Nothing without ``launch_pdl``."""
    if _dependent(_semantic):
        tl.extra.cuda.gdc_launch_dependents(_semantic=_semantic)


def _dependent(semantic: Any) -> bool:
    """Return whether what is compiled has ``launch_pdl``; the interpreter, which has no compiler to show, never has."""
    return semantic is not None and bool(semantic.builder.options.launch_pdl)


for _function in (wait_for_predecessor, let_successor_in):
    _function.__triton_builtin__ = True  # type: ignore[attr-defined]  # the compiler calls them, with what it has at hand
