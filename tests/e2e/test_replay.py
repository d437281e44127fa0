"""Saved steps, and their replay op by op."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsv4lite.__main__ import main
from dsv4lite.config import MTP, DSpark, tiny_model
from dsv4lite.debug import replay as replay_file
from dsv4lite.debug.replay import replay
from dsv4lite.engine import rank, runner
from dsv4lite.engine import recorder as recorder_file
from dsv4lite.engine.dump import VERSION, StepDump
from dsv4lite.engine.recorder import StepRecorder
from dsv4lite.engine.step_graphs import GraphShape
from dsv4lite.errors import ConfigError, EngineDeadError, RequestFailedError
from dsv4lite.kernels import compress
from dsv4lite.kernels import qk_norm_rope as heads
from dsv4lite.kernels.compress import triton as compress_triton
from dsv4lite.kernels.qk_norm_rope import triton as heads_triton
from dsv4lite.llm import LLM, AsyncLLM
from dsv4lite.models import moe
from dsv4lite.models.deepseek_v4 import model as deepseek_v4
from dsv4lite.planning.memory import choose_numerics
from dsv4lite.request import SamplingParams
from dsv4lite.scheduling.step_plan import StepPlan
from dsv4lite.speculation import drafters
from dsv4lite.state.store import StateCache
from dsv4lite.weights import quant
from dsv4lite.weights.quant import Numerics
from tests.e2e.engines import MODEST, REFRESHED, SMALL, engine_of, nan_embedding, opened, prompts_of, write_model
from tests.mla import write_random_model

VOCAB = SMALL["vocab_size"]
POISON = VOCAB - 1
SHORT, LONG, OTHER = prompts_of((20, 300, 170), VOCAB - 1, seed=9)


NO_KERNELS = "there are no kernels on 'cpu': only numbers that are not finite were looked for"


def some(**settings: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 4, "temperature": 0, "ignore_eos": True, **settings})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("small"), change=nan_embedding)


def recorder_of(llm: LLM) -> StepRecorder:
    return engine_of(llm)._recorder


def dumps(folder: Path) -> list[Path]:
    return sorted(folder.glob("*"))


def on_paged_state(*args: Any) -> Numerics:
    """Choose what a GPU would choose."""
    numerics = choose_numerics(*args)
    return replace(numerics, matrix_dtype=torch.bfloat16, resident_fp8=True, resident_experts="fp4")


@pytest.fixture(scope="module")
def paged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Steps of the shipped checkpoint on packed state: one token and a part of a prompt, and two single tokens."""
    folder = tmp_path_factory.mktemp("paged")
    saved: dict[str, Path] = {}

    def path_of(plan: StepPlan) -> Path | None:
        lengths = [len(s.token_ids) for s in plan.sequences]
        name = "mixed" if lengths[0] == 1 < lengths[-1] else "decode" if lengths == [1, 1] else ""
        if not name or name in saved:
            return None
        saved[name] = folder / name
        return saved[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank, "choose_numerics", on_paged_state)
        save_steps(patch, path_of)
        with opened(tiny_model(), dump_dir=folder / "failures", max_num_batched_tokens=64) as llm:
            llm.generate_batch(prompts_of((60, 40), 4096, seed=5), some())
    assert set(saved) == {"mixed", "decode"} and dumps(folder / "failures") == []
    return saved


def save_steps(patch: pytest.MonkeyPatch, path_of: Callable[[StepPlan], Path | None]) -> None:
    """Have each step saved for which ``path_of`` returns a path."""
    begin = StepRecorder.begin

    def choose(recorder: StepRecorder, plan: StepPlan, graph: GraphShape | None) -> None:
        path = path_of(plan)
        if path is not None:
            recorder.request(path)
        begin(recorder, plan, graph)

    patch.setattr(StepRecorder, "begin", choose)


def header_of(path: Path) -> str:
    with safe_open(path, "pt") as file:
        return str(file.metadata()["dsv4lite.step"])


