"""Show where a step's time goes: each op's time on the device against its own roofline, the largest loss first.

    python -m examples.benchmarks.profile --layers 8 --batch 64
    python -m examples.benchmarks.profile --layers 43 --tp 2 --executor thread --batch 64 256 --prefill 1x8192 --json profile.json
    python -m examples.benchmarks.profile --model shipped --layers 3 --device cpu --batch 2 --context 8 --steps 2 --prefill 1x16
    python -m examples.benchmarks.profile --model shipped --layers 2 --device cpu --batch 2 --context 8 --steps 4 --drafts 2

The loss of an op is its time minus its roofline: the longer of its bytes at 4.3 TB/s and its products at 790 TFLOP/s (twice that
for FP8 operands). Bytes and products follow from the tensors of each call. If a call reads a part of a tensor, that part counts:
the experts that the batch is expected to choose, if all are equally likely, and the rows that tokens of the given context see.

A kernel's time is the time by which it ends later than all kernels before it, so that kernels that overlap, or wait for the one
before them, are not counted twice; all times and ``idle``, in which no kernel runs, add up to the step. ``late`` is the part of
``idle`` in gaps of more than 10 us, as when the host is late. ``host`` is the host's part of a step, for which an idle device
would wait. ``collectives`` move data between ranks and wait for them; their roofline is not known. Kernels of other packages have
their own names and no roofline.

While the engine runs, the program notes the calls of ops and the kernels that each launches, those of captured steps when they are
captured. The n-th time that the device runs a kernel belongs to the n-th launch of that name. On a CPU the time of an op is that
of its call. With several ranks it watches rank 0 and needs ``--executor thread``, which has that rank in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsv4lite import MTP, AsyncLLM, AsyncStream
from dsv4lite.engine.step_graphs import StepGraphs
from dsv4lite.kernels.attention import AttentionInputs
from dsv4lite.kernels.compress import CompressInputs
from dsv4lite.kernels.dispatch import Op
from dsv4lite.kernels.experts import ExpertInputs, Tiles
from dsv4lite.kernels.experts.decode_small import MoeInputs
from dsv4lite.kernels.four_bit import FourBit
from dsv4lite.kernels.indexer import IndexInputs
from dsv4lite.kernels.latent_attention import LatentAttentionInputs
from dsv4lite.models.config import ModelConfig
from dsv4lite.weights.source import ModelSource
from examples.benchmarks.engine import BYTES_PER_SECOND, add_engine_options, configured, device_name, model_name, params, prompts_of
from examples.benchmarks.speculation import accepting
from examples.benchmarks.table import FLOPS_PER_SECOND

COLLECTIVES, LIBRARY = "collectives", "library: "
LONG_GAP_S = 10e-6
TABLE_NUMBERS = 1 << 16  # integers of a table of which a call reads a few rows
STEPS_BEFORE = 8  # of all sequences, before the ones that are watched


@dataclass(slots=True, eq=False)
class Call:
    """One call of an op.

    Attributes:
        op: Its name, and the shape of the weights that it multiplies by.
        bytes: Bytes that it must read and write.
        product_s: Least seconds of its products.
        seconds: Host seconds of the call.
    """

    op: str
    bytes: float = 0.0
    product_s: float = 0.0
    seconds: float = 0.0

    @property
    def roofline_s(self) -> float:
        """The least seconds."""
        return max(self.bytes / BYTES_PER_SECOND, self.product_s)


@dataclass(slots=True)
class Tape:
    """The launches of the host, in order: calls of ops, and kernels by name with the call that each belongs to."""

    calls: list[Call] = field(default_factory=list)
    kernels: list[tuple[str, Call]] = field(default_factory=list)

    def extend(self, other: Tape) -> None:
        """Append another tape."""
        self.calls += other.calls
        self.kernels += other.kernels


class Costs:
    """The bytes that calls must read and write, and their products.

    Args:
        model: The model that has the experts.
        seen: Tokens of its sequence that a token sees, on average.
    """

    def __init__(self, model: ModelConfig, seen: int) -> None:
        self._experts, self._per_token, self.seen = max(1, model.num_experts), model.experts_per_token, seen

    def call(self, op: Op[Any, Any], args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Call:
        """Return a call with what it costs."""
        given, name = args[0] if args else None, op.__name__
        if isinstance(given, ExpertInputs | MoeInputs):
            return self._chosen(name, given, result)
        if isinstance(given, AttentionInputs):
            tokens, heads, width = given.q_THC.shape
            limit = self.seen if given.selected_TK is None else given.selected_TK.shape[1]
            entries = min(self.seen // given.ratio, limit) if given.ratio else 0
            rows = min(self.seen, given.window_size) + entries
            read = self._rows(len(given.paging.first_S), tokens, rows, given.fresh_TB.shape[1])
            return Call(
                name, _size((given.q_THC, given.fresh_TB, result)) + read, 4 * tokens * heads * width * rows / FLOPS_PER_SECOND
            )
        if isinstance(given, LatentAttentionInputs):
            (tokens, heads, width), rank = given.q_THC.shape, given.up_HCL.shape[2]
            rows = self.seen if given.selected_TK is None else min(self.seen, given.selected_TK.shape[1])
            read = self._rows(len(given.paging.first_S), tokens, rows, given.rows.format.data_bytes)
            products = heads * rows * (2 * rank + given.rope)
            # The up-projected form multiplies by every row.
            if given.captured or (given.paging.host_spans is not None and given.projected):
                products = min(products, heads * self.seen * (width + given.up_HCL.shape[1] - given.nope))
            flop = 2 * tokens * (products + given.up_HCL.numel())
            return Call(name, _size((given.q_THC, given.up_HCL, result)) + read, flop / FLOPS_PER_SECOND)
        if isinstance(given, IndexInputs):
            _, heads, width = given.iq_THC.shape
            tokens, entries = args[2] - args[1], self.seen // given.ratio
            read = self._rows(len(given.paging.first_S), tokens, entries, given.keys.format.data_bytes)
            written = tokens * (_size(given.iq_THC[0]) + entries * given.dtype.itemsize)
            return Call(name, read + written, 2 * tokens * heads * width * entries / FLOPS_PER_SECOND)
        if name == "select_paged":
            scores_NE, _, ratio, _, out = args
            return Call(name, len(scores_NE) * (self.seen // ratio) * scores_NE.itemsize + _size(out))
        if isinstance(given, CompressInputs):
            states = given.state[: len(given.projected)]  # of as many sequences as there can be
            return Call(name, _size((given.projected, given.ape, states, states)))
        every = dict(zip(op.reference.__code__.co_varnames, args, strict=False)) | kwargs
        weights = [weight for key, weight in every.items() if key in ("w", "w_codes", "w_NK")]
        rows = len(given) if isinstance(given, Tensor) else 0
        shape = "x".join(str(size) for size in weights[0].shape) if weights else ""
        return Call(
            f"{name} {shape}".strip(), _size((args, list(kwargs.values()), result)), sum(_products(rows, one) for one in weights)
        )

    def _rows(self, sequences: int, tokens: int, rows: int, row_bytes: int) -> float:
        """Return the bytes of the rows that tokens see: those of a prompt share them."""
        return min(tokens * rows, sequences * 2 * self.seen) * row_bytes

    def _chosen(self, name: str, given: ExpertInputs | MoeInputs, result: Any) -> Call:
        """Return what the experts of this rank read and multiply, if tokens are spread evenly over the experts of all ranks."""
        count, hidden, width = given.w2.shape
        tokens = len(given.x_codes if isinstance(given, MoeInputs) else given.x)
        used = 1 - (1 - self._per_token / self._experts) ** tokens
        others = [value for key, value in given._asdict().items() if key not in ("w13", "w2")]
        flop = 2 * tokens * self._per_token * min(1.0, count / self._experts) * 3 * hidden * width
        product_s = flop / (FLOPS_PER_SECOND * (2 if isinstance(given.w2, Tiles) else 1))
        if isinstance(given, MoeInputs) and given.h_TI is not None:
            product_s += _products(tokens, given.shared_codes)
        return Call(name, used * (_size(given.w13) + _size(given.w2)) + _size((others, result)), product_s)


def _products(rows: int, weight: Tensor | FourBit) -> float:
    """Return the least seconds of the product of so many rows with weights."""
    if isinstance(weight, FourBit):
        return 4 * rows * weight.codes.numel() / FLOPS_PER_SECOND
    return 2 * rows * weight.numel() / (FLOPS_PER_SECOND * (2 if weight.itemsize == 1 else 1))


def _size(value: object) -> int:
    """Return the bytes of the tensors in nested tuples and weights, but for tables and for pages of rows."""
    if isinstance(value, Tensor):
        table = not value.is_floating_point() and value.itemsize > 1 and value.numel() > TABLE_NUMBERS
        return 0 if table else value.numel() * value.itemsize
    if isinstance(value, Tiles):
        return _size((value.codes, value.scales))
    return sum(map(_size, value)) if isinstance(value, tuple | list) else 0


class Watch:
    """Records the launches of the host; mutable. It wraps the ops of this process while an engine is made and runs.

    Attributes:
        tape: The launches since it was last replaced.
        costs: Costs of the calls.
    """

    def __init__(self, costs: Costs) -> None:
        self.tape, self.costs = Tape(), costs
        self._call: Call | None = None
        self._graphs: dict[int, Tape] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Wrap ops, kernels and graphs until the block ends."""
        with ExitStack() as undo:
            for owner, name, make in self._places():
                before = getattr(owner, name)
                setattr(owner, name, make(before))
                undo.callback(setattr, owner, name, before)
            yield

    def _places(self) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
        yield Op, "__call__", self._noting_calls
        if torch.cuda.is_available():
            from triton.runtime.jit import JITFunction

            yield JITFunction, "run", self._noting_kernels
            yield StepGraphs, "_record", self._noting_graphs
            yield torch.cuda.CUDAGraph, "replay", self._noting_replays

    def _noting_calls(self, before: Callable[..., Any]) -> Callable[..., Any]:
        def call(op: Op[Any, Any], *args: Any, **kwargs: Any) -> Any:
            if self._call is not None:  # a part of the current call
                return before(op, *args, **kwargs)
            found = self._call = Call(op.__name__)
            begun = time.perf_counter()
            try:
                result = before(op, *args, **kwargs)
            finally:
                self._call = None
            seconds, cost = time.perf_counter() - begun, self.costs.call(op, args, kwargs, result)
            found.op = cost.op if found.op == op.__name__ else found.op
            found.bytes, found.product_s, found.seconds = cost.bytes, cost.product_s, seconds
            self.tape.calls.append(found)
            return result

        return call

    def _noting_kernels(self, before: Callable[..., Any]) -> Callable[..., Any]:
        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            if not warmup:
                folder = kernel.module.removeprefix("dsv4lite.kernels.").split(".")[0]
                call = Call(COLLECTIVES) if folder == "peer_memory" else self._call or Call(folder)
                self.tape.kernels.append((kernel.__name__, call))
            return before(kernel, *args, grid=grid, warmup=warmup, **options)

        return run

    def _noting_graphs(self, before: Callable[..., Any]) -> Callable[..., Any]:
        def record(graphs: StepGraphs, work: Callable[[], Any]) -> Any:
            outer, self.tape = self.tape, Tape()
            try:
                graph, result = before(graphs, work)
                self._graphs[id(graph)] = self.tape
            finally:
                self.tape = outer
            return graph, result

        return record

    def _noting_replays(self, before: Callable[..., Any]) -> Callable[..., Any]:
        def replay(graph: Any) -> None:
            self.tape.extend(self._graphs.get(id(graph), Tape()))
            before(graph)

        return replay


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A run of a kernel on the device, in seconds of its clock."""

    name: str
    begin: float
    end: float


@dataclass(slots=True, kw_only=True)
class OpTime:
    """The time of all calls of an op.

    Attributes:
        calls: Number of calls.
        seconds, roofline_s: Sums over the calls; ``None`` for a roofline that is not known.
    """

    calls: int = 0
    seconds: float = 0.0
    roofline_s: float | None = None

    @property
    def loss_s(self) -> float:
        """Seconds beyond the roofline."""
        return self.seconds - (self.roofline_s or 0.0)


def op_times(tape: Tape, kernels: Sequence[Kernel] | None) -> tuple[dict[str, OpTime], float, float]:
    """Share the device's time among ops.

    Args:
        tape: The launches.
        kernels: Kernels that the device ran; ``None`` on a CPU, where the time of a call counts.

    Returns:
        Times by op, and seconds in which no kernel ran: in all, and in long gaps.
    """
    found: dict[str, OpTime] = defaultdict(OpTime)
    for call in tape.calls:
        one = found[call.op]
        one.calls += 1
        one.roofline_s = (one.roofline_s or 0.0) + call.roofline_s
        one.seconds += call.seconds if kernels is None else 0.0
    if kernels is None:
        return found, 0.0, 0.0
    launched: dict[str, list[Call]] = defaultdict(list)
    for name, call in tape.kernels:
        launched[name].append(call)
    ran, seen, gaps = Counter(kernel.name for kernel in kernels), Counter[str](), []
    kernels = sorted(kernels, key=lambda kernel: kernel.begin)
    ended = kernels[0].begin if kernels else 0.0
    for kernel in kernels:
        calls = launched.get(kernel.name)
        if calls is not None and len(calls) == ran[kernel.name]:
            name = calls[seen[kernel.name]].op
        elif calls is not None:
            name = f"{kernel.name} (launched {len(calls)} times, ran {ran[kernel.name]} times)"
        elif kernel.name.startswith("nccl"):
            name = COLLECTIVES
        else:
            name = LIBRARY + kernel.name
        one = found[name]
        if one.roofline_s is None:  # kernels of an op are counted by its calls
            one.calls += 1
        seen[kernel.name] += 1
        gaps.append(max(0.0, kernel.begin - ended))
        one.seconds += max(0.0, kernel.end - max(kernel.begin, ended))
        ended = max(ended, kernel.end)
    return found, sum(gaps), sum(gap for gap in gaps if gap > LONG_GAP_S)


@contextmanager
def device_kernels(on_gpu: bool) -> Iterator[list[Kernel]]:
    """Watch this process's GPU during a block; after it, the list has the kernels that ran."""
    found: list[Kernel] = []
    if not on_gpu:
        yield found
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        yield found
        torch.cuda.synchronize()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found.append(Kernel(name=event.name, begin=1e-6 * event.time_range.start, end=1e-6 * event.time_range.end))


