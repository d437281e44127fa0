"""The exact memory budget of an engine, computed from config and headers before anything is loaded."""

from __future__ import annotations

import html
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from dsv4lite.checks import integer, is_number
from dsv4lite.config import MTP, Drafting, DSpark, EngineConfig, named_drafters
from dsv4lite.device import CHIPS, Chip, available_memory, choose_device, find_chip, host_memory
from dsv4lite.errors import CapacityError, ConfigError, UnsupportedError, shown
from dsv4lite.layout import AXES, MOST_RANKS, Layout
from dsv4lite.models.config import ModelConfig
from dsv4lite.models.family import Family
from dsv4lite.models.shard import ModelShard, layouts_for
from dsv4lite.paging import PAGE_TOKENS, window_pages
from dsv4lite.parallel.mesh import Mesh
from dsv4lite.parallel.peer_memory import opened_bytes
from dsv4lite.planning.roofline import stage_roofline
from dsv4lite.planning.workspace import drafting_bytes, exchange_bytes, graph_bytes, prompt_pool_bytes, step_bytes
from dsv4lite.speculation.speculator import make_drafting
from dsv4lite.state.spec import StateSizes, StateSpec
from dsv4lite.weights.quant import Numerics
from dsv4lite.weights.source import ModelSource

log = logging.getLogger("dsv4lite.planning.memory")

