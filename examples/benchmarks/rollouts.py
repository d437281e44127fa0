"""Measure the waiting times of a rollout loop on one GPU: sleep, wake-up and weight updates, with random weights in V4's shapes.

    python -m examples.benchmarks.rollouts --layers 8
    python -m examples.benchmarks.rollouts --layers 4 --phases in-flight process engines scores

Takes the settings of ``examples.benchmarks.engine`` and the phases to run. New weights are bfloat16 tensors on the device, as a
trainer has them. The engine quantizes them; the figures include the time to make the tensors.

- ``floors``: one copy of all weights between the device and the host.
- ``updates``: staged, and in place.
- ``sleep``: levels 1 and 2, and wake-up.
- ``in-flight``: a staged update while requests decode: how long their streams pause, and that no request is lost.
- ``process``: an update from tensors of another process.
- ``engines``: two engines that sleep in turn.
- ``scores``: log-probabilities of whole sequences, beside prefill of the same tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from dsv4lite import LLM, EngineConfig, IPCSource, SamplingParams, SharedWeights
from dsv4lite.device import choose_device
from dsv4lite.models.deepseek_v4.tensors import V4_TENSORS
from dsv4lite.weights.source import ModelSource
from dsv4lite.weights.update import NamedTensors
from examples.benchmarks.engine import arguments, configured, params

Report = list[tuple[str, float]]
"""What was measured, and seconds, unless the name gives another unit."""
TURNS = 20  # of two engines


def new_weights(config: EngineConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield a bfloat16 tensor for each tensor of the model, all in one buffer. Rows of hash tables name the first experts."""
    device = choose_device(config)
    specs = {n: s for n, s in V4_TENSORS.specs(ModelSource.open(config).model).items() if not n.startswith("mtp.")}
    buffer = torch.empty(max(math.prod(spec.shape) for spec in specs.values()), device=device, dtype=torch.bfloat16).normal_(
        0, 0.02
    )
    for name, spec in specs.items():
        values = buffer[: math.prod(spec.shape)].view(spec.shape)
        yield name, torch.arange(spec.shape[1]).expand(spec.shape) if name.endswith("tid2eid") else values


@contextmanager
def timed(report: Report, name: str) -> Iterator[None]:
    """Add the seconds of the block to a report; print them, the device memory in use at its end, and the most that it allocated."""
    on_gpu = torch.cuda.is_available()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    yield
    line = ""
    if on_gpu:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        extra = torch.cuda.max_memory_allocated() - before
        line = f"   in use {(total - free) / 2**20:>9,.0f} MiB   extra {max(extra, 0) / 2**20:>8,.0f} MiB"
    report.append((name, time.perf_counter() - begun))
    print(f"{name:<28}{report[-1][1]:>9.3f} s{line}", flush=True)


def updates(config: EngineConfig, llm: LLM, report: Report) -> None:
    """Measure updates, each followed by a request that would show missing weights."""
    prompt = list(range(3, 130))
    for version, staged in enumerate((True, False), 1):
        with timed(report, f"update, {'staged' if staged else 'in place'}"), llm.update_weights(version, staged=staged) as update:
            update.load(NamedTensors(new_weights(config)), deadline=600)
        with timed(report, "first request after it"):
            llm.generate(prompt, params(8))


def sleep(config: EngineConfig, llm: LLM, report: Report) -> None:
    """Measure both levels of sleep."""
    prompt = list(range(3, 130))
    for level in (1, 1, 2):
        with timed(report, f"sleep({level})"):
            llm.sleep(level)
        with timed(report, "wake_up()"):
            llm.wake_up()
        if level == 2:
            with timed(report, "update after it"), llm.update_weights(llm.weight_version + 1, staged=False) as update:
                update.load(NamedTensors(new_weights(config)), deadline=600)
        for name in ("first request after it", "second request"):
            with timed(report, name):
                llm.generate(prompt, params(8))


def in_flight(config: EngineConfig, llm: LLM, report: Report) -> None:
    """Measure how long streams pause while a staged update is written, and require that all tokens arrive."""
    count, tokens, version = llm.config.max_num_seqs, 4000 if choose_device(config).type == "cuda" else 60, llm.weight_version + 1
    outputs, times = [], []

    def others() -> None:
        outputs.extend(llm.generate_batch([[3 + i] * 40 for i in range(count - 1)], params(tokens)))

    def watched() -> None:
        with llm.stream([3] * 40, params(tokens)) as stream:
            for delta in stream:
                times.extend([time.perf_counter()] * len(delta.token_ids))
            outputs.append(stream.final())

    threads = [threading.Thread(target=work) for work in (others, watched)]
    for thread in threads:
        thread.start()
    while len(times) < tokens // 8:
        time.sleep(0.001)
    begun = time.perf_counter()
    with llm.update_weights(version, mode="keep") as update:
        update.load(NamedTensors(new_weights(config)), deadline=600)
        loaded = time.perf_counter()
    ended = time.perf_counter()
    for thread in threads:
        thread.join()
    gaps = {
        "before it": [b - a for a, b in pairwise(times) if b < begun],
        "while it loads": [b - a for a, b in pairwise(times) if begun < b < loaded],
        "while it is written": [b - a for a, b in pairwise(times) if loaded < b < ended + 1],
    }
    for name, found in gaps.items():
        if found:
            report.append((f"gap {name}, median", statistics.median(found)))
            report.append((f"gap {name}, longest", max(found)))
            print(f"gap between tokens {name}: median {statistics.median(found) * 1e3:.2f} ms, longest {max(found) * 1e3:.1f} ms")
    report.append(("update in flight", ended - begun))
    both = 0
    for output in outputs:
        spans = output.outputs[0].weight_versions
        assert len(output.outputs[0].token_ids) == tokens, output
        assert [spans[0][1], *(span[2] for span in spans)] == [0, *(span[1] for span in spans[1:]), tokens], spans
        both += len(spans) == 2
    print(f"{count} requests of {tokens} tokens, none lost; {both} have tokens of both versions; update {ended - begun:.2f} s")
    assert len(outputs) == count


