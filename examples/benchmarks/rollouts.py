"""Measure what a rollout loop waits for on one GPU: sleep, wake-up, and new weights, of random weights in V4's shapes.

    python -m examples.benchmarks.rollouts --layers 8

Takes the settings of ``examples.benchmarks.engine``. New weights are bfloat16 tensors of the device, as a trainer has them, which
the engine quantizes; the time to make the tensors is in the figures.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from dsv4lite import LLM
from dsv4lite.device import choose_device
from dsv4lite.models.deepseek_v4.tensors import V4_TENSORS
from dsv4lite.weights.source import ModelSource
from dsv4lite.weights.update import NamedTensors
from examples.benchmarks.engine import arguments, configured, params

Report = list[tuple[str, float]]
"""What was measured, and seconds."""


def new_weights(source: ModelSource, *, drafter: bool, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield a bfloat16 tensor for every one of the model; all lie in one buffer. Of hash tables every row is the first experts."""
    specs = {n: s for n, s in V4_TENSORS.specs(source.model).items() if drafter or not n.startswith("mtp.")}
    buffer = torch.randn(max(math.prod(spec.shape) for spec in specs.values()), device=device).bfloat16().mul_(0.02)
    for name, spec in specs.items():
        values = buffer[: math.prod(spec.shape)].view(spec.shape)
        yield name, torch.arange(spec.shape[1]).expand(spec.shape) if name.endswith("tid2eid") else values


@contextmanager
def timed(report: Report, name: str) -> Iterator[None]:
    """Add the seconds of the block to a report, and the memory that the device has then; print both."""
    on_gpu = torch.cuda.is_available()
    before = torch.cuda.memory_reserved() if on_gpu else 0
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    yield
    line = ""
    if on_gpu:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        extra = torch.cuda.max_memory_reserved() - before
        line = f"   in use {(total - free) / 2**20:>9,.0f} MiB   extra {max(extra, 0) / 2**20:>8,.0f} MiB"
    report.append((name, time.perf_counter() - begun))
    print(f"{name:<28}{report[-1][1]:>9.3f} s{line}", flush=True)


def measure(llm: LLM, weights: Callable[[], Iterator[tuple[str, Tensor]]]) -> Report:
    """Measure an engine; every phase ends with a request, so that what is missing would show."""
    report: Report = []
    prompt = list(range(3, 130))
    llm.generate(prompt, params(8))
    for version, staged in enumerate((True, False), 1):
        with timed(report, f"update, {'staged' if staged else 'in place'}"), llm.update_weights(version, staged=staged) as update:
            update.load(NamedTensors(weights()), deadline=600)
        with timed(report, "first request after it"):
            llm.generate(prompt, params(8))
    for level in (1, 1, 2):
        with timed(report, f"sleep({level})"):
            llm.sleep(level)
        with timed(report, "wake_up()"):
            llm.wake_up()
        if level == 2:
            with timed(report, "update after it"), llm.update_weights(3, staged=False) as update:
                update.load(NamedTensors(weights()), deadline=600)
        for name in ("first request after it", "second request"):
            with timed(report, name):
                llm.generate(prompt, params(8))
    return report


def main(argv: Sequence[str]) -> Report:
    """Measure and print."""
    config = configured(arguments([*argv, "--batch", "8"]))
    source, device = ModelSource.open(config), choose_device(config)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        print(f"{torch.cuda.get_device_name()}: a process with its CUDA context uses {(total - free) / 2**20:,.0f} MiB")
    with LLM(config) as llm:
        print(llm.memory())
        report = measure(llm, lambda: new_weights(source, drafter=False, device=device))
    print(json.dumps(report))
    return report


if __name__ == "__main__":
    main(sys.argv[1:])
