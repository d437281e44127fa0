"""Measure the table of docs/performance.md: all rows or some of them, with the roofline of each, and vLLM beside them.

    python -m examples.benchmarks.table --layers 8 --json table.json --plot table.svg
    python -m examples.benchmarks.table --layers 43 --tp 2 --rows decode-64,decode-256,prefill --json table.json
    python -m examples.benchmarks.table --layers 8 --rows decode,prefill,requests --peer --json table.json
    python -m examples.benchmarks.table --model shipped --layers 2 --device cpu --batch 1 2 --context 8 --tokens 4 --runs 1 \\
        --prefill 2x16 --requests 4x2 --lengths 16x4

Rows, by name; ``--rows decode`` means all that begin with ``decode-``, ``--rows decode-64`` those of 64 sequences:

* ``decode-BxC``: a step of B sequences with prompts of C tokens: the time of ``--tokens`` tokens minus the time of one token, for
  the whole batch, divided by the steps in between, through the offline call.
* ``prefill-CxL``: C prompts of L tokens, one token each.
* ``requests``: 512 requests with prompts of 16 to 1024 and outputs of 16 to 512 tokens, 256 at once.
* ``start-cold`` and ``start-warm``: from nothing to a ready engine, with an empty folder of compiled kernels and then with a full
  one, each in a new process.
* ``speculation-D-BxC``: one token of each of B such sequences with the drafter D: ``none``, ``mtp1``, ``mtp2``, ``adaptive``.
  The MTP block drafts, and each draft is right with a probability of ``--acceptance`` (see ``accepting`` in ``speculation.py``). Of
  several ranks the first is in this process; drafts of other replicas are all right.

Figures are the median of ``--runs``. V4's layers are all routed by token id and tokens are sampled at temperature 1, so that all
engines read as many experts. Weights are random. The roofline of ``decode`` is the bytes of weights that a step must read at
4.3 TB/s, of ``prefill`` the products of the layers at 790 TFLOP/s (dense bfloat16 as measured on an H200) on each GPU, and of
``requests`` both, for steps that are always as full as the requests allow.

``--json`` keeps the rows that a file already has and replaces those that are measured again, so that a table can be measured in
parts. ``--peer`` also measures vLLM, after this package and in the same process, in all rows but ``start`` and ``speculation``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch

from dsv4lite import LLM, MTP, AsyncLLM, EngineConfig, SamplingParams
from dsv4lite.device import choose_device
from dsv4lite.planning.memory import choose_numerics
from dsv4lite.weights.source import ModelSource
from examples.benchmarks.engine import (
    BYTES_PER_SECOND,
    MODELS,
    add_engine_options,
    configured,
    device_name,
    engine_options,
    model_name,
    prompts_of,
    roofline_bytes,
    written,
)
from examples.benchmarks.speculation import START, accepting, rate

FLOPS_PER_SECOND = 790e12  # an H200's dense bfloat16 products, as measured
SHORTEST = 16  # of the requests' prompts and outputs
DRAFTERS = {"none": 0, "mtp1": 1, "mtp2": 2, "adaptive": 2}  # and how many tokens they draft


class Offline(Protocol):
    """An engine that is measured through its offline call."""

    name: str
    version: str

    def seconds(self, prompts: Sequence[list[int]], counts: Sequence[int]) -> float:
        """Return how long it takes to continue each prompt by so many tokens, sampled at temperature 1."""
        ...

    def close(self) -> None: ...


class Own:
    """An engine of this package; see ``Offline``."""

    name = "dsv4lite"

    def __init__(self, config: EngineConfig) -> None:
        self.version = version("dsv4lite")
        self._llm = LLM.create(config)

    def seconds(self, prompts: Sequence[list[int]], counts: Sequence[int]) -> float:
        params = [SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in counts]
        started = time.perf_counter()
        self._llm.generate_batch(prompts, params)
        return time.perf_counter() - started

    def close(self) -> None:
        self._llm.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The work that a row measures.

    Attributes:
        row: Name of the row.
        prompts, counts: Prompts, and how many tokens to generate after each.
        roofline_s: The least seconds.
        steps: The figure is the time of one of so many steps after the first token; 0: of the whole work.
        tokens: Tokens that the figure's seconds are for.
    """

    row: str
    prompts: Sequence[list[int]]
    counts: Sequence[int]
    roofline_s: float
    steps: int
    tokens: int

    def measure(self, engine: Offline) -> float:
        """Return the seconds of one run."""
        seconds = engine.seconds(self.prompts, self.counts)
        return (seconds - engine.seconds(self.prompts, [1] * len(self.prompts))) / self.steps if self.steps else seconds


