"""Steps of whole engines on the shipped checkpoint, layer by layer, against the ordinary reference path from its own inputs.

An engine runs long prompts: entries are selected, prefixes are found in the cache, prompts run beside single tokens, and sequences
are preempted and run again. One step of each kind is saved. Each of its layers then runs twice on the state that the engine had: in
the ops on pages, which on CUDA (``-m gpu``, 32 K tokens) are the kernels, and in the ordinary way with weights in float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4lite.config import tiny_model
from dsv4lite.debug.replay import RebuiltStep, load_model, rebuild, replay
from dsv4lite.engine.dump import StepDump
from dsv4lite.engine.recorder import StepRecorder
from dsv4lite.engine.step_graphs import GraphShape
from dsv4lite.kernels.qk_norm_rope import triton as heads_triton
from dsv4lite.llm import LLM
from dsv4lite.models.deepseek_v4.model import DeepseekV4
from dsv4lite.request import SamplingParams
from dsv4lite.scheduling.step_plan import StepPlan
from tests.e2e.engines import opened, prompts_of, room_for
from tests.models.test_official_golden import distance

LONG = {"cpu": 320, "cuda": 32_000}
CHUNK = {"cpu": 64, "cuda": 2048}
DECODED = {"cpu": 16, "cuda": 400}  # enough for another request to arrive meanwhile
GPU = [pytest.param("cuda", marks=pytest.mark.gpu)]
KINDS = ("prefill", "decode", "prefix", "mixed", "resumed")
LIMIT = {"cpu": 5e-3, "cuda": 3.5e-2}  # of a whole layer; on CUDA that for the official data, where rounding differs, too


@dataclass
class Chooser:
    """Has the first step of each kind saved."""

    folder: Path
    long: int
    saved: dict[str, Path]
    ends: dict[int, int]

    def kinds(self, plan: StepPlan) -> Iterator[str]:
        lengths = [len(s.token_ids) for s in plan.sequences]
        last = [s.start for s in plan.sequences if s.start >= self.long]
        if max(lengths) > 1 and last:
            yield "mixed" if lengths[0] == 1 else "prefill"
        if max(lengths) == 1 < len(lengths) and last:
            yield "decode"
        if plan.restores:
            yield "prefix"
        if any(s.start < self.ends.get(s.seq_id, 0) for s in plan.sequences):
            yield "resumed"
        self.ends.update((s.seq_id, s.end) for s in plan.sequences)

    def begin(self, recorder: StepRecorder, plan: StepPlan, graph: GraphShape | None) -> None:
        for kind in self.kinds(plan):
            if kind not in self.saved:
                self.saved[kind] = self.folder / kind
                recorder.request(self.saved[kind])


@pytest.fixture(scope="module", params=["cpu", *GPU])
def steps(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """One step of each kind."""
    device, folder, begin = request.param, tmp_path_factory.mktemp("steps"), StepRecorder.begin
    length, chunk = LONG[device], CHUNK[device]
    chooser = Chooser(folder, length - chunk, {}, {})

    def choose(recorder: StepRecorder, plan: StepPlan, graph: GraphShape | None) -> None:
        chooser.begin(recorder, plan, graph)
        begin(recorder, plan, graph)

    settings: dict[str, Any] = {
        "device": device,
        "dump_dir": folder / "failures",
        "max_num_batched_tokens": chunk,
        "max_model_len": length + 512,
        "prefix_checkpoint_tokens": 256,
        "hf_overrides": {"max_position_embeddings": 65536},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepRecorder, "begin", choose)
        with opened(tiny_model(), **settings, kv_cache_memory_bytes=256 << 20) as llm:
            long(llm, length, DECODED[device])
        small: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 512, "enable_prefix_caching": False}
        room = room_for(Path(tiny_model()), 2, **small)
        chooser.ends.clear()
        with opened(tiny_model(), **(settings | small), kv_cache_memory_bytes=room) as llm:
            assert llm.memory().sizes.grow_pages == 2
            llm.generate_batch(prompts_of((250, 248), 4096, seed=7), greedy(12))
            assert llm.stats().preemptions > 0
    assert not list((folder / "failures").iterdir())
    return chooser.saved


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def long(llm: LLM, length: int, decoded: int) -> None:
    """Run a long prompt, then its beginning with another end while it decodes, all past the point where entries are selected."""
    prompt, end = prompts_of((length, 70), 4096, seed=5)
    with llm.stream(prompt, greedy(decoded)) as stream:
        next(iter(stream))
        llm.generate([*prompt[: length - 40], *end], greedy(3))
        stream.final()


@pytest.fixture(scope="module")
def models(steps: Mapping[str, Path]) -> tuple[DeepseekV4, DeepseekV4]:
    """The model with quantized weights, where the steps ran, and the one with widened weights on the CPU."""
    dump = StepDump.load(steps["prefill"])
    paged = replace(dump.numerics, matrix_dtype=torch.bfloat16, resident_fp8=True, resident_experts="fp4")
    plain = {"matrix_dtype": torch.float32, "resident_fp8": False, "resident_experts": "unquantized"}
    ordinary = replace(paged, device=torch.device("cpu"), **plain)
    return load_model(dump.settings, paged), load_model(dump.settings, ordinary)


def through(step: RebuiltStep, layer: int, streams_TND: Tensor) -> Tensor:
    """Run one layer; padding gets anything."""
    missing = len(step.batch.token_ids_T) - len(streams_TND)
    padded = torch.cat([streams_TND, streams_TND[-1:].expand(missing, -1, -1)]).to(step.cache.device)
    streams = step.model._streams(padded)
    step.model.layers[layer](streams, step.batch, step.cache.layers[layer])
    return streams.final()[: len(streams_TND)].cpu()


@pytest.mark.parametrize("kind", KINDS)
def test_layers_agree_with_the_reference_from_its_inputs(
    steps: Mapping[str, Path], models: tuple[DeepseekV4, DeepseekV4], kind: str
) -> None:
    dump, distances = StepDump.load(steps[kind]), []
    with torch.inference_mode():
        ours, theirs = (rebuild(dump, model) for model in models)
        streams_TND = theirs.model.embed[theirs.batch.token_ids_T][:, None].repeat(1, theirs.model.config.streams, 1)
        for layer in range(len(theirs.model.layers)):
            got, streams_TND = through(ours, layer, streams_TND), through(theirs, layer, streams_TND)
            distances.append(distance(got, streams_TND))
    assert max(distances) < LIMIT[dump.numerics.device.type], distances


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", GPU, indirect=True)
def test_kernels_agree_with_their_references(steps: Mapping[str, Path], kind: str) -> None:
    assert (StepDump.load(steps[kind]).graph is not None) == (kind == "decode")
    report = replay(steps[kind])
    assert report.first is None, str(report)
    compared = {op.op for op in report.ops if op.compared}
    assert all(op.compared for op in report.ops if op.op != "head_norms") and "head_norms" in compared, str(report)
    if kind != "resumed":
        assert {"choose_paged", "paged_attention"} <= {op.op for op in report.ops}


@pytest.mark.parametrize("steps", GPU, indirect=True)
def test_a_wrong_kernel_of_a_captured_step_is_named(steps: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    launch, calls = heads_triton.head_norms_triton, itertools.count()

    def wrong(*args: Any) -> Any:
        q_THC, iq_THC = launch(*args)
        q_THC[0, 3, :5] *= 2 if iq_THC is not None and next(calls) == 1 else 1  # the second layer that chooses
        return q_THC, iq_THC

    monkeypatch.setattr(heads_triton, "head_norms_triton", wrong)
    first = replay(steps["decode"]).first
    assert first is not None and (first.place, first.op) == ("layers.4.attn", "head_norms")