def edit(path: Path, target: Path, *, sealed: bool = True, **changes: Any) -> Path:
    """Write a dump with other entries in its header; ``sealed``, as if they were saved so."""
    header = json.loads(header_of(path))
    header = {key: value for key, value in (header | changes).items() if key not in changes or value is not None}
    text = json.dumps(header)
    digest = sha256((text if sealed else header_of(path)).encode()).hexdigest()
    save_file(load_file(path), target, {"dsv4lite.step": text, "dsv4lite.sha256": digest})
    return target


# --------------------------------------------------------------------------------------------------------------- findings


def test_healthy_steps_have_no_wrong_op(paged: dict[str, Path], tmp_path: Path) -> None:
    dump = StepDump.load(paged["mixed"])
    assert [len(s.token_ids) for s in dump.plan.sequences] == [1, 36] and dump.graph is None
    assert dump.reason == "it was requested" and dump.versions["torch"] == version("torch")
    report = replay(paged["mixed"])
    assert report.first is None and report.notes == (NO_KERNELS,) and {op.layer for op in report.ops} == {None, *range(6)}
    assert not any(op.compared for op in report.ops), "there are no kernels on a CPU"


def test_captured_steps_are_replayed_with_their_padding(paged: dict[str, Path], tmp_path: Path) -> None:
    """A graph has padding, and selects entries at any length."""
    report = replay(
        edit(paged["decode"], tmp_path / "graph", graph={"sequences": 4, "width": 1, "max_model_len": 1024, "drafts": False})
    )
    assert report.first is None
    assert [op.place for op in report.ops if op.op == "choose_paged"] == ["layers.2.attn", "layers.4.attn"]
    assert next(op for op in report.ops if op.op == "head_norms").differences[0].count == 2 * 8 * 128, "padding is not looked at"


Launcher = Callable[..., Any]


def break_kernel(patch: pytest.MonkeyPatch, name: str, call: int, change: Launcher) -> None:
    """Let the kernel of an op return what its reference returns, changed in one call."""
    op, module = {
        "head_norms": (heads.head_norms, heads_triton),
        "compress_step": (compress.compress_step, compress_triton),
    }[name]
    calls = itertools.count()

    def launch(*args: Any) -> Any:
        result = op.reference(*args)
        return change(result, *args) if next(calls) == call else result

    patch.setattr(op, "launches", lambda *args: True)
    patch.setattr(module, f"{name}_triton", launch)


def wrong_query(result: Any, *args: Any) -> Any:
    q_THC = result[0].clone()
    q_THC[-1, 3, :5] *= 2
    return q_THC, *result[1:]


def not_finite(result: Any, *args: Any) -> Any:
    return result[0] * float("nan"), *result[1:]


def failing(result: Any, *args: Any) -> Any:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def wrong_row(result: Any, *args: Any) -> None:
    args[0].store.memory[0] = 0x38


@pytest.mark.parametrize(
    ("op", "call", "change", "place", "problem"),
    [
        ("head_norms", 3, wrong_query, "layers.3.attn", "output 0 is .* from the reference"),
        ("head_norms", 2, not_finite, "layers.2.attn", "output 0: .* not finite, 0 of the reference's"),
        ("head_norms", 4, failing, "layers.4.attn", "raised RuntimeError: CUDA error"),
        ("compress_step", 3, wrong_row, "layers.4.attn.compressor", "output state 4 is .* from the reference"),
    ],
)
def test_a_wrong_kernel_is_named(
    paged: dict[str, Path], monkeypatch: pytest.MonkeyPatch, op: str, call: int, change: Launcher, place: str, problem: str
) -> None:
    break_kernel(monkeypatch, op, call, change)
    report = replay(paged["mixed"])
    assert {ran.op for ran in report.ops if ran.compared} == {op}
    first = report.first
    assert first is not None and (first.op, first.place) == (op, place)
    assert re.search(problem, str(first.problem))
    wrong = [ran for ran in report.ops if ran.problem is not None]
    assert wrong == [first] or "not finite" in problem, "later ops are compared with references on the same inputs"
    assert f"first op that is wrong: {place}: {op}(" in str(report) and report.table().count("<--") >= 1