class Profiler:
    """Profiles parts of an engine's work.

    Args:
        llm: The engine, started under the watch.
        watch: The watch that wraps its ops.
        on_gpu: Whether kernels run on a GPU.
    """

    def __init__(self, llm: AsyncLLM, watch: Watch, *, on_gpu: bool) -> None:
        self._llm, self._watch, self._on_gpu = llm, watch, on_gpu

    async def during(self, name: str, seen: int, work: Callable[[], Awaitable[Any]], *, per_step: bool) -> dict[str, Any]:
        """Profile some work of an idle engine; return its times, in seconds of a step or of the whole.

        Args:
            name: Name of the work.
            seen: Tokens that a token sees, on average.
            work: Begins and ends with an idle engine.
            per_step: Whether to divide by the number of steps.
        """
        self._watch.costs.seen = seen
        with device_kernels(self._on_gpu) as kernels:
            self._watch.tape = Tape()
            begun, before = time.perf_counter(), self._llm.stats().steps
            await work()
            seconds = time.perf_counter() - begun
            tape, steps = self._watch.tape, self._llm.stats().steps - before
        ops, idle, late = op_times(tape, kernels if self._on_gpu else None)
        count = steps if per_step else 1
        if kernels:
            seconds = max(kernel.end for kernel in kernels) - min(kernel.begin for kernel in kernels)
        else:
            idle = seconds - sum(one.seconds for one in ops.values())
        rows = []
        for op, one in ops.items():
            least = None if one.roofline_s is None else one.roofline_s / count
            row = {"op": op, "calls": one.calls / count, "seconds": one.seconds / count, "roofline_s": least}
            rows.append({**row, "loss_s": one.loss_s / count})
        rows.sort(key=lambda row: -float(row["loss_s"] or 0.0))
        result = {"name": name, "steps": steps, "seconds": seconds / count, "idle_s": idle / count, "late_s": late / count}
        result |= {"host_s": self._llm.stats().host_s, "ops": rows}
        return result