class Rooflines:
    """The least seconds of steps and prompts, of all GPUs of a layout together."""

    def __init__(self, config: EngineConfig, most: int) -> None:
        source = ModelSource.open(config)
        model, layout = source.model, config.layout
        numerics = choose_numerics(config, source, choose_device(config))
        batches = range(1, most + 1)
        read = roofline_bytes(model, numerics, layout, batches, source.family)
        self.step_s = {batch: count / BYTES_PER_SECOND for batch, count in zip(batches, read, strict=True)}
        flop = 0.0
        for name, spec in source.family.tensors.specs(model).items():
            if name.startswith("layers.") and len(spec.shape) == 2 and spec.kind in ("dense", "expert", "bf16"):
                used = model.experts_per_token / model.num_experts if spec.kind == "expert" else 1.0
                flop += 2 * prod(spec.shape) * used
        self.prompt_token_s = flop / FLOPS_PER_SECOND / layout.world

    def requests(self, prompts: Sequence[list[int]], counts: Sequence[int], at_once: int) -> float:
        """Return the least seconds of requests that begin in order, whenever a place becomes free."""
        seconds, waiting = self.prompt_token_s * sum(map(len, prompts)), list(counts)
        running: list[int] = []
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(waiting.pop(0) - 1)  # the prompt gives the first token
            running = [left for left in running if left > 0]
            if running:
                seconds += self.step_s[len(running)]
            running = [left - 1 for left in running]
        return seconds


def workloads(args: argparse.Namespace) -> Iterator[Workload]:
    """Yield the rows that are measured through the offline call."""
    rng, (count, at_once) = random.Random(0), args.requests
    rooflines = Rooflines(configured(args), max(*args.batch, at_once))  # a step reads hardly any of the tables of more hash layers

    def prompts(lengths: Sequence[int]) -> list[list[int]]:
        return [[rng.randrange(3, 4000) for _ in range(length)] for length in lengths]

    for batch in args.batch:
        given, steps = prompts([args.context] * batch), args.tokens - 1
        least = rooflines.step_s[batch]
        yield Workload(
            row=f"decode-{batch}x{args.context}",
            prompts=given,
            counts=[args.tokens] * batch,
            roofline_s=least,
            steps=steps,
            tokens=batch,
        )
    for many, length in args.prefill:
        tokens = many * length
        given, least = prompts([length] * many), rooflines.prompt_token_s * tokens
        yield Workload(row=f"prefill-{many}x{length}", prompts=given, counts=[1] * many, roofline_s=least, steps=0, tokens=tokens)
    longest_prompt, longest_output = args.lengths
    given = prompts([rng.randint(min(SHORTEST, longest_prompt), longest_prompt) for _ in range(count)])
    counts = [rng.randint(min(SHORTEST, longest_output), longest_output) for _ in range(count)]
    least = rooflines.requests(given, counts, at_once)
    yield Workload(row="requests", prompts=given, counts=counts, roofline_s=least, steps=0, tokens=sum(counts))