def _share(config: EngineConfig, connection: Connection) -> None:
    """Share new weights with the process at the other end, until it answers."""
    with SharedWeights(new_weights(config)) as shared:
        connection.send(shared.handles)
        connection.recv()


def process(config: EngineConfig, llm: LLM, report: Report) -> None:
    """Measure updates from tensors of another process, which share one buffer."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    trainer = context.Process(target=_share, args=(config, theirs))
    trainer.start()
    theirs.close()  # so that ``recv`` raises EOFError if the process fails
    handles = ours.recv()
    print(f"{len(handles)} tensors of another process, {sum(handle.nbytes for handle in handles) / 2**30:.1f} GiB")
    for staged in (True, False):
        version = llm.weight_version + 1
        name = f"update from a process, {'staged' if staged else 'in place'}"
        with timed(report, name), llm.update_weights(version, staged=staged) as update:
            update.load(IPCSource(handles), deadline=600)
    ours.send(None)
    trainer.join()


def engines(config: EngineConfig, llm: LLM, report: Report) -> None:
    """Let another engine and this one sleep in turn, and print the memory of the process, which must not grow."""
    on_gpu, used = choose_device(config).type == "cuda", []
    llm.sleep(1)
    with LLM(config) as other:
        for turn in range(TURNS):
            awake, asleep = (other, llm) if turn % 2 == 0 else (llm, other)
            if turn:
                asleep.sleep(1)
                awake.wake_up()
            awake.generate(list(range(3, 130)), params(8))
            if on_gpu:
                torch.cuda.synchronize()
                free, total = torch.cuda.mem_get_info()
                used.append((total - free) / 2**20)
        if used:
            print(f"MiB in use, turn by turn: {', '.join(f'{value:,.0f}' for value in used)}")
            report.extend((f"MiB in use, turn {turn}", value) for turn, value in enumerate(used))
        other.sleep(1)
    llm.wake_up()


def scores(config: EngineConfig, llm: LLM, report: Report) -> None:
    """Measure scores of 64 sequences of 1024 tokens beside their prefill, in turn."""
    count, length = (64, 1024) if choose_device(config).type == "cuda" else (2, 128)
    rng = random.Random(0)
    ids = [[rng.randrange(3, 4000) for _ in range(length)] for _ in range(count)]
    pairs = [(row[: length // 4], row[length // 4 :]) for row in ids]
    rollout = SamplingParams(temperature=0.8, top_p=0.9, top_k=50)
    llm.score_batch(pairs[:2])
    calls: dict[str, Callable[[], object]] = {
        "prefill": lambda: llm.generate_batch(ids, params(1)),
        "scores, raw": lambda: llm.score_batch(pairs),
        "scores, processed": lambda: llm.score_batch(pairs, replace(rollout, logprobs_mode="processed")),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(3):
        for name, call in calls.items():
            begun = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - begun)
    least = {name: statistics.median(found) for name, found in seconds.items()}
    for name, found in least.items():
        report.append((f"{name}, {count} x {length}", found))
        print(f"{name:<20}{count * length / found:>10,.0f} tokens/s   {least['prefill'] / found:.2f} of prefill")


def floors(config: EngineConfig, llm: LLM, report: Report) -> None:
    """Measure how long one copy of all weights takes, between the device and locked host memory."""
    if (device := choose_device(config)).type != "cuda":
        return
    size = llm.memory().per_device[0].weights
    ours, theirs = torch.empty(1 << 30, dtype=torch.uint8, device=device), torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    for name, target, source in (("to the device", ours, theirs), ("to the host", theirs, ours)):
        seconds = []
        for _ in range(6):
            begun = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun)
        took = statistics.median(seconds) * size / 2**30
        report.append((f"one copy {name}", took))
        print(f"{'one copy ' + name:<28}{took:>9.3f} s   {size / 2**30:.1f} GiB at {size / took / 1e9:.1f} GB/s")


PHASES = {
    "floors": floors,
    "updates": updates,
    "sleep": sleep,
    "in-flight": in_flight,
    "process": process,
    "engines": engines,
    "scores": scores,
}


def main(argv: Sequence[str]) -> Report:
    """Measure and print."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--phases", nargs="+", choices=tuple(PHASES), default=list(PHASES))
    own, rest = parser.parse_known_args(argv)
    args = arguments(rest)
    config, report = configured(args), Report()
    if choose_device(config).type == "cuda":
        free, total = torch.cuda.mem_get_info()
        print(f"{torch.cuda.get_device_name()}: a process with its CUDA context uses {(total - free) / 2**20:,.0f} MiB")
    with LLM(config) as llm:
        print(llm.memory())
        llm.generate(list(range(3, 130)), params(8))
        for name in own.phases:
            print(f"-- {name}", flush=True)
            PHASES[name](config, llm, report)
    print(json.dumps(report))
    return report


if __name__ == "__main__":
    main(sys.argv[1:])