async def decode(llm: AsyncLLM, profiler: Profiler, args: argparse.Namespace, batch: int) -> dict[str, Any]:
    """Profile steps in which ``batch`` sequences decode."""
    rng, length = random.Random(0), args.context + (1 + args.drafts) * (STEPS_BEFORE + args.steps)
    # At the higher temperature the noise alone decides, as ``accepting`` needs it.
    sampled = params(args.max_model_len - args.context - 1).replace(temperature=1e9 if args.drafts else 1.0)
    prompts = [[rng.randrange(3, 4000) for _ in range(args.context)] for _ in range(batch)]
    hosts: list[float] = []
    streams: list[AsyncStream] = []
    async with AsyncExitStack() as stack:

        async def begin(prompt: list[int]) -> None:
            streams.append(await stack.enter_async_context(llm.stream(prompt, sampled)))
            await anext(aiter(streams[-1]))

        async def explain() -> None:
            llm.abort()
            for stream in streams:
                async for _ in stream:  # raises the error of a request that failed
                    pass
            raise SystemExit("a request has ended")

        async def steps(count: int) -> None:
            last = llm.stats().steps + count
            await llm.resume()
            while llm.stats().steps < last:
                if llm.stats().num_running != batch:
                    await explain()
                await asyncio.sleep(0.001)
                hosts.append(llm.stats().host_s)
            await llm.pause()

        await asyncio.gather(*map(begin, prompts))  # until each has a token, steps may have prompts
        await steps(STEPS_BEFORE)
        hosts.clear()
        name = f"decode, batch {batch}, context {args.context}"
        result = await profiler.during(name, length, partial(steps, args.steps), per_step=True)
        llm.abort()
        await llm.resume()
    return {**result, "host_s": statistics.median(hosts)}


