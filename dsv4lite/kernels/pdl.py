"""Programmatic dependent launch (PDL): a kernel's programs start while the last programs of the previous kernel still run.

    @triton.jit
    def some_kernel(...):
        wait_for_predecessor()       before any access to memory
        ...
        let_successor_in()           when little work is left
        tl.store(...)
    some_kernel[grid](..., launch_pdl=dependent_launch(device))

PDL hides the launch latency and changes no result: ``wait_for_predecessor`` returns once all writes of the previous kernel are
visible. A kernel must call it even if it reads nothing that the previous kernel wrote: the next kernel waits only for this one and
relies on it to have waited for all earlier ones. Kernels without ``launch_pdl``, copies, and kernels of libraries start after all
earlier work of the stream has ended, as usual.

Programs of the next kernel start once every program of this one has called ``let_successor_in`` or has ended. By then all programs
of this kernel are resident. Kernels whose programs wait for each other are therefore safe: the next kernel cannot occupy a place
that they need. Programs that start early are spread unevenly over the multiprocessors. If they are few and long, this costs more
than the launch latency; a kernel with much work left therefore calls ``let_successor_in`` late.

Kernels that share nothing run at the same time if each, except the first, calls ``wait_for_predecessor`` at its end instead of at
its beginning. The first one waits at its beginning and then calls ``let_successor_in`` at once, so all others see what was written
before it. Nothing else may be launched between these kernels, and none may write to memory that another reads or writes, scratch
memory included.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from dsv4lite.kernels.dispatch import capability_of, on_gpu


def dependent_launch(device: torch.device) -> bool:
    """Return whether kernels on ``device`` are launched with PDL: from compute capability 9.0 on."""
    return on_gpu(device) and capability_of(device) >= 90


def wait_for_predecessor(_semantic: Any = None) -> None:
    """Inside a kernel: wait until all writes of the previous kernels are visible. Does nothing without ``launch_pdl``."""
    if _dependent(_semantic):
        tl.extra.cuda.gdc_wait(_semantic=_semantic)


def let_successor_in(_semantic: Any = None) -> None:
    """Inside a kernel: let the next kernel start once all programs have called this. Does nothing without ``launch_pdl``."""
    if _dependent(_semantic):
        tl.extra.cuda.gdc_launch_dependents(_semantic=_semantic)


def _dependent(semantic: Any) -> bool:
    """Return whether the kernel is compiled with ``launch_pdl``; false in the interpreter, which passes no compiler state."""
    return semantic is not None and bool(semantic.builder.options.launch_pdl)


for _function in (wait_for_predecessor, let_successor_in):
    _function.__triton_builtin__ = True  # type: ignore[attr-defined]  # Triton's compiler calls them and passes ``_semantic``
