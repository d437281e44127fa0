"""No kernel is compiled in traffic: what steps launch is among what the warm-up of their rank asks for, whichever layers it has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from dsv4lite.config import tiny_model  # noqa: E402  only where there is Triton
from dsv4lite.engine import step_graphs  # noqa: E402
from dsv4lite.engine.runner import Runner  # noqa: E402
from dsv4lite.engine.step_graphs import StepGraphs  # noqa: E402
from dsv4lite.kernels import dispatch  # noqa: E402
from dsv4lite.kernels.spans import place_spans  # noqa: E402
from dsv4lite.kernels.warmup import recording  # noqa: E402
from dsv4lite.layout import Layout  # noqa: E402
from dsv4lite.models.deepseek_v4.batch import Batch  # noqa: E402
from dsv4lite.models.deepseek_v4.config import parse_config  # noqa: E402
from dsv4lite.models.deepseek_v4.model import DeepseekV4  # noqa: E402
from dsv4lite.paging import PAGE_TOKENS, WINDOW_PAGE_TOKENS  # noqa: E402
from dsv4lite.parallel.mesh import Axis, Mesh  # noqa: E402
from dsv4lite.request import Request, SamplingParams  # noqa: E402
from dsv4lite.sampling.sampler import Sampler  # noqa: E402
from dsv4lite.scheduling.step_plan import SequencePlan, StepPlan  # noqa: E402
from dsv4lite.speculation.drafters import MtpDrafter  # noqa: E402
from dsv4lite.state.store import StateCache, StateSizes  # noqa: E402
from dsv4lite.weights.quant import Numerics  # noqa: E402
from tests.golden import OFFICIAL, rounded  # noqa: E402
from tests.kernels.test_warmup import Hopper  # noqa: E402
from tests.models.paged import make_batch  # noqa: E402
from tests.recorded import Recording, without_device  # noqa: E402

CPU = torch.device("cpu")
MAX_TOKENS, MAX_LENGTH = 700, 8192
LONGEST = 8192
COUNTS = (*range(1, 140, 3), *range(62, 68), 200, 256, 300, 511, 512, 513, 1000, 1025, 2047, 2048, 2049, 3001, 5000, 8191, 8192)
SIZES = StateSizes(grow_pages=8, window_pages=8, slots=4, snapshots=1)


class Deaf:
    """Stands for other ranks, with whom nothing is exchanged."""

    def send(self, *args: Any) -> Deaf:
        return self

    recv = broadcast = allreduce = _allgather_base = send

    def wait(self) -> None:
        pass


@pytest.fixture(autouse=True)
def kernels_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let ops on the CPU take the way of a GPU; no kernel runs, so that a step finds its rows by the reference."""
    monkeypatch.setattr(triton.runtime.driver, "_active", Hopper())
    monkeypatch.setattr(dispatch, "use_triton", lambda *given: True)
    without_device(monkeypatch)

    def placed(*read: Any) -> Any:
        return (place_spans(*read), place_spans.reference(*read))[1]

    monkeypatch.setattr(placed, "reference", place_spans.reference, raising=False)
    monkeypatch.setattr(step_graphs, "place_spans", placed)
    monkeypatch.setattr(StepGraphs, "_record", lambda graphs, work: (Recording(work, result := work()), result))
    with torch.inference_mode():
        yield


def runner_of(mesh: Mesh) -> Runner:
    numerics = replace(rounded(), matrix_dtype=torch.bfloat16, resident_fp8=True, resident_experts="fp4")
    model = DeepseekV4(OFFICIAL, numerics, mesh).requires_grad_(False)
    cache, vocab_size, sampler = StateCache.allocate(model.state_spec, SIZES, CPU), OFFICIAL.vocab_size, None
    if model.shard.last:
        sampler = Sampler(vocab_size, CPU, 0, slots=SIZES.slots, rows=4)
    graphs = StepGraphs(model, cache, max_num_seqs=4, max_model_len=MAX_LENGTH, sampling=sampler)
    runner = Runner(model, cache, sampler, graphs, mesh=mesh)
    for i in range(4):
        params = SamplingParams(max_tokens=9, temperature=0.5 * i, top_p=1 - 0.1 * i)
        runner.add(i, Request(request_id=str(i), prompt_token_ids=(5,) * 5000, params=params, eos_token_id=1), 0)
    return runner


def unwritten(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Return what no launch has written: integers that are no indices."""
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


def span_of(slot: int, start: int, tokens: int) -> SequencePlan:
    """Return some scheduled tokens of the sequence in a slot, in any pages."""
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
    for number, spans in enumerate(STEPS):
        with recording() as launched:
            runner.launch(StepPlan(step=number, sequences=tuple(span_of(*span) for span in spans)))
        assert launched
        missing += [(spans, one.specialization) for one in launched if repr(one.specialization) not in known]
    assert not missing


# Numbers of tokens, of the shipped checkpoint.


def shipped(*ratios: int) -> DeepseekV4:
    """The shipped checkpoint's model with layers of some kinds, the first of which is hashed, and anything for weights."""
    config = parse_config(json.loads((Path(tiny_model()) / "config.json").read_text()))
    config = replace(config, num_hidden_layers=len(ratios), ratios=ratios, num_hash_layers=1, num_mtp_layers=0)
    numerics = Numerics.choose(dtype=torch.bfloat16, quantized=True, deterministic=True, device=CPU)
    numerics = replace(numerics, resident_fp8=True, resident_experts="fp4", matrix_dtype=torch.bfloat16)
    return DeepseekV4(config, numerics)


def prompt_of(model: DeepseekV4, tokens: int) -> Batch:
    """Return a step that reads the beginning of a prompt."""
    pages, windows = -(-tokens // PAGE_TOKENS), -(-tokens // WINDOW_PAGE_TOKENS)
    sequence = SequencePlan(0, 0, 0, (1,) * tokens, tuple(range(pages)), 0, (0,) * windows, sample=True)
    return make_batch(model, [sequence])


def test_no_number_of_tokens_launches_what_warming_up_has_not() -> None:
    model = shipped(0, 4, 128, 0)
    sizes = StateSizes(grow_pages=LONGEST // PAGE_TOKENS + 1, window_pages=1, slots=1, snapshots=0)
    cache = StateCache.allocate(model.state_spec, sizes, CPU)
    runner = Runner(model, cache, None)
    with recording() as wanted:
        runner.dry_run(LONGEST, LONGEST)
    ready = {repr(one.specialization) for one in wanted}
    assert len(ready) > 40
    late: dict[str, int] = {}
    for tokens in COUNTS:
        with recording() as wanted:
            model(prompt_of(model, tokens), cache.layers)
        for one in wanted:
            if repr(one.specialization) not in ready:
                late.setdefault(one.specialization.name, tokens)
    assert late == {}


def test_brief_passes_launch_what_whole_ones_do() -> None:
    model = shipped(0, *(0, 4, 128) * 4)
    sizes = StateSizes(grow_pages=2, window_pages=1, slots=1, snapshots=0)
    cache = StateCache.allocate(model.state_spec, sizes, CPU)
    ran: list[int] = []
    for number, block in enumerate(model.layers):
        block.register_forward_pre_hook(lambda *_, number=number: ran.append(number))
    for tokens in (1, 9, 40, 300):
        found = []
        for brief in (True, False):
            with recording() as wanted, model.skip_repeated_layers() if brief else nullcontext():
                model(prompt_of(model, tokens), cache.layers)
            found.append({repr(one.specialization) for one in wanted})
        assert found[0] == found[1]
        assert ran == [*range(7), *range(len(model.layers))]
        ran.clear()