class Table:
    """The rows so far; mutable. Prints and saves each new row.

    Args:
        args: Arguments of the command line.
        config: Settings with the model and the layout of the rows.
    """

    def __init__(self, args: argparse.Namespace, config: EngineConfig) -> None:
        self.file = None if args.json is None else Path(args.json)
        self.rows: list[dict[str, Any]] = []
        if self.file is not None and self.file.exists():
            self.rows = json.loads(self.file.read_text(encoding="utf-8"))
        self._of = {"device": device_name(args), "model": model_name(args), "layout": str(config.layout)}
        self._chosen = [] if args.rows is None else args.rows.split(",")
        print(", ".join(self._of.values()))
        print(f"{'row':<26}{'engine':<10}{'roofline':>11}{'time':>11}{'share':>7}{'tokens/s':>10}", flush=True)

    def wants(self, row: str) -> bool:
        """Return whether a row is to be measured."""
        return not self._chosen or any(row == name or row.startswith((f"{name}-", f"{name}x")) for name in self._chosen)

    @property
    def own(self) -> list[dict[str, Any]]:
        """The rows of this device, model and layout."""
        return [row for row in self.rows if all(row[key] == value for key, value in self._of.items())]

    def add(self, name: str, engine: str, release: str, seconds: Sequence[float], roofline_s: float | None, tokens: int) -> None:
        """Add a row; the same one measured before is replaced.

        Args:
            name, engine, release: Name of the row, the engine that was measured, and its version.
            seconds: Seconds of each run; the median counts.
            roofline_s: The least seconds, if they are known.
            tokens: Tokens that the seconds are for.
        """
        middle = statistics.median(seconds)
        row = {**self._of, "row": name, "engine": engine, "version": release, "torch": torch.__version__, "runs": list(seconds)}
        row |= {"seconds": middle, "roofline_s": roofline_s, "tokens": tokens}
        key = ("device", "model", "layout", "row", "engine")
        self.rows = [old for old in self.rows if any(old[k] != row[k] for k in key)] + [row]
        least, share = ("", "") if roofline_s is None else (f"{1e3 * roofline_s:,.2f} ms", f"{roofline_s / middle:.2f}")
        per_second = f"{tokens / middle:,.0f}" if tokens else ""
        print(f"{name:<26}{engine:<10}{least:>11}{1e3 * middle:>8,.2f} ms{share:>7}{per_second:>10}", flush=True)
        if self.file is not None:
            self.file.write_text(json.dumps(self.rows, indent=1), encoding="utf-8")


def measure(args: argparse.Namespace, config: EngineConfig, table: Table) -> None:
    """Measure the rows that use the offline call, in this package and in the peer."""
    chosen = [one for one in workloads(args) if table.wants(one.row)]
    if not chosen:
        return
    for make in (Own, *([_peer] if args.peer else [])):
        engine: Offline = make(config)
        try:
            for one in chosen:
                for _ in range(2):  # the second captures a step with prompts
                    engine.seconds(one.prompts[:1], [2])
                seconds = [one.measure(engine) for _ in range(args.runs)]
                table.add(one.row, engine.name, engine.version, seconds, one.roofline_s, one.tokens)
        finally:
            engine.close()


def _peer(config: EngineConfig) -> Offline:
    from examples.benchmarks.peer import Peer

    folder = config.model
    if config.hf_overrides:
        own = json.loads((Path(config.model) / "config.json").read_text(encoding="utf-8"))
        folder = written({**own, **config.hf_overrides})
    return Peer(folder, config)


def start(args: argparse.Namespace, table: Table) -> None:
    """Measure starts: with an empty folder of compiled kernels, and again with the kernels of the first start."""
    if not (table.wants("start-cold") or table.wants("start-warm")):
        return
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "examples.benchmarks.engine", *engine_options(args), "--prefill", "--tokens", "4"]
        command += ["--batch", str(max(args.batch)), "--context", "16"]
        command += ["--compile-cache", f"{folder}/kernels", "--json", str(figures)]
        for row in ("start-cold", "start-warm"):
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            seconds = json.loads(figures.read_text(encoding="utf-8"))["start_s"]
            table.add(row, Own.name, version("dsv4lite"), [seconds], None, 0)


