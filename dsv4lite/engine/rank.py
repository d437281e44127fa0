"""One rank: the probe of checkpoint and device before anything is loaded, and the construction of the runner."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from dsv4lite.config import (
    MTP,
    Drafter,
    Drafting,
    DSpark,
    EngineConfig,
    NGram,
    Progress,
    default_cache_dir,
    local_rank,
    named_drafters,
)
from dsv4lite.device import (
    choose_device,
    give_back_unused,
    host_memory,
    installed_version,
    open_matrix_library,
    require_private,
    reserve,
    start_error,
)
from dsv4lite.engine.balancer import Balancer
from dsv4lite.engine.resident import Resident
from dsv4lite.engine.runner import Runner
from dsv4lite.engine.step_graphs import StepGraphs, graph_widths
from dsv4lite.errors import CapacityError, CheckpointError, ConfigError, InvalidRequestError, UnsupportedError
from dsv4lite.files import open_regular
from dsv4lite.kernels.dispatch import on_gpu
from dsv4lite.layout import Layout
from dsv4lite.models.config import ModelConfig
from dsv4lite.models.family import Model
from dsv4lite.models.shard import check_layout
from dsv4lite.parallel.mesh import Mesh
from dsv4lite.parallel.rendezvous import differences
from dsv4lite.planning.memory import MemoryPlan, captured_prompts, choose_drafting, choose_numerics, in_gib, make_plan, merge_plans
from dsv4lite.planning.workspace import SMALL_BLOCKS, prompt_pool_bytes
from dsv4lite.request import SamplingParams, check_token_ids
from dsv4lite.sampling.sampler import Sampler
from dsv4lite.speculation.drafters import make_drafter
from dsv4lite.state.store import StateCache
from dsv4lite.text.structured import GrammarCompiler
from dsv4lite.text.tokenizer import Tokenizer
from dsv4lite.weights.checkpoint import Checkpoint
from dsv4lite.weights.quant import Numerics
from dsv4lite.weights.source import ModelSource

if TYPE_CHECKING:
    from dsv4lite.kernels.warmup import Compiler

# Settings that may differ between ranks.
_OWN_TO_A_RANK = "family quant_formats model tokenizer device device_mesh process_group executor progress compile_cache_dir".split()
_SAMPLE_BYTES = 4096
_PROCESS_BYTES = 128 << 20  # least private memory of a process: the interpreter with PyTorch takes more
_LEADER_FILES, _RANK_FILES = 16, 4  # more than the connections of a leader or a rank take: 17 files with 2 ranks, 23 with 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """Report of a rank to the leader before anything is loaded.

    Attributes:
        plan: Memory that this rank would use.
        model: Config of the model.
        default_params: Parameters of requests without any, from the checkpoint's ``generation_config.json``.
        folder: Folder of the checkpoint.
        own: The model's own drafter.
        chat: Name of the model's chat format.
        numerics: Arithmetic of the model.
        facts: Values that must be equal on all ranks, by name; empty for a single rank.
    """

    plan: MemoryPlan
    model: ModelConfig
    default_params: SamplingParams
    folder: str
    own: MTP | DSpark | None
    chat: str | None
    numerics: Numerics
    facts: Mapping[str, str]


def make_runner(
    config: EngineConfig,
    plan: MemoryPlan,
    mesh: Mesh,
    drafting: Drafting,
    model: Model,
    source: ModelSource,
    grammars: GrammarCompiler | None = None,
    balancer: Balancer | None = None,
    workspace: int = 0,
) -> Runner:
    """Allocate what a rank's model runs with, on its device: state, sampler, drafter and captured steps.

    Args:
        grammars: For a rank that samples.
        balancer, workspace: See ``Resident``.
    """
    device, own = model.numerics.device, drafting.own
    cache = StateCache.allocate(replace(model.state_spec, copies=1 + drafting.max_drafts), plan.sizes, device)
    sampler: Sampler | None = None
    if mesh.rank == mesh.layout.reporter(mesh.place.dp):
        rows = min(config.max_num_batched_tokens, config.max_num_seqs * (1 + drafting.max_drafts))
        sampler = Sampler(model.config.vocab_size, device, config.seed, grammars, slots=plan.sizes.slots, rows=rows)
    drafter = None if own is None or not model.shard.last else make_drafter(own, model, cache)
    graphs: StepGraphs | None = None
    # Verify steps are captured as a whole, from ids to logits, so a pipeline captures none.
    if on_gpu(device) and model.capturable and (not drafting.max_drafts or mesh.layout.pp == 1):
        tokens = captured_prompts(config, source.family)
        step = source.family.workspace(model.config, model.numerics, model.shard, tokens=tokens or 1, longest=plan.max_model_len)
        graphs = StepGraphs(
            model,
            cache,
            max_num_seqs=config.max_num_seqs,
            max_model_len=plan.max_model_len,
            widths=graph_widths(drafting.max_drafts, adaptive=drafting.adaptive),
            max_tokens=config.max_num_batched_tokens,
            sampling=sampler,
            drafter=drafter,
            adaptive=drafting.adaptive,
            prompt_tokens=tokens,
            prompt_pool_bytes=prompt_pool_bytes(step),
        )
    resident = Resident(model, cache, source, graphs=graphs, balancer=balancer, workspace=workspace)
    return Runner(model, cache, sampler, graphs, drafter, mesh, balancer, resident)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Probe:
    """Checkpoint and device of a rank that is about to load."""

    config: EngineConfig
    source: ModelSource
    numerics: Numerics
    drafting: Drafting
    report: ProbeReport

    @classmethod
    def of(cls, config: EngineConfig, device: torch.device, rank: int = 0, *, several: bool = False) -> Probe:
        """Read the checkpoint's headers and inspect the device; with ``several`` ranks, collect the facts to compare.

        Raises:
            CheckpointError, ConfigError, UnsupportedError: Settings, checkpoint and device do not fit each other.
        """
        source = ModelSource.open(config)
        numerics = choose_numerics(config, source, device)
        drafting = choose_drafting(config, source)
        if device.type != "cpu":
            require_private(Path(config.compile_cache_dir or default_cache_dir()))
            if numerics.uses_library:
                open_matrix_library(device)  # before the plan measures free memory
        report = ProbeReport(
            plan=make_plan(config, source, numerics, drafting=drafting, rank=rank),
            own=drafting.own,
            chat=None if source.family.chat is None else source.family.chat(source.model),
            model=source.model,
            numerics=numerics,
            default_params=_default_params(source),
            folder=str(source.folder),
            facts=_facts(config, source, device) if several else {},
        )
        return cls(config=config, source=source, numerics=numerics, drafting=drafting, report=report)

    def build(self, plan: MemoryPlan, mesh: Mesh, grammars: GrammarCompiler | None, progress: Progress | None) -> Runner:
        """Load everything; ``grammars`` is for a rank that samples.

        Raises:
            CheckpointError, CapacityError, UnsupportedError: The model cannot be loaded or run.
        """
        try:
            config, device, drafting = self.config, self.numerics.device, self.drafting
            cache_dir = config.compile_cache_dir or default_cache_dir()
            with _early_compiler(cache_dir, device) as compiler:
                model = self.source.build(
                    self.numerics,
                    mesh,
                    with_mtp=drafting.own is not None,
                    dispatcher=config.dispatcher,
                    redundant_experts=config.redundant_experts,
                    seed=config.seed,
                    progress=progress,
                )
                give_back_unused(device)
                balancer = None
                if config.redundant_experts is not None:
                    refill = partial(self.source.fill, numerics=self.numerics, mesh=mesh, seed=config.seed)
                    balancer = Balancer(model, refill, config.rebalance_steps)
                workspace = self.report.plan.per_device[0].workspace - SMALL_BLOCKS
                runner = make_runner(config, plan, mesh, drafting, model, self.source, grammars, balancer, workspace)
                if device.type == "cuda":
                    reserve(device, workspace)
                with torch.inference_mode():
                    runner.warm_up(config.max_num_batched_tokens, plan.max_model_len, cache_dir, compiler, progress)
                return runner
        except Exception as error:
            explained = start_error(error, plan=plan)
            if explained is error:
                raise
            raise explained from error


def _early_compiler(cache_dir: str, device: torch.device) -> AbstractContextManager[Compiler | None]:
    if device.type == "cpu":
        return nullcontext()
    from dsv4lite.kernels.warmup import started_early  # needs Triton, which only GPUs require

    return started_early(cache_dir)


def _default_params(source: ModelSource) -> SamplingParams:
    """Read ``generation_config.json``; its errors are raised before anything is loaded."""
    try:
        params = SamplingParams.from_generation_config(source.generation_config)
        check_token_ids(params, source.model.vocab_size)
    except InvalidRequestError as error:
        raise CheckpointError(f"cannot use {source.folder}/generation_config.json", problems=[str(error)]) from error
    return params


def require_ranks(config: EngineConfig) -> None:
    """Check, from the model's config and without opening a device, that this process can start the ranks of its settings.

    Raises:
        ConfigError: The ranks cannot share the model, or there are fewer devices than ranks.
        CapacityError: This machine has too little memory for the processes, or this process may not open enough files.
    """
    layout = config.layout
    if layout.world > 1:
        source = ModelSource.open(replace(config, load_format="dummy"))
        check_layout(source.model, source.family.tensors, layout)
    count = torch.cuda.device_count()
    on_cpu = config.device == "cpu" or (config.device == "auto" and count == 0)
    if not on_cpu and layout.world > max(1, count):
        raise ConfigError(
            f"{layout} has {layout.world} ranks, one on each GPU, but this machine has {count} CUDA devices; "
            "use fewer ranks, or device='cpu'"
        )
    needed, free = layout.world * _PROCESS_BYTES, host_memory()
    if on_cpu and needed > free:
        raise CapacityError(
            f"{layout} has {layout.world} ranks, each a process of its own: without the model they take {in_gib(needed)}, "
            f"but this machine has {in_gib(free)} free; use fewer ranks"
        )
    require_files(layout)


def require_files(layout: Layout) -> None:
    """Check that this process may open the files of a leader or rank.

    Raises:
        CapacityError: It may not.
    """
    files, (limit, held) = _LEADER_FILES + _RANK_FILES * layout.world, _open_files()
    if held + files > limit:  # the store would accept a connection and never answer
        raise CapacityError(
            f"{layout} has {layout.world} ranks, for whose connections this process must be able to open {files} files: it has "
            f"{held} open, of at most {limit}; raise the limit (ulimit -n {held + files}, resource.setrlimit), or use fewer ranks"
        )


def _open_files() -> tuple[float, int]:
    """Return how many files this process may have open, and how many it has."""
    import resource  # not on every system

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        held = len(os.listdir("/dev/fd")) - 1
    except OSError:  # there is no room for this one
        held = limit
    return math.inf if limit == resource.RLIM_INFINITY else limit, held


def device_of(config: EngineConfig, rank: int) -> torch.device:
    """Return the device of a rank.

    Raises:
        ConfigError, UnsupportedError: The device does not exist or cannot be used.
    """
    several = config.layout.world > 1
    on_gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    if not (several and on_gpu):
        return choose_device(config)
    if config.place_of_ranks == "external":
        own = local_rank()
        rank = rank % max(1, torch.cuda.device_count()) if own is None else own
    return choose_device(replace(config, executor="external", device=f"cuda:{rank}"))


def grammar_compiler(tokenizer: Tokenizer, vocab_size: int) -> tuple[GrammarCompiler | None, str]:
    """Return a compiler, or the reason why there is none, with which requests for a grammar fail."""
    try:
        return GrammarCompiler(tokenizer, vocab_size=vocab_size), ""
    except UnsupportedError as error:
        return None, str(error)  # text only: frames of the error would hold the model


def sendable(config: EngineConfig) -> EngineConfig:
    """Return the settings without objects of the host, so that they can be sent to another process."""
    # Speculators run in the leader's process; other ranks only need the number of draft tokens.
    drafters: tuple[Drafter, ...] = tuple(
        drafter if isinstance(drafter, MTP | DSpark | NGram) else NGram(drafter.k, adaptive=False)
        for drafter in named_drafters(config.speculative)
    )
    speculative = drafters or config.speculative
    return replace(
        config, progress=False, device_mesh=None, process_group=None, executor=config.place_of_ranks, speculative=speculative
    )


def common_plan(reports: Mapping[int, ProbeReport]) -> MemoryPlan:
    """Return the plan of all ranks: each has as many pages and slots as the rank with the fewest.

    Raises:
        ConfigError: Facts that must be equal differ between ranks.
    """
    if problems := differences({rank: report.facts for rank, report in reports.items()}):
        raise ConfigError("the ranks of an engine must have equal settings, software and checkpoints: " + "; ".join(problems))
    return merge_plans([reports[rank].plan for rank in sorted(reports)])


def _facts(config: EngineConfig, source: ModelSource, device: torch.device) -> dict[str, str]:
    """Return the values that must be equal on all ranks, by name."""
    settings = {f.name: repr(getattr(config, f.name)) for f in fields(config) if f.name not in _OWN_TO_A_RANK}
    given = config.dispatcher
    named = given if isinstance(given, FunctionType | type) else type(given)
    return {
        **settings,
        "dispatcher": given if isinstance(given, str) else f"{named.__module__}.{named.__qualname__}",
        "device": device.type,
        **software(),
        "family": source.family.name,
        "weight-only format": "none" if source.form is None else source.form.name,
        "the model's config": _digest([repr(source.model)]),
        "the checkpoint": "dummy" if source.checkpoint is None else _digest(_samples(source.checkpoint)),
    }


def software() -> dict[str, str]:
    """Return the versions that must be equal on all ranks."""
    return {"dsv4lite": installed_version("dsv4lite"), "PyTorch": torch.__version__}


def _samples(checkpoint: Checkpoint) -> Iterable[str]:
    """Yield a sample that differs between checkpoints: all headers, and a few bytes of every file."""
    files: dict[str, Any] = {}
    for name, info in sorted(checkpoint.headers.items()):
        yield f"{name} {info.dtype} {info.shape} {info.file.name} {info.offset}"
        files[info.file.name] = info.file
    for _, file in sorted(files.items()):
        with open_regular(file) as stream:
            size = stream.seek(0, os.SEEK_END)
            yield str(size)
            for part in range(1, 8):
                stream.seek(size * part // 8)
                yield stream.read(_SAMPLE_BYTES).hex()


def _digest(lines: Iterable[str]) -> str:
    found = hashlib.sha256()
    for line in lines:
        found.update(line.encode())
    return found.hexdigest()[:16]