GIB = 1 << 30
CPU_STATE_BYTES = GIB
_FLOAT16 = {
    torch.float32: "exact, but twice the memory; dtype='bfloat16' takes half of that and rounds the weights",
    torch.bfloat16: "its weights are rounded to 8 significant bits; dtype='float32' keeps them",
}
_PARTS = {
    "weights": "weights",
    "grow_pages": "KV cache",
    "window_pages": "KV cache of windows",
    "slots": "compressor states",
    "snapshots": "states of cached prefixes",
    "workspace": "workspace of a step",
    "graphs": "captured steps",
}
"""Parts of a ``DeviceBudget``, by the names that a plan prints."""
_SPARE_SEQUENCES = 4  # window pages for chunks that read their old pages while they write new ones


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBudget:
    """Bytes on one device.

    Attributes:
        total: Memory of the device; on a CPU, its free memory.
        available: Free memory; equal to ``total`` if the plan is for another machine.
        weights: Parameters and buffers, in their resident form.
        grow_pages, window_pages, slots, snapshots: Sequence state by store.
        workspace: Most bytes that one step allocates (activations, logits); an estimate on a CPU.
        graphs: Bytes of captured steps and their sampling.
    """

    device: str
    total: int
    available: int
    weights: int
    grow_pages: int
    window_pages: int
    slots: int
    snapshots: int
    workspace: int
    graphs: int

    @property
    def state(self) -> int:
        """All sequence state."""
        return self.grow_pages + self.window_pages + self.slots + self.snapshots

    @property
    def used(self) -> int:
        """All of these."""
        return self.weights + self.state + self.workspace + self.graphs


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPlan:
    """One layout of a model on several devices.

    Attributes:
        fits: Whether every rank's part fits.
        kv_tokens: Tokens whose state fits at once, in all replicas.
        alone_s: Least seconds of a decode step of one sequence on the named chip (``planning/roofline.py``), to compare layouts,
            not to predict speed. ``None`` if no chip was named.
        full_s: The same with ``max_num_seqs`` sequences in every replica.
    """

    layout: Layout
    fits: bool
    kv_tokens: int
    alone_s: float | None
    full_s: float | None

    def __str__(self) -> str:
        times = " ".join(f"{1e3 * seconds:8.2f} ms" for seconds in (self.alone_s, self.full_s) if seconds is not None)
        return f"  {self.layout!s:<28}{self.kv_tokens:>14,} tokens {times}  {'fits' if self.fits else 'does not fit'}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MemoryPlan:
    """The memory of an engine; prints as a table.

    Attributes:
        planned_for: The device, and the formats of weights and state on it.
        kv_tokens: Tokens whose state fits at once in each replica.
        max_model_len: Longest sequence the engine will accept.
        max_concurrency: Sequences of that length that fit at once in each replica.
        bytes_per_token: Bytes of the growing state.
        bytes_per_sequence: Bytes of the fixed state of a running sequence.
        fits: Whether the engine would start.
        replicas: Replicas of the model (``data_parallel_size``).
        advice: Remedies; empty if the plan fits.
        layouts: If ``devices`` was given, all layouts, best first; the plan is that of the first one.
    """

    model: str
    planned_for: str
    per_device: tuple[DeviceBudget, ...]
    sizes: StateSizes
    kv_tokens: int
    max_model_len: int
    max_concurrency: int
    bytes_per_token: float
    bytes_per_sequence: int
    fits: bool
    replicas: int = 1
    advice: tuple[str, ...] = ()
    layouts: tuple[LayoutPlan, ...] = ()

    def __str__(self) -> str:
        """The verdict, the target device, each kind of device once, and the figures for requests."""
        lines = [f"{self.model}: {self._answer()}", f"  planned for {self.planned_for}"]
        for budget in dict.fromkeys(self.per_device):
            count = self.per_device.count(budget)
            device = budget.device if count == 1 else f"each of {count} devices ({budget.device})"
            free = "" if budget.available == budget.total else f", {in_gib(budget.available)} free"
            lines.append(f"  {device:<28}{in_gib(budget.total):>12}{free}")
            parts = [(words, getattr(budget, name)) for name, words in _PARTS.items()]
            lines += [f"    {words:<26}{in_gib(size):>12}" for words, size in (*parts, ("used", budget.used)) if size]
        lines += [
            f"  {'KV cache per token':<28}{self.bytes_per_token:>12,.1f} bytes",
            f"  {'state per running sequence':<28}{self.bytes_per_sequence:>12,} bytes",
        ]
        if self.layouts:
            times = ", and the least time of a step of one sequence and of all" if self.layouts[0].alone_s is not None else ""
            lines.append(f"  layouts, with tokens of KV cache{times}:")
        return "\n".join([*lines, *map(str, self.layouts), *(f"  advice: {line}" for line in self.advice[1 - self.fits :])])

    def __repr__(self) -> str:
        return f"MemoryPlan({self.model!r}, {self._answer()})"

    def _answer(self) -> str:
        if not self.fits:
            return f"does not fit: {self.advice[0]}"
        room = f"{self.max_concurrency:,} sequences of {self.max_model_len:,} tokens"
        where = f" in each of {self.replicas} replicas" if self.replicas > 1 else ""
        return f"fits, with {self.kv_tokens:,} tokens of KV cache{where}: {room} at once"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def in_gib(count: int) -> str:
    """Return a number of bytes in GiB; below 1 MiB, in KiB."""
    return f"{count / GIB:,.3f} GiB" if count >= 1 << 20 else f"{count / 1024:,.1f} KiB"


def choose_numerics(config: EngineConfig, source: ModelSource, device: torch.device) -> Numerics:
    """Return the arithmetic: the checkpoint's own unless the settings name another.

    Raises:
        UnsupportedError: Settings contradict the checkpoint.
    """
    model = source.model
    if model.quantized:
        if config.dtype == "float32":
            raise UnsupportedError(
                "dtype='float32' with a quantized checkpoint: its arithmetic is defined in bfloat16; use dtype='auto'"
            )
        dtype = torch.bfloat16
    elif source.form is not None and config.dtype == "auto":
        dtype = torch.bfloat16
    else:
        dtype = source.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
        if source.dtype == torch.float16:
            dtype = torch.float32 if config.dtype == "auto" else dtype  # represents all values of float16; bfloat16 does not
            log.warning("%s is float16 and is computed in %s: %s", source.folder, dtype, _FLOAT16[dtype])
    wanted = config.kv_cache_dtype
    unquantized, free = str(dtype).removeprefix("torch."), source.family.free_rows
    natural = "fp8" if model.quantized and not free else unquantized
    if wanted not in ("auto", natural, *(("fp8",) if free else ())):
        kind = "quantized" if model.quantized else "unquantized"
        raise UnsupportedError(
            f"kv_cache_dtype={wanted!r} does not fit this {kind} {dtype} model: its rows are {natural!r}; use 'auto'"
        )
    return Numerics.choose(
        dtype=dtype,
        quantized=model.quantized,
        deterministic=config.deterministic,
        device=device,
        fp8_rows=(natural if wanted == "auto" else wanted) == "fp8",
        dense_fp8=source.dense_fp8,
        scale_dtype=source.scale_dtype,
        expert_format=source.expert_format,
        dense_four_bit=source.dense_four_bit,
        drafter_four_bit=source.drafter_four_bit,
        group=0 if source.form is None else source.form.group,
    )


