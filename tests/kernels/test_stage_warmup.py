"""No kernel is compiled in traffic: what steps launch is among what the warm-up of their rank asks for, whichever layers it has."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402  only where there is Triton

import dsv4lite.kernels  # noqa: E402
from dsv4lite.engine import step_graphs  # noqa: E402
from dsv4lite.engine.runner import Runner  # noqa: E402
from dsv4lite.engine.step_graphs import StepGraphs  # noqa: E402
from dsv4lite.kernels.gemm import triton as gemm_triton  # noqa: E402
from dsv4lite.kernels.runs import place_runs, place_runs_ref  # noqa: E402
from dsv4lite.kernels.warmup import recording  # noqa: E402
from dsv4lite.layout import Layout  # noqa: E402
from dsv4lite.models.deepseek_v4.model import DeepseekV4  # noqa: E402
from dsv4lite.parallel.mesh import Axis, Mesh  # noqa: E402
from dsv4lite.request import Request, SamplingParams  # noqa: E402
from dsv4lite.sampling.sampler import Sampler  # noqa: E402
from dsv4lite.scheduling.step_plan import SequencePlan, StepPlan  # noqa: E402
from dsv4lite.speculation.mtp import MtpDrafter  # noqa: E402
from dsv4lite.state.store import StateCache, StateSizes  # noqa: E402
from tests.golden import OFFICIAL, rounded  # noqa: E402
from tests.recorded import Recording, without_device  # noqa: E402

CPU = torch.device("cpu")
MAX_TOKENS, MAX_LENGTH = 700, 8192
SIZES = StateSizes(grow_pages=8, window_pages=8, slots=4, snapshots=1)


class Hopper:
    """A driver that knows its device by name only: whoever launches fails."""

    def get_current_device(self) -> int:
        return 96

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)


class Deaf:
    """Stands for other ranks, with whom nothing is exchanged."""

    def send(self, *args: Any) -> Deaf:
        return self

    recv = broadcast = allreduce = send

    def wait(self) -> None:
        pass


@pytest.fixture(autouse=True)
def kernels_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let ops on the CPU take the way of a GPU; no kernel runs, so that a step finds its rows by the reference."""
    monkeypatch.setattr(triton.runtime.driver, "_active", Hopper())
    for info in pkgutil.walk_packages(dsv4lite.kernels.__path__, "dsv4lite.kernels."):
        module = importlib.import_module(info.name)
        if "use_triton" in vars(module):
            monkeypatch.setattr(module, "use_triton", lambda *given: True)
    monkeypatch.setattr(gemm_triton, "_library_linear", lambda x, w, dtype: torch.empty(*x.shape[:2], w.shape[1], dtype=dtype))
    without_device(monkeypatch)
    monkeypatch.setattr(step_graphs, "place_runs", lambda *read: (place_runs(*read), place_runs_ref(*read))[1])
    monkeypatch.setattr(StepGraphs, "_record", lambda graphs, work: (Recording(work, result := work()), result))
    with torch.inference_mode():
        yield


def runner_of(mesh: Mesh) -> Runner:
    numerics = replace(rounded(), matrix_dtype=torch.bfloat16, resident_fp8=True, resident_experts="fp4")
    model = DeepseekV4(OFFICIAL, numerics, mesh).requires_grad_(False)
    cache, vocab_size, sampler = StateCache.allocate(model.state_spec, SIZES, CPU), OFFICIAL.vocab_size, None
    if model.share.last:
        sampler = Sampler(vocab_size, CPU, 0, slots=SIZES.slots, rows=4)
    graphs = StepGraphs(model, cache, max_num_seqs=4, max_model_len=MAX_LENGTH, sampling=sampler)
    runner = Runner(model, cache, sampler, graphs, mesh=mesh)
    for i in range(4):
        params = SamplingParams(max_tokens=9, temperature=0.5 * i, top_p=1 - 0.1 * i)
        runner.add(i, Request(request_id=str(i), prompt_token_ids=(5,) * 5000, params=params, eos_token_id=1), 0)
    return runner


def unwritten(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Return what no launch has written: integers by which nobody may index."""
    out = torch.zeros(*args, **kwargs)
    return out.fill_(torch.iinfo(out.dtype).max) if out.dtype in (torch.int32, torch.int64) else out


def test_dry_run_of_draft_tokens_needs_nothing_that_kernels_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """A regression: rows of a step whose kernels did not run were looked up wherever the memory said."""
    numerics = replace(rounded(), matrix_dtype=torch.bfloat16, resident_fp8=True, resident_experts="fp4")
    model = DeepseekV4(OFFICIAL, numerics, with_mtp=True).requires_grad_(False)
    cache = StateCache.allocate(replace(model.state_spec, copies=3), SIZES, CPU)
    sampler = Sampler(OFFICIAL.vocab_size, CPU, 0, slots=SIZES.slots, rows=12)
    drafter = MtpDrafter(model, cache.layers[-1], 2)
    most: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": MAX_LENGTH, "max_tokens": 12}
    graphs = StepGraphs(model, cache, **most, widths=(1, 3), sampling=sampler, drafter=drafter)
    monkeypatch.setattr(torch, "empty", unwritten)
    with recording() as wanted:
        for shape in graphs.shapes:
            graphs.dry_run(shape)
    assert sum(one.specialization.name == "_place_kernel" for one in wanted) >= 2


def run_of(slot: int, start: int, tokens: int) -> SequencePlan:
    """A run of some tokens of the sequence in a slot; what its pages are called is of no importance here."""
    first, end = max(0, start - 127) // 64, start + tokens
    pages, window = (0,) * -(-end // 256), (0,) * ((end - 1) // 64 + 1 - first)
    return SequencePlan(slot, slot, start, (5,) * tokens, pages, first, window, True)


STEPS = [
    *([(0, start, tokens)] for start in (0, 300, 4090) for tokens in (2, 9, 20, 100, 300, MAX_TOKENS)),
    [(0, 100, 1), (1, 0, 37), (2, 0, 64)],
    [(0, 4095, 1), (1, 0, 3)],
    *([(slot, 5000 if slot else 3, 1) for slot in range(count)] for count in (1, 2, 3, 4)),
]


@pytest.mark.parametrize(
    ("layout", "rank"),
    [(Layout(), 0), (Layout(pp=2), 0), (Layout(pp=2), 1), (Layout(ep=2), 1)],
    ids=["whole", "first stage", "last stage", "second copy"],
)
def test_steps_launch_what_warm_up_asked_for(layout: Layout, rank: int) -> None:
    sizes = {"pp": layout.pp, "ep": layout.ep, "replica": layout.world}
    axes = {name: Axis(name, rank if size > 1 else 0, size, Deaf() if size > 1 else None) for name, size in sizes.items()}
    runner = runner_of(Mesh(layout=layout, rank=rank, **axes))
    with recording() as wanted:
        runner.dry_run(MAX_TOKENS, MAX_LENGTH)
    known = {repr(one.specialization) for one in wanted}
    missing = []
    for number, runs in enumerate(STEPS):
        with recording() as launched:
            runner.launch(StepPlan(step=number, sequences=tuple(run_of(*run) for run in runs)))
        assert launched
        missing += [(runs, one.specialization) for one in launched if repr(one.specialization) not in known]
    assert not missing
