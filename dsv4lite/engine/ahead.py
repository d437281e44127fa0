"""Compiles an engine's kernels ahead of time for a GPU that this machine lacks, into a folder from which engines load them.

Model, state and captured steps of every rank are built on tensors without memory, which stand for those of the GPU. A dry run
records the launches of a start; no kernel runs. The recorded kernels have the same source, types, constants, alignments and options
as on the GPU, and hence the same cache keys in Triton. The keys also depend on the versions of this package, Triton and its
assembler, which must be equal on the machine that loads the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from dsv4lite.config import EngineConfig, default_cache_dir
from dsv4lite.device import find_chip, require_private
from dsv4lite.engine.rank import make_runner
from dsv4lite.errors import UnsupportedError
from dsv4lite.kernels.dispatch import Gpu
from dsv4lite.layout import AXES, Layout
from dsv4lite.models.family import Model
from dsv4lite.parallel.mesh import Mesh
from dsv4lite.parallel.peer_memory import MOST_NUMBERS, SIZES, PeerMemory
from dsv4lite.planning.memory import choose_drafting, choose_numerics, make_plan, merge_plans, require_fit
from dsv4lite.weights.source import ModelSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What ``compile_ahead`` did.

    Attributes:
        gpu: Name of the GPU.
        kernels: Number of kernels that the engine needs.
        missing: Number of those that could not be compiled; an engine compiles them at its start.
        folder: Folder of the compiled kernels.
    """

    gpu: str
    kernels: int
    missing: int
    folder: str

    def __str__(self) -> str:
        left = f", {self.missing} of which could not be compiled" if self.missing else ""
        return f"{self.kernels} kernels for {self.gpu}{left}, in {self.folder}"


class _NoGroup:
    """Stands for a process group; its methods do nothing."""

    supports_coalescing = True

    def __getattr__(self, name: str) -> Callable[..., _NoGroup]:
        return lambda *args, **options: self


def compile_ahead(config: EngineConfig, gpu: str, progress: Callable[[int, int], None] | None = None) -> Compiled:
    """Compile all kernels that an engine with these settings launches on a GPU. No other code of the process may run kernels.

    Args:
        config: Settings of the engine; ``compile_cache_dir`` is where the kernels go. Weights are not read.
        gpu: Name of the GPU in ``device.CHIPS``.
        progress: Called with the numbers of finished kernels and of all kernels.

    Raises:
        ConfigError, CheckpointError, CapacityError: An engine with these settings could not start.
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
    with pretended(Gpu(10 * major + minor, chip.multiprocessors)) as device, torch.inference_mode():
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
            runner = make_runner(config, plan, mesh, drafting, model, source)
            with recording() as found, model.skip_repeated_layers():
                runner.dry_run(config.max_num_batched_tokens, plan.max_model_len)
            wanted.update({repr(one.specialization): one for one in found})
        missing = prepare(list(wanted.values()), folder, progress)
    return Compiled(gpu=chip.name, kernels=len(wanted), missing=missing, folder=str(folder))


def _silent_mesh(layout: Layout, rank: int, device: torch.device) -> Mesh:
    """Return the mesh of one rank whose collectives do nothing, with peer memory where GPUs of one machine would have it."""
    near, memory = layout.group(layout.exchanging, rank), None
    if len(near) in SIZES:
        waits = torch.zeros(1, dtype=torch.int32, device="cpu")
        memory = PeerMemory.of([0] * len(near), near.index(rank), MOST_NUMBERS, waits, device)
    groups = {ranks: _NoGroup() for name in (*AXES, "replica") if len(ranks := layout.group(name, rank)) > 1}
    return Mesh.of(layout, rank, groups, memory)