def weight_bytes(
    family: Family,
    model: ModelConfig,
    numerics: Numerics,
    mesh: Mesh | None = None,
    *,
    with_mtp: bool,
    dispatcher: str = "auto",
    redundant_experts: int | None = None,
) -> int:
    """Return the bytes of all of a rank's parameters and buffers in their resident form, without allocating them.

    Options are those of ``ModelSource.build``.
    """
    meta = replace(numerics, device=torch.device("meta"))
    skeleton = family.build(model, meta, mesh, dispatcher=dispatcher, redundant_experts=redundant_experts, with_mtp=with_mtp)
    return sum(t.nbytes for t in (*skeleton.parameters(), *skeleton.buffers()))


def _working_bytes(
    config: EngineConfig, source: ModelSource, numerics: Numerics, longest: int, shard: ModelShard, drafting: Drafting
) -> tuple[int, int]:
    """Return the bytes of a rank's workspace and of its graphs; a sequence samples from one row, and from one for each draft."""
    model, family, layout = source.model, source.family, config.layout
    tokens, sequences = config.max_num_batched_tokens, config.max_num_seqs
    sampled = min(tokens, (1 + drafting.max_drafts) * sequences)
    step = family.workspace(model, numerics, shard, tokens=tokens, longest=longest)
    workspace = step_bytes(step, numerics, model.vocab_size, tokens=tokens, sequences=sampled, listed=config.max_logprobs)
    graphs, prompts, captured = 0, 0, 0 if numerics.device.type == "cpu" else sampled
    if captured:
        prompts = captured_prompts(config, family)
        decode = family.workspace(model, numerics, shard, tokens=captured, longest=longest)
        graphs = graph_bytes(decode, model.vocab_size, sequences=captured)
        if prompts:
            pool = prompt_pool_bytes(family.workspace(model, numerics, shard, tokens=prompts, longest=longest))
            graphs += step.hidden * prompts + max(0, pool - decode.widest)
        if drafting.own is not None:
            graphs += drafting_bytes(model, step.hidden, sequences=sequences, rows=captured)
    if layout.world > 1:
        by_expert, experts = config.dispatcher not in ("auto", "local", "all_gather"), step.experts
        if by_expert and model.num_experts:
            experts = family.workspace(replace(model, experts_per_token=1), numerics, shard, tokens=1, longest=longest).experts
        workspace += exchange_bytes(model, numerics, shard, tokens, experts, by_expert=by_expert)
        graphs += exchange_bytes(model, numerics, shard, max(captured, prompts), experts, by_expert=by_expert)
        if numerics.device.type == "cuda":
            workspace += opened_bytes(len(layout.group(layout.exchanging, 0)))
    if layout.pp > 1:  # received hidden states, and those of the previous step being sent
        workspace, graphs = workspace + 2 * tokens * step.hidden, graphs + 2 * captured * step.hidden
    return workspace, graphs


def captured_prompts(config: EngineConfig, family: Family) -> int:
    """Return the most tokens of a captured step with prompts; 0 with pipeline stages, which capture none."""
    return min(family.captured_prompts, config.max_num_batched_tokens) if config.layout.pp == 1 else 0