async def prefill(llm: AsyncLLM, profiler: Profiler, count: int, length: int) -> dict[str, Any]:
    """Profile prompts; a token sees half of its prompt."""
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 4000) for _ in range(length)] for _ in range(count)]
    await llm.generate_batch(prompts, params(1))
    return await profiler.during(
        f"prefill {count} x {length}", length // 2, lambda: llm.generate_batch(prompts, params(1)), per_step=False
    )


def show(result: dict[str, Any], most: int) -> None:
    """Print what ``Profiler.during`` returns."""
    total = result["seconds"]
    parts = {"rooflines": sum(row["roofline_s"] or 0.0 for row in result["ops"])}
    parts[COLLECTIVES] = sum(row["seconds"] for row in result["ops"] if row["op"] == COLLECTIVES)
    parts |= {name: result[f"{name}_s"] for name in ("idle", "late", "host")}
    print(f"\n{result['name']}: {1e3 * total:.3f} ms; " + ", ".join(f"{name} {1e3 * part:.3f}" for name, part in parts.items()))
    print(f"{'loss us':>10}{'of all':>8}{'time us':>10}{'roofline':>10}{'share':>7}{'calls':>8}  op")
    for row in result["ops"][:most]:
        least, seconds = row["roofline_s"], row["seconds"]
        line = f"{1e6 * row['loss_s']:>10.1f}{row['loss_s'] / total:>8.1%}{1e6 * seconds:>10.1f}"
        line += f"{'':>17}" if least is None else f"{1e6 * least:>10.1f}{least / (seconds or least or 1):>7.2f}"
        print(f"{line}{row['calls']:>8.1f}  {row['op'][:80]}", flush=True)