async def speculate(args: argparse.Namespace, config: EngineConfig, table: Table) -> None:
    """Measure drafters whose draft tokens are right with a given probability. The rank that samples must be in this process."""
    wanted = {
        name: [batch for batch in args.batch if table.wants(f"speculation-{name}-{batch}x{args.context}")] for name in DRAFTERS
    }
    if not any(wanted.values()):
        return
    steps = args.tokens
    tokens = (steps + 2 * START) * (1 + max(DRAFTERS.values()))  # enough if every draft is accepted

    async def rows(llm: AsyncLLM, name: str) -> None:
        for batch in wanted[name]:
            per_s = [(await rate(llm, batch, args.context, steps, tokens))["tokens_per_s"] for _ in range(args.runs)]
            seconds = [batch / each for each in per_s]
            table.add(f"speculation-{name}-{batch}x{args.context}", Own.name, version("dsv4lite"), seconds, None, batch)

    executor = "thread" if config.layout.world > 1 else config.executor
    config = replace(config, max_num_seqs=-(-max(args.batch) // config.data_parallel_size), executor=executor)
    for name, k in DRAFTERS.items():
        if wanted[name]:
            drafter = MTP(k, adaptive=name == "adaptive") if k else None
            with accepting(args.acceptance):
                async with AsyncLLM(replace(config, speculative=drafter)) as llm:
                    await rows(llm, name)
                    counts = llm.stats().speculation
            if counts.drafted:
                print(f"{name}: {counts.accepted} of {counts.drafted} drafts were right", flush=True)


def settings(args: argparse.Namespace) -> EngineConfig:
    """Return the settings of the engine to measure: all rows in one engine, V4's layers routed by token id."""
    config = configured(args)
    places = -(-max(*args.batch, args.requests[1]) // args.dp)
    by_id = {} if "model_type" in MODELS[args.model](args.layers) else {"num_hash_layers": args.layers}
    return replace(config, max_num_seqs=places, hf_overrides={**config.hf_overrides, **by_id})


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the rows that are wanted; return those of this device, model and layout, those of the file included."""
    config = settings(args)
    table = Table(args, config)
    start(args, table)
    measure(args, config, table)
    asyncio.run(speculate(args, config, table))
    if args.plot:
        from examples.benchmarks.plots import shares

        shares(table.own).savefig(args.plot)
    return table.own


def arguments(line: Sequence[str] | None = None) -> argparse.Namespace:
    """Read a command line, by default this program's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser)
    parser.add_argument("--rows", help="names or prefixes of rows, separated by commas (default all)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256], help="of the decode rows (default 1 8 64 256)")
    parser.add_argument("--context", type=int, default=1024, help="prompt tokens of each of their sequences (default 1024)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each of their sequences (default 128)")
    sizes: dict[str, Any] = {"type": prompts_of, "nargs": "*", "default": [(1, 8192), (64, 1024)], "metavar": "COUNTxTOKENS"}
    parser.add_argument("--prefill", **sizes, help="prompts of the prefill rows (default 1x8192 64x1024)")
    parser.add_argument("--requests", type=prompts_of, default=(512, 256), metavar="COUNTxAT_ONCE", help="(default 512x256)")
    parser.add_argument(
        "--lengths",
        type=prompts_of,
        default=(1024, 512),
        metavar="PROMPTxOUTPUT",
        help="longest of the requests (default 1024x512)",
    )
    parser.add_argument("--acceptance", type=float, default=0.8, help="probability that a draft is accepted (default 0.8)")
    parser.add_argument("--runs", type=int, default=3, help="runs of each row; the median counts (default 3)")
    parser.add_argument("--peer", action="store_true", help="also measure vLLM")
    parser.add_argument("--json", help="add the rows to this file")
    parser.add_argument("--plot", metavar="FILE", help="draw the shares of the roofline into this file (SVG, PNG, ...)")
    return parser.parse_args(line)


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    run(arguments())


if __name__ == "__main__":
    main()