def plan_state(
    config: EngineConfig, model: ModelConfig, spec: StateSpec, budget: int, *, longest: int | None
) -> tuple[StateSizes, int, tuple[str, ...]]:
    """Divide a budget of bytes between the stores.

    Returns:
        The sizes, the longest sequence that fits, and advice if it is shorter than wanted.
    """
    span = window_pages(model.window)
    snapshots = max(16, config.max_num_seqs) if config.enable_prefix_caching else 0
    fixed = StateSizes(
        grow_pages=0,
        window_pages=span * (config.max_num_seqs + snapshots + _SPARE_SEQUENCES),
        slots=config.max_num_seqs,
        snapshots=snapshots,
    )
    left = budget - spec.bytes(fixed)
    wanted = longest or model.max_positions
    # At most the pages of all sequences at full length, and as many again for cached prefixes.
    useful = 2 * config.max_num_seqs * -(-wanted // PAGE_TOKENS)
    page = spec.grow_page_bytes
    pages = useful if page == 0 else max(0, min(useful, left // page))
    length = min(wanted, pages * PAGE_TOKENS)
    advice, held, sequences = [], in_gib(budget), f"max_num_seqs={config.max_num_seqs}"
    more = "raise kv_cache_memory_bytes or, on a GPU, gpu_memory_utilization"
    if length < wanted and longest is not None:
        needed = in_gib(spec.bytes(fixed) + -(-longest // PAGE_TOKENS) * page)
        advice.append(f"max_model_len={longest} needs {needed} of state; there are {held}: lower it or {sequences}, or {more}")
    if left < page:
        needed = in_gib(spec.bytes(fixed) + page)
        advice.append(f"{sequences} with one page of tokens needs {needed} of state; there are {held}: lower it, or {more}")
    return replace(fixed, grow_pages=pages), length, tuple(advice)


def choose_drafting(config: EngineConfig, source: ModelSource) -> Drafting:
    """Return the engine's drafters.

    Raises:
        UnsupportedError: The checkpoint lacks the drafter of the settings.
        ConfigError: The settings have more draft tokens than the drafter makes.
        CheckpointError: The checkpoint's config describes another drafter than its tensors.
    """
    own = next((drafter for drafter in named_drafters(config.speculative) if isinstance(drafter, MTP | DSpark)), None)
    if own is not None or config.speculative == "auto":
        own = _own_drafter(own, source)
    return make_drafting(config.speculative, own)


def _own_drafter(wanted: MTP | DSpark | None, source: ModelSource) -> MTP | DSpark | None:
    """Return the model's own drafter with the given settings, or, for ``None``, with the defaults if it has a drafter."""
    kind, block = source.drafter, source.model.draft_block
    if wanted is None:
        return MTP() if kind == "mtp" else DSpark(k=block) if kind == "dspark" else None
    if kind != ("mtp" if isinstance(wanted, MTP) else "dspark"):
        lacks = "MTP block" if isinstance(wanted, MTP) else "block drafter"
        instead = {"mtp": "MTP(), which it has", "dspark": "DSpark(), which it has", None: "NGram()"}
        raise UnsupportedError(
            f"speculative={wanted!r}: {source.folder} has no {lacks}; use {instead[kind]}, 'auto', a Speculator, or None"
        )
    if isinstance(wanted, DSpark) and wanted.k > block:
        raise ConfigError(f"speculative={wanted!r}: the drafter's block has {block} rows; k is at most that")
    return wanted


def make_plan(
    config: EngineConfig,
    source: ModelSource,
    numerics: Numerics,
    *,
    drafting: Drafting,
    rank: int = 0,
    total: int | None = None,
    target: str | None = None,
) -> MemoryPlan:
    """Plan one rank of an engine, on a device of its own.

    Args:
        drafting: The drafters of the engine.
        total: Bytes of the device; default: this machine's.
        target: Name of the device; default: this machine's.

    Raises:
        ConfigError: The layout does not fit the model, or ``max_model_len`` exceeds its positions.
    """
    model, family, longest, limit = source.model, source.family, config.max_model_len, source.model.max_positions
    if longest is not None and longest > limit:
        raise ConfigError(
            f"max_model_len={longest} is more than the model's max_position_embeddings={limit}; lower it, or leave it out"
        )
    on_cpu = numerics.device.type == "cpu"
    if total is None and not on_cpu:
        available, total = available_memory(numerics.device)
    else:
        available = total = host_memory() if total is None else total
    mesh = Mesh.outline(config.layout, rank)
    shard, extra = ModelShard.of(model, family.tensors, mesh), config.redundant_experts
    drafts = drafting.own is not None and shard.last
    spec = replace(family.state(model, numerics, shard, drafter=drafts), copies=1 + drafting.max_drafts)
    named = config.dispatcher if isinstance(config.dispatcher, str) else "auto"
    weights = weight_bytes(family, model, numerics, mesh, with_mtp=drafts, dispatcher=named, redundant_experts=extra)
    workspace, graphs = _working_bytes(config, source, numerics, longest or limit, shard, drafting)
    usable = int(total * (1.0 if on_cpu else config.gpu_memory_utilization))
    room = usable - weights - workspace - graphs
    budget = config.kv_cache_memory_bytes or (min(CPU_STATE_BYTES, room) if on_cpu else room)
    sizes, length, advice = plan_state(config, model, spec, budget, longest=longest)
    used = weights + workspace + graphs + spec.bytes(sizes)
    notes = list(advice)
    if room < 0:
        notes = [_too_large_advice(config, weights, workspace + graphs, usable)]
    elif budget > room:
        notes.append(f"kv_cache_memory_bytes={budget:,} exceeds the {room:,} that weights and workspace leave; lower it")
    elif used > available:
        notes.append(_taken_advice(config, used, available, total, least=used - sizes.grow_pages * spec.grow_page_bytes))
    pages_each = -(-max(1, length) // PAGE_TOKENS)
    return MemoryPlan(
        model=config.model,
        planned_for=f"{target or f'the {numerics.device} of this machine'}: {_formats(numerics)}",
        per_device=(
            DeviceBudget(
                device=str(numerics.device),
                total=total,
                available=available,
                weights=weights,
                grow_pages=sizes.grow_pages * spec.grow_page_bytes,
                window_pages=sizes.window_pages * spec.window_page_bytes,
                slots=sizes.slots * spec.slot_bytes,
                snapshots=sizes.snapshots * spec.snapshot_bytes,
                workspace=workspace,
                graphs=graphs,
            ),
        ),
        sizes=sizes,
        kv_tokens=sizes.grow_pages * PAGE_TOKENS,
        max_model_len=length,
        max_concurrency=min(sizes.slots, sizes.grow_pages // pages_each),
        bytes_per_token=spec.grow_page_bytes / PAGE_TOKENS,
        bytes_per_sequence=spec.slot_bytes + window_pages(model.window) * spec.window_page_bytes,
        fits=not notes,
        replicas=config.layout.dp,
        advice=tuple(notes),
    )


def _formats(numerics: Numerics) -> str:
    """Name the formats of weights and state."""
    unquantized = str(numerics.matrix_dtype).removeprefix("torch.")
    matrices = "FP8" if numerics.resident_fp8 else "4-bit" if numerics.resident_four_bit else unquantized
    names = {"unquantized": unquantized, "four_bit": "4-bit"}
    experts = names.get(numerics.resident_experts, numerics.resident_experts.upper())
    rows = "FP8" if numerics.fp8_rows else str(numerics.dtype).removeprefix("torch.")
    return f"{matrices} matrices, {experts} experts, {rows} KV rows"


def _too_large_advice(config: EngineConfig, weights: int, working: int, usable: int) -> str:
    """Return the advice for weights and workspace that leave no memory for state."""
    if weights > usable:
        remedy = "use a device with more memory, several that share the model (tensor_parallel_size), or a smaller model"
        return f"the weights ({in_gib(weights)}) do not fit in {in_gib(usable)}; {remedy}"
    remedy = f"lower max_num_batched_tokens={config.max_num_batched_tokens} or max_num_seqs={config.max_num_seqs}"
    return (
        f"the weights ({in_gib(weights)}) and the workspace of a step ({in_gib(working)}) do not fit in {in_gib(usable)}; {remedy}"
    )


def _taken_advice(config: EngineConfig, used: int, available: int, total: int, *, least: int) -> str:
    """Return the advice for a device whose memory is partly taken; ``least`` is the memory used without growing state."""
    ways = ["free what this program or other processes hold there (nvidia-smi lists them)"]
    if available > least:
        if config.kv_cache_memory_bytes is not None:
            ways.append(f"lower kv_cache_memory_bytes={config.kv_cache_memory_bytes:,} by {used - available:,}")
        elif int(100 * available / total):
            fraction = int(100 * available / total) / 100
            ways.append(f"set gpu_memory_utilization={fraction} (now {config.gpu_memory_utilization}) to do with less KV cache")
    return f"{in_gib(used)} are wanted, but of the device's {in_gib(total)} only {in_gib(available)} are free: {', or '.join(ways)}"


def plan_memory(
    model: str | EngineConfig,
    *,
    gpu: str | None = None,
    memory_bytes: int | None = None,
    devices: int | None = None,
    **settings: Any,
) -> MemoryPlan:
    """Compute the memory of an engine from the checkpoint's config and headers alone.

    With ``gpu`` or ``memory_bytes`` the plan is for a GPU, which this machine may lack, unless ``device="cpu"``. Without them it is
    for this machine.

    Args:
        model: Folder or hub id of a checkpoint, or a whole configuration.
        gpu: Chip to plan for, by its name in ``device.CHIPS``, such as ``"h200"``.
        memory_bytes: Memory of each device to plan for; default is that of ``gpu``, or of this machine's device.
        devices: Compare all layouts of this number of devices, and return the plan of the best: among those that fit, the one with
            the shortest time of a full step divided by the number of replicas, so the most tokens per second.
        settings: Fields of ``EngineConfig``.

    Raises:
        ConfigError: Settings or model config are invalid, or the chip is unknown.
        CheckpointError: The checkpoint cannot be read.
    """
    config = model if isinstance(model, EngineConfig) else EngineConfig.from_dict({"model": model, **settings})
    chip = None if gpu is None else find_chip(gpu)
    device, total, target = _target(config, chip, memory_bytes)
    source = ModelSource.open(config, fetch=False)
    numerics = choose_numerics(config, source, device)
    drafting = choose_drafting(config, source)

    plan_rank = partial(make_plan, source=source, numerics=numerics, drafting=drafting, total=total, target=target)
    if devices is not None:
        return _best_plan(config, source, numerics, devices, chip, plan_rank)
    return _merged(config.layout, [plan_rank(config, rank=rank) for rank in config.layout.firsts])


def _target(config: EngineConfig, chip: Chip | None, memory_bytes: int | None) -> tuple[torch.device, int | None, str]:
    """Return the device to plan for, its bytes unless it is this machine's, and its name.

    Raises:
        ConfigError: Both a chip and a CPU are named, the device does not exist, or its memory is unknown or not a number.
    """
    if memory_bytes is not None and not (is_number(memory_bytes) and 1 <= memory_bytes < 1 << 63):
        raise ConfigError(f"memory_bytes={shown(memory_bytes)} must be at least 1 and below 2**63: a number of bytes, or None")
    total = memory_bytes if memory_bytes is not None or chip is None else chip.memory_bytes
    if total is None and config.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(
            f"device={config.device!r}: this machine has no GPU whose memory could be planned; name one (gpu='h200', --gpu h200), "
            "or its memory (memory_bytes, --memory)"
        )
    if total is None or not config.device.startswith(("auto", "cuda")):
        device = choose_device(config)
        if chip is not None:
            raise ConfigError(f"the gpu {chip.name} and device='cpu' are two devices; leave one out")
        name = f"the {device} of this machine" if total is None else f"a {device} with {in_gib(total)}"
        if device.type == "cpu" and config.device == "auto":
            name += " (it has no GPU; to plan for one, name it: gpu='h200' or --gpu h200)"
        return device, total, name
    device = torch.device("cuda")
    if chip is None:
        return device, total, f"a GPU with {in_gib(total)}"
    major, minor = chip.capability
    return device, total, f"{chip.name} with {in_gib(total)}, compute capability {major}.{minor}"


def _best_plan(
    config: EngineConfig,
    source: ModelSource,
    numerics: Numerics,
    devices: int,
    chip: Chip | None,
    plan_rank: Callable[..., MemoryPlan],
) -> MemoryPlan:
    """Return the plan of the best layout of ``devices`` devices, with all layouts, replicas that share nothing included.

    Raises:
        ConfigError: ``devices`` is below 1 or too large, or there are sizes of axes beside it.
    """
    if problem := integer(1, MOST_RANKS)(devices):
        raise ConfigError(f"devices={shown(devices)} {problem}")
    if config.layout.world > 1:
        raise ConfigError(f"devices={devices} compares all layouts, but the settings name one, {config.layout}; leave one out")
    model, tensors, reads = source.model, source.family.tensors, source.family.row_reads(source.model, numerics)
    rates = chip or CHIPS["h200"]  # to order layouts; the plan has times only for a named chip
    found: list[tuple[float, LayoutPlan, MemoryPlan]] = []
    for layout in layouts_for(model, tensors, devices, None if source.form is None else source.form.block):
        sizes = {setting: getattr(layout, axis) for axis, setting in AXES.items()}
        plans = [plan_rank(replace(config, **sizes), rank=rank) for rank in layout.firsts]
        plan = _merged(layout, plans)
        shards = [ModelShard.of(model, tensors, Mesh.outline(layout, rank)) for rank in layout.firsts]
        held = [part.per_device[0].weights for part in plans]
        alone, full = (
            [stage_roofline(model, numerics, *one, count, rates, reads) for one in zip(shards, held, strict=True)]
            for count in (1, -(-config.max_num_seqs // layout.pp))
        )
        kv_tokens, full_s = plan.kv_tokens * layout.dp, layout.pp * max(full)  # groups take turns in the slowest stage
        times = (sum(alone), full_s) if chip is not None else (None, None)
        entry = LayoutPlan(layout=layout, fits=plan.fits, kv_tokens=kv_tokens, alone_s=times[0], full_s=times[1])
        found.append((full_s / layout.dp, entry, plan))  # replicas run their steps at the same time
    found.sort(key=lambda each: (not each[1].fits, each[0], -each[1].kv_tokens))
    return replace(found[0][2], layouts=tuple(layout for _, layout, _ in found))


def _merged(layout: Layout, plans: Sequence[MemoryPlan]) -> MemoryPlan:
    """Return the plan of all ranks from those of the first rank of each stage; the other ranks of a stage hold the same."""
    return merge_plans([plan for plan in plans for _ in range(layout.stage)])


def merge_plans(plans: Sequence[MemoryPlan]) -> MemoryPlan:
    """Return the plan of all ranks: each has as many pages and slots as the rank with the fewest."""
    each = [asdict(plan.sizes) for plan in plans]
    sizes = StateSizes(**{name: min(one[name] for one in each) for name in each[0]})
    smallest = min(plans, key=lambda plan: plan.kv_tokens)

    def with_these_pages(plan: MemoryPlan, budget: DeviceBudget) -> DeviceBudget:
        return replace(budget, grow_pages=budget.grow_pages // max(1, plan.sizes.grow_pages) * sizes.grow_pages)

    return replace(
        smallest,
        sizes=sizes,
        max_model_len=min(plan.max_model_len for plan in plans),
        per_device=tuple(with_these_pages(plan, budget) for plan in plans for budget in plan.per_device),
        fits=all(plan.fits for plan in plans),
        advice=tuple(dict.fromkeys(line for plan in plans for line in plan.advice)),
    )


def require_fit(plan: MemoryPlan) -> None:
    """Raise CapacityError with the plan and its advice unless it fits."""
    if not plan.fits:
        raise CapacityError(f"{plan.model} does not fit: {'; '.join(plan.advice)}", plan=plan, advice=plan.advice)
