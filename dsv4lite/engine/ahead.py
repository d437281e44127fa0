"""Compiles the kernels of an engine for a GPU that is not here, into a folder from which engines on other machines load them.

Every rank's model, state and captured steps are allocated on tensors without memory, which stand for those of the GPU, and launch
what a start would launch; nothing runs. What is asked for has the same source, types, constants, alignments and options as on the
GPU, so that Triton's names of the compiled kernels are the same. They also depend on the versions of this package, Triton and its
assembler, which must be those of the machine that loads them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from dsv4lite.config import EngineConfig, default_cache_dir
from dsv4lite.device import find_chip, require_private
from dsv4lite.engine.rank import RunnerParts
from dsv4lite.engine.runner import Runner
from dsv4lite.errors import UnsupportedError
from dsv4lite.kernels.dispatch import AbsentGpu
from dsv4lite.layout import AXES, Layout
from dsv4lite.models.family import Model
from dsv4lite.parallel.mesh import Axis, Mesh
from dsv4lite.parallel.peer_memory import MOST_NUMBERS, SIZES, PeerMemory
from dsv4lite.planning.memory import choose_drafting, choose_numerics, make_plan, merge_plans, require_fit
from dsv4lite.weights.source import ModelSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What ``compile_ahead`` did.

    Attributes:
        gpu: Name of the GPU.
        kernels: How many kernels the engine needs.
        missing: How many could not be compiled; an engine compiles them at its start.
        folder: Where they are.
    """

    gpu: str
    kernels: int
    missing: int
    folder: str

    def __str__(self) -> str:
        left = f", {self.missing} of which could not be compiled" if self.missing else ""
        return f"{self.kernels} kernels for {self.gpu}{left}, in {self.folder}"


class _NoGroup:
    """Stands for a process group: nothing is exchanged."""

    supports_coalescing = True

    def __getattr__(self, name: str) -> Callable[..., _NoGroup]:
        return lambda *args, **options: self


def compile_ahead(config: EngineConfig, gpu: str, progress: Callable[[int, int], None] | None = None) -> Compiled:
    """Compile all kernels that an engine with these settings launches on a GPU; for a process in which nothing else runs kernels.

    Args:
        config: Settings of the engine; ``compile_cache_dir`` is where the kernels go. Weights are not read.
        gpu: Name of the GPU in ``device.CHIPS``.
        progress: Called with how many kernels are ready, and of how many.

    Raises:
        ConfigError, CheckpointError, CapacityError: There could be no such engine.
        UnsupportedError: Triton is not installed.
    """
    try:
        from dsv4lite.kernels.warmup import prepare, pretended, recording
    except ImportError as error:
        raise UnsupportedError(f"kernels are compiled by Triton, which is not installed: {error}") from error
    chip, folder = find_chip(gpu), Path(config.compile_cache_dir or default_cache_dir())
    require_private(folder)
    source = ModelSource.open(config, fetch=False)
    numerics, drafting = choose_numerics(config, source, torch.device("cuda")), choose_drafting(config, source)
    of_rank = partial(make_plan, config, source, numerics, drafting=drafting, total=chip.memory_bytes, target=chip.name)
    plan = merge_plans([of_rank(rank=rank) for rank in range(config.layout.world)])
    require_fit(plan)
    major, minor = chip.capability
    with pretended(AbsentGpu(10 * major + minor, chip.multiprocessors)) as device, torch.inference_mode():
        wanted = {}
        for rank in range(config.layout.world):
            mesh = _silent_mesh(config.layout, rank, device)
            empty = source.family.build(
                source.model,
                replace(numerics, device=device),
                mesh,
                dispatcher=config.dispatcher,
                redundant_experts=config.redundant_experts,
                with_mtp=drafting.own is not None,
            )
            model: Model = empty.requires_grad_(False).eval()
            parts = RunnerParts.of(config, plan, mesh, drafting, model, source.family)
            runner = Runner(model, parts.cache, parts.sampler, parts.graphs, parts.drafter, mesh)
            with recording() as found, model.skip_repeated_layers():
                runner.dry_run(config.max_num_batched_tokens, plan.max_model_len)
            wanted.update({repr(one.specialization): one for one in found})
        missing = prepare(list(wanted.values()), folder, progress)
    return Compiled(gpu=chip.name, kernels=len(wanted), missing=missing, folder=str(folder))


def _silent_mesh(layout: Layout, rank: int, device: torch.device) -> Mesh:
    """Return the mesh of one rank whose collectives exchange nothing; memory of peers is open where GPUs of one machine have it."""
    near, memory = layout.group(layout.exchanging, rank), None
    if len(near) in SIZES:
        waits = torch.zeros(1, dtype=torch.int32, device="cpu")
        memory = PeerMemory.of([0] * len(near), near.index(rank), MOST_NUMBERS, waits, device)
    axes = {}
    for name in (*AXES, "replica"):
        ranks = layout.group(name, rank)
        group = _NoGroup() if len(ranks) > 1 else None
        axes[name] = Axis(name, ranks.index(rank), len(ranks), group, memory if name == layout.exchanging else None)
    return Mesh(layout=layout, rank=rank, **axes)