async def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Profile what the command line asks for."""
    config = configured(args)
    if "num_hash_layers" in config.hf_overrides:  # the same number of experts in every layer
        config = replace(config, hf_overrides={**config.hf_overrides, "num_hash_layers": args.layers})
    if args.drafts:
        config = replace(config, speculative=MTP(args.drafts, adaptive=False))
    watch, on_gpu, found = Watch(Costs(ModelSource.open(config).model, args.context)), device_name(args) != "cpu", []
    key = {"device": device_name(args), "model": model_name(args), "layout": str(config.layout), "torch": torch.__version__}
    print(", ".join(key.values()))
    with watch.watching(), accepting(args.acceptance):
        async with AsyncLLM(config) as llm:
            profiler = Profiler(llm, watch, on_gpu=on_gpu)
            work: Iterable[Callable[[], Awaitable[dict[str, Any]]]] = [
                *(lambda batch=batch: decode(llm, profiler, args, batch) for batch in args.batch),
                *(lambda sizes=sizes: prefill(llm, profiler, *sizes) for sizes in args.prefill),
            ]
            for one in work:
                result = await one()
                found.append({**key, **result})
                show(result, args.most)
    return found


def arguments(line: Sequence[str] | None = None) -> argparse.Namespace:
    """Read a command line, by default this program's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser)
    parser.add_argument("--batch", type=int, nargs="+", default=[64], help="sequences that decode together (default 64)")
    parser.add_argument("--context", type=int, default=1024, help="prompt tokens of each (default 1024)")
    parser.add_argument("--steps", type=int, default=16, help="to watch (default 16)")
    parser.add_argument("--drafts", type=int, default=0, help="draft tokens of the MTP block in each step (default 0)")
    parser.add_argument("--acceptance", type=float, default=0.8, help="probability that a draft is accepted (default 0.8)")
    sizes: dict[str, Any] = {"type": prompts_of, "nargs": "*", "default": [], "metavar": "COUNTxTOKENS"}
    parser.add_argument("--prefill", **sizes, help="also profile these prompts")
    parser.add_argument("--most", type=int, default=40, help="rows to print (default 40)")
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args(line)
    if args.tp * args.ep * args.dp * args.pp > 1 and args.executor != "thread":
        parser.error("the profile watches this process; with several ranks it needs --executor thread")
    return args


def main() -> None:
    args = arguments()
    found = asyncio.run(run(args))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