def test_command_line_names_a_wrong_kernel(
    paged: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(paged["decode"])]) == 0
    assert capsys.readouterr().out.endswith("no op is wrong\n")
    break_kernel(monkeypatch, "head_norms", 1, wrong_query)
    assert main(["replay", str(paged["mixed"]), "--all"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "layers.1.attn: head_norms(" in lines[-1] and sum(line.endswith("<--") for line in lines) == 1


def test_failed_replay_restores_the_ops_of_the_models(paged: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:

    def names() -> dict[str, Any]:
        return {f"{file.__name__}.{name}": op for file in (deepseek_v4, moe, quant, heads) for name, op in vars(file).items()}

    before = names()
    monkeypatch.setattr(deepseek_v4.DeepseekV4, "logits", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        replay(paged["decode"])
    assert names() == before


@pytest.mark.parametrize(
    ("config", "own"), [(SMALL, MTP(2, adaptive=False)), (REFRESHED, DSpark(3, adaptive=False))], ids=["MTP", "DSpark"]
)
def test_the_drafter_drafts_again(
    config: dict[str, Any], own: MTP | DSpark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state from earlier steps is saved; weights of it that are not finite are named, though they fail no request."""
    drafts: list[Tensor] = []

    def spied(*args: Any) -> Any:
        drafts.append(drafters.draft(*args))
        return drafts[-1]

    def spoiled(name: str, tensor: Tensor) -> Tensor:
        return tensor * float("nan") if name == "mtp.0.attn.wo_b.weight" else tensor

    for file in (runner, replay_file):
        monkeypatch.setattr(file, "draft", spied)
    healthy, ill = write_model(tmp_path / "model", config), write_model(tmp_path / "ill", config, change=spoiled)
    path = tmp_path / "step"
    with opened(healthy, speculative=own, max_num_batched_tokens=64) as llm:
        monkeypatch.setattr(StepRecorder, "active", property(lambda recorder: True))
        save_steps(monkeypatch, lambda plan: path if plan.sequences[0].end == len(LONG) else None)
        llm.generate(LONG, some(max_tokens=8))
    assert StepDump.load(path).plan.max_drafts == own.k
    wanted = next(draft for draft in drafts if draft is not None)
    report = replay(path)
    assert report.first is None and torch.equal(drafts[-1], wanted)
    first = replay(path, model=str(ill)).first
    assert first is not None and first.weights == first.bad_weights and first.weights[0].startswith(("mtp.0", "dspark.stages.0"))


# ------------------------------------------------------------------------------------------------------------- saved steps


def test_a_weight_that_is_not_finite_is_saved_once_and_named(tmp_path: Path) -> None:
    def spoiled(name: str, tensor: Tensor) -> Tensor:
        return tensor.index_fill(0, torch.tensor([3]), float("nan")) if name == "layers.1.attn.wo_b.weight" else tensor

    folder = tmp_path / "dumps" / "here"
    with opened(write_model(tmp_path / "model", change=spoiled), dump_dir=folder) as llm:
        outputs = llm.generate_batch([SHORT, LONG, OTHER], some(), on_error="return")
        assert all(isinstance(output.error, RequestFailedError) for output in outputs)
        assert not recorder_of(llm).active
    (path,) = dumps(folder)
    report = replay(path)
    assert re.fullmatch(r"streams or logits of sequences \[0.*\] are not finite", report.reason)
    first = report.first
    assert first is not None and (first.place, first.op) == ("layers.1.attn", "float_linear")
    assert first.weights == first.bad_weights == ("layers.1.attn.wo_b.weight",) and first.bad_inputs == 0
    assert report.notes[0] == "parameters that are not finite: layers.1.attn.wo_b.weight"


def tokens_of(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    outputs = llm.generate_batch(prompts, some(), on_error="return")
    return [None if output.error is not None else output.token_ids for output in outputs]


@pytest.mark.parametrize("overlap", [False, True])
def test_the_first_step_with_a_nan_is_saved_and_others_go_on(model: Path, tmp_path: Path, overlap: bool) -> None:
    """It is the step that reads the bad token, although it samples nothing there; it also runs another sequence's prompt."""
    prompts = [SHORT, [*LONG[:100], POISON, *LONG[100:]], OTHER]
    settings = {"max_num_batched_tokens": 128, "deterministic": True, "overlap": overlap}
    with opened(model, **settings) as llm:
        expected = tokens_of(llm, prompts)
    with opened(model, dump_dir=str(tmp_path), **settings) as llm:
        assert tokens_of(llm, prompts) == expected and expected.count(None) == 1
    (path,) = dumps(tmp_path)
    plan = StepDump.load(path).plan
    assert [(s.start, len(s.token_ids), s.sample) for s in plan.sequences] == [(0, 20, True), (0, 108, False)]
    report = replay(path)
    assert report.reason == "streams or logits of sequences [1] are not finite"
    first = report.first
    assert first is not None and (first.place, first.op) == ("layers.0", "hc_enter") and first.bad_inputs > 0
    assert report.notes[0] == "parameters that are not finite: embed"


def test_a_later_step_runs_on_the_state_that_it_had(model: Path, tmp_path: Path) -> None:
    """Its state is that after the previous steps: another last token gives the logits that the engine would give."""
    with opened(model, dump_dir=str(tmp_path), max_num_batched_tokens=64) as llm:
        with pytest.raises(RequestFailedError):
            llm.generate([*LONG, POISON], some())
        wanted = llm.generate([*LONG, 9], some(logprobs=0, logprobs_mode="raw"))
    (path,) = dumps(tmp_path)
    dump = StepDump.load(path)
    (sequence,) = dump.plan.sequences
    assert sequence.start == 256 and len(sequence.token_ids) == 45
    healthy = sequence._replace(token_ids=(*sequence.token_ids[:-1], 9))
    replace(dump, plan=replace(dump.plan, sequences=(healthy,))).save(tmp_path / "forged")
    seen: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        logits = deepseek_v4.DeepseekV4.logits
        patch.setattr(deepseek_v4.DeepseekV4, "logits", lambda *args: seen.append(logits(*args)) or seen[-1])
        assert replay(tmp_path / "forged").first is None
    logprobs = wanted.outputs[0].logprobs
    assert logprobs is not None
    token, value = int(seen[0][-1].argmax()), float(seen[0][-1].log_softmax(-1).max())
    assert token == wanted.token_ids[0] and value == pytest.approx(float(logprobs.sampled[0]), abs=1e-5)


class Broken(Exception):
    pass


def breaks(*args: Any) -> None:
    raise Broken("the first error")


def test_a_step_that_fails_is_saved(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineDeadError, match=r"Broken: the first error; the step is saved as .*safetensors") as error:
        with LLM(str(model), **MODEST, dump_dir=str(tmp_path)) as llm:
            llm.generate(SHORT, some())
            monkeypatch.setattr(deepseek_v4.DeepseekV4, "logits", breaks)
            llm.generate(OTHER, some())
    assert isinstance(error.value.__cause__, Broken)
    monkeypatch.undo()
    (path,) = dumps(tmp_path)
    report = replay(path)
    assert report.reason == "Broken: the first error" and report.first is None
    assert report.notes[-2:] == ("the failure for which the step was saved did not happen again", NO_KERNELS)
    assert sum(len(s.token_ids) for s in StepDump.load(path).plan.sequences) == len(OTHER)


def test_a_device_that_is_lost_leaves_the_plan(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*args: Any) -> None:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    with pytest.raises(EngineDeadError, match="launch failure"), LLM(str(model), **MODEST, dump_dir=str(tmp_path)) as llm:
        monkeypatch.setattr(StepRecorder, "_state", lost)
        monkeypatch.setattr(deepseek_v4.DeepseekV4, "logits", lost)
        llm.generate(SHORT, some())
    monkeypatch.undo()
    (path,) = dumps(tmp_path)
    report = replay(path)
    assert report.first is None and "the device was lost" in str(report)


def fails(*args: Any) -> None:
    raise MemoryError("no room for diagnostics")


def test_a_failing_recorder_hides_no_error(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(StepDump, "save", fails)
    with pytest.raises(EngineDeadError) as error, LLM(str(model), **MODEST, dump_dir=str(tmp_path)) as llm:
        monkeypatch.setattr(deepseek_v4.DeepseekV4, "logits", breaks)
        llm.generate(SHORT, some())
    assert isinstance(error.value.__cause__, Broken) and error.value.__cause__.__context__ is None
    assert str(error.value).endswith("Broken: the first error") and "no room for diagnostics" in caplog.text
    assert dumps(tmp_path) == []


@pytest.mark.parametrize(
    ("broken", "logged"),
    [
        ((StateCache, "slots"), "a step could not be saved; no further step will be saved"),
        ((recorder_file, "stores"), r"step \d+ could not be saved as .*step-\d+-\w+\.safetensors"),
    ],
    ids=["slots", "stores"],
)
def test_a_failing_recorder_stops_no_request(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    broken: tuple[Any, str],
    logged: str,
) -> None:
    with opened(model) as llm:
        expected = tokens_of(llm, [SHORT, [POISON], OTHER])
    monkeypatch.setattr(*broken, fails)
    with opened(model, dump_dir=str(tmp_path)) as llm:
        assert tokens_of(llm, [SHORT, [POISON], OTHER]) == expected
        assert not recorder_of(llm).active
    assert dumps(tmp_path) == [] and re.search(logged, caplog.text)


def test_nothing_is_saved_without_a_folder_or_a_request(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("begin", "watch", "end"):
        monkeypatch.setattr(StepRecorder, name, fails)
    with opened(model, overlap=True) as llm:
        assert tokens_of(llm, [SHORT, [POISON], OTHER]).count(None) == 1


def test_engines_do_not_see_each_others_dumps(model: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", seed=1, change=nan_embedding)
    shared = tmp_path / "dumps"
    with opened(model, dump_dir=shared) as one, opened(other, dump_dir=shared) as two, opened(model) as three:
        for llm in (one, three, two):
            with pytest.raises(RequestFailedError):
                llm.generate([*SHORT, POISON], some())
    names = [StepDump.load(path).settings["model"] for path in dumps(shared)]
    assert sorted(names) == sorted([str(model), str(other)])


def test_large_steps_are_saved_in_part(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [SHORT, LONG, [POISON, *OTHER]]
    for pages, kept in ((2, ["0", "2"]), (0, [])):
        folder = tmp_path / str(pages)
        with opened(model, dump_dir=folder) as llm:
            spec = recorder_of(llm)._cache.spec
            room = pages * spec.grow_page_bytes + 3 * spec.window_page_bytes + 2 * spec.slot_bytes
            monkeypatch.setattr(recorder_file, "MAX_STATE_BYTES", room if pages else 1)
            tokens_of(llm, prompts)
        (path,) = dumps(folder)
        assert [str(s.seq_id) for s in StepDump.load(path).plan.sequences] == kept
        if kept:
            report = replay(path)
            assert report.first is not None and "1 other sequences of the step are left out" in report.notes[1]
        else:
            with pytest.raises(ConfigError, match="has no sequence"):
                replay(path)


# --------------------------------------------------------------------------------------------------------------- on request


def test_a_step_is_saved_on_request(model: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", {**SMALL, "compress_ratios": [8, 4, 0, 0]})
    with opened(model, overlap=True) as llm:
        path = tmp_path / "step"
        expected = llm.generate(SHORT, some()).token_ids
        llm.dump_step(path)
        assert not path.exists(), "the next step is meant"
        assert llm.generate(SHORT, some()).token_ids == expected
        assert replay(path).first is None and not recorder_of(llm).active
        path.write_text("it is replaced")
        llm.dump_step(str(path))
        llm.generate(OTHER, some())
        assert StepDump.load(path).plan.num_tokens == len(OTHER)
        with pytest.raises(ConfigError, match=r"give the checkpoint that the step ran on, which was '.*small\d*', as --model"):
            replay(path, model=str(other))
        os.mkfifo(pipe := tmp_path / "pipe")
        places = (tmp_path / "none" / "step", tmp_path, path / "step", tmp_path / ("a" * 300), pipe)
        for bad in (*places, None, 5, "", "a\0b", "\ud800"):
            with pytest.raises(ConfigError, match="must be a file in a folder"):
                llm.dump_step(bad)  # type: ignore[arg-type]
    assert dumps(tmp_path) == [other, pipe, path]


@pytest.mark.parametrize(("variant", "rows"), [("v3", "auto"), ("v32", "fp8")])
def test_steps_of_mla_models_are_saved_and_run_again(tmp_path: Path, variant: str, rows: str) -> None:
    """A part of a prompt that begins in its second page, and a token that goes to a damaged expert."""
    model = write_random_model(tmp_path / "model", variant)
    with opened(model, max_num_batched_tokens=270, kv_cache_dtype=rows) as llm:
        llm.dump_step(tmp_path / "first")
        llm.generate(LONG, some(max_tokens=1))
        llm.dump_step(tmp_path / "rest")
        llm.generate(LONG, some())
    (sequence,) = StepDump.load(tmp_path / "rest").plan.sequences
    assert (sequence.start, len(sequence.token_ids)) == (256, 44)  # after the cached prefix
    ops = {"store_latent_rows", "latent_attention", "route", *(("store_index_keys", "choose_paged") if variant == "v32" else ())}
    for name in ("first", "rest"):
        report = replay(tmp_path / name)
        assert report.first is None and {op.op for op in report.ops} >= ops
    checkpoint = load_file(model / "model.safetensors")
    checkpoint["model.layers.1.mlp.shared_experts.gate_proj.weight"][3] = float("nan")
    save_file(checkpoint, model / "model.safetensors")
    first = replay(tmp_path / "rest", model=str(model)).first
    assert first is not None and (first.place, first.bad_weights) == ("layers.1.ffn", ("layers.1.ffn.shared.w13.weight",))


def test_a_request_that_cannot_be_written_stops_no_other_dump(model: Path, tmp_path: Path) -> None:
    """Neither of the same step nor of a step that fails later: the recorder used to stop."""
    with opened(model, dump_dir=tmp_path / "failures") as llm:
        llm.dump_step(tmp_path / "taken")
        llm.dump_step(tmp_path / "step")
        (tmp_path / "taken").mkdir()
        tokens_of(llm, [SHORT])
        tokens_of(llm, [[POISON]])
    (failed,) = dumps(tmp_path / "failures")
    assert StepDump.load(tmp_path / "step").reason == "it was requested" and "not finite" in StepDump.load(failed).reason


async def test_a_step_is_saved_on_request_from_a_loop(model: Path, tmp_path: Path) -> None:
    async with AsyncLLM(str(model), **MODEST) as llm:
        await llm.dump_step(tmp_path / "step")
        await llm.generate(SHORT, some())
    assert StepDump.load(tmp_path / "step").plan.num_tokens == len(SHORT)


def test_a_folder_that_cannot_be_written_to_is_refused_at_the_start(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"dump_dir=.*cannot be written to.*choose another"), opened(model, dump_dir=folder):
            pass
    with pytest.raises(ConfigError, match="dump_dir=3 must be a string or None"):
        LLM(str(model), dump_dir=3)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------------- the file


def test_a_dump_is_replayed_by_a_fresh_process_without_an_engine(paged: dict[str, Path]) -> None:
    program = f"""
import sys
from dsv4lite.__main__ import main
status = main(["replay", {str(paged["decode"])!r}])
assert not any(name.startswith(("dsv4lite.engine.engine", "dsv4lite.scheduling.scheduler")) for name in sys.modules)
sys.exit(status)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.endswith("no op is wrong\n")


def damaged_files(good: Path, folder: Path) -> Iterator[tuple[Path, str]]:
    content = good.read_bytes()
    for name, data in (("empty", b""), ("noise", bytes(range(256)) * 9), ("cut", content[:-100]), ("short", content[:40])):
        (folder / name).write_bytes(data)
        yield folder / name, "cannot be read"
    yield folder / "missing", "cannot be read"
    yield folder, "cannot be read.*it is a directory"
    os.mkfifo(folder / "pipe")
    yield folder / "pipe", "cannot be read.*it is a FIFO"
    for name, metadata in (("foreign", None), ("other", {"format": "pt"})):
        save_file({"a": torch.zeros(3)}, folder / name, metadata)
        yield folder / name, "not a step that dsv4lite saved"
    yield (
        edit(good, folder / "newer", version=VERSION + 1, sequences=None),
        f"has version {VERSION + 1}, this dsv4lite reads {VERSION}",
    )
    (folder / "text").write_bytes(content.replace(b'{\\"version\\"', b'(\\"version\\"', 1))
    yield folder / "text", "damaged"
    header = json.loads(header_of(good))
    for key in header.keys() - {"graph"}:
        yield edit(good, folder / f"no {key}", **{key: None}), "damaged"
    yield edit(good, folder / "field", sequences=[{**header["sequences"][0], "speed": 1}]), "damaged.*speed"
    yield edit(good, folder / "device", numerics={**header["numerics"], "device": "abacus"}), "damaged"
    yield edit(good, folder / "dtype", numerics={**header["numerics"], "dtype": "torch.int3"}), "damaged"


def test_damaged_and_foreign_files_are_refused(paged: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, message in damaged_files(paged["decode"], tmp_path):
        with pytest.raises(ConfigError, match=message):
            StepDump.load(path)
    assert main(["replay", str(tmp_path / "noise")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    for given, told in (([""], "dump='' is empty; give a name"), ([str(paged["decode"]), "--device", ""], "device='' is empty")):
        assert main(["replay", *given]) == 2  # the first was the present folder, the second the default
        assert f"ConfigError: {told}" in capsys.readouterr().err
    for bad, told in ((None, "must be a string or a path"), ("a\0b", "contains a NUL")):
        with pytest.raises(ConfigError, match=f"^dump=.*{told}"):
            replay(bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="device="):
        replay(paged["decode"], device="cuda:7")


def test_headers_that_were_edited_are_refused(paged: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They ended in tracebacks, or ran as another step in which no op is wrong."""
    sequences = json.loads(header_of(paged["decode"]))["sequences"]
    edits = [{"copies": "x"}, {"copies": -1}, {"drafter": None}, {"sequences": None}, {"max_drafts": 2}, {"version": [VERSION]}]
    edits += [
        {"sequences": [{**sequences[0], name: value}]} for name, value in (("start", -3), ("pages", []), ("token_ids", [9999]))
    ]
    for changes in edits:
        assert main(["replay", str(edit(paged["decode"], tmp_path / "edited", sealed=False, **changes))]) == 2
        out, error = capsys.readouterr()
        assert not out and re.fullmatch(r"dsv4lite: ConfigError: dump=.* (its header was changed|has version \[).*\n", error), error


def test_steps_of_models_with_another_config_are_refused(paged: dict[str, Path], tmp_path: Path) -> None:
    """Whatever had the same state was run, with an error in an op or with no op wrong."""
    other = shutil.copytree(tiny_model(), tmp_path / "other")
    raw = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**raw, "rms_norm_eps": 0.5}))
    with pytest.raises(ConfigError, match=r"does not fit the model \(norm_eps was \S+, is 0\.5\): give the checkpoint that"):
        replay(paged["decode"], model=str(other))


def test_failed_writes_leave_nothing(paged: dict[str, Path], tmp_path: Path) -> None:
    dump = StepDump.load(paged["decode"])
    with pytest.raises(TypeError):
        replace(dump, settings={"seed": object()}).save(tmp_path / "step")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        dump.save(tmp_path / "folder")
    assert dumps(tmp_path) == [tmp_path / "folder"]
