"""Captured steps with prompts: which steps are, and that they give what eager ones give."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4lite.config import MTP, DSpark, NGram
from dsv4lite.engine.prompt_graphs import PromptGraphs, PromptShape
from dsv4lite.engine.step_graphs import StepGraphs
from dsv4lite.llm import LLM
from dsv4lite.models.family import FAMILIES
from dsv4lite.planning.memory import plan_memory
from dsv4lite.request import RequestOutput, SamplingParams
from dsv4lite.scheduling.step_plan import SequencePlan, StepShape
from dsv4lite.state.paging import PagingSizes, make_paging, read_paging, write_paging
from tests.e2e.engines import REFRESHED, SMALL, engine_of, opened, prompts_of, same_outputs, write_model
from tests.mla import raw_config, write_random_model
from tests.recorded import captured_engines, recorded

GREEDY = SamplingParams(max_tokens=9, temperature=0, logprobs=2, ignore_eos=True)
SETTINGS: dict[str, Any] = {"deterministic": True, "max_num_batched_tokens": 200, "enable_prefix_caching": False}
PROMPTS = prompts_of((37, 300, 5, 61, 130, 12, 64, 9), SMALL["vocab_size"], seed=3)


@contextmanager
def capturing(ran: list[tuple[PromptShape, int]], *, prompt_tokens: int = 200) -> Iterator[None]:
    """Let engines capture steps on the CPU; note each step with prompts that ran so, its shape and number of sequences."""

    def run(graphs: PromptGraphs, sequences: Sequence[SequencePlan], shape: PromptShape, *args: Any) -> Any:
        ran.append((shape, len(sequences)))
        return running(graphs, sequences, shape, *args)

    running = PromptGraphs.run
    with recorded(), captured_engines(prompt_tokens=prompt_tokens), pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptGraphs, "run", run)
        yield


def answers(llm: LLM) -> list[RequestOutput]:
    """Run prompts in chunks beside others that decode, twice, so that shapes are launched, captured and replayed."""
    first = [out for _ in range(2) for out in llm.generate_batch(PROMPTS, GREEDY)]
    return [*first, *(llm.generate(prompt, replace(GREEDY, max_tokens=2)) for prompt in PROMPTS[:2] * 3)]


@pytest.mark.parametrize(
    "speculative", [None, MTP(2, adaptive=False), DSpark(2, adaptive=False), NGram(2, adaptive=False)], ids=str
)
def test_captured_steps_with_prompts_have_the_bits_of_eager_ones(model: Path, tmp_path: Path, speculative: Any) -> None:
    """With drafts, too: a step with prompts stores what the drafter reads, and other sequences verify theirs in it."""
    ran: list[tuple[PromptShape, int]] = []
    folder = write_model(tmp_path, REFRESHED) if isinstance(speculative, DSpark) else model
    settings = {**SETTINGS, "speculative": speculative}
    with opened(folder, **settings) as llm:
        expected, drafted = answers(llm), llm.stats().speculation
    with capturing(ran), opened(folder, **settings) as llm:
        same_outputs(answers(llm), expected)
        assert llm.stats().speculation.drafted == drafted.drafted and llm.stats().speculation.accepted == drafted.accepted
    shapes = [shape for shape, _ in ran]
    assert {(64, 1), (64, 16), (128, 1)} <= {(shape.tokens, shape.sequences) for shape in shapes}
    assert max(shapes.count(shape) for shape in shapes) > 2 and max(count for _, count in ran) > 3
    assert any(shape.drafts for shape in shapes) == isinstance(speculative, MTP | DSpark)


def test_steps_with_scores_are_captured_and_steps_that_record_choices_are_not(model: Path) -> None:
    ran: list[tuple[PromptShape, int]] = []
    scored, recording = replace(GREEDY, prompt_logprobs=1), replace(GREEDY, return_routed_experts=True)
    with opened(model, **SETTINGS) as llm:
        expected = [llm.generate(PROMPTS[0], kind) for kind in (recording, scored)]
    with capturing(ran), opened(model, **SETTINGS) as llm:
        for _ in range(3):
            same_outputs([llm.generate(PROMPTS[0], recording)], expected[:1])
        assert not ran
        for _ in range(3):
            same_outputs([llm.generate(PROMPTS[0], scored)], expected[1:])
        assert sum(count for _, count in ran) == 3


@pytest.mark.parametrize(("deterministic", "speculative"), [(False, None), (True, None), (False, MTP(2, adaptive=False))], ids=str)
def test_captured_steps_of_latent_attention_choose_forms_by_what_the_device_knows(
    tmp_path: Path, deterministic: bool, speculative: Any
) -> None:
    """A prompt that has room in a captured step is up-projected there; one that has none, and would cost too much, runs eagerly."""
    ran: list[tuple[PromptShape, int]] = []
    folder, vocabulary = write_random_model(tmp_path, "v3", num_nextn_predict_layers=1), raw_config("v3")["vocab_size"]
    prompts = prompts_of((700, 30, 651), vocabulary, seed=5)
    settings = {**SETTINGS, "deterministic": deterministic, "max_num_batched_tokens": 800, "speculative": speculative}
    with opened(folder, **settings) as llm:
        expected = llm.generate_batch(prompts, GREEDY)
    with capturing(ran, prompt_tokens=768), opened(folder, **settings) as llm:
        for _ in range(3):
            same_outputs(llm.generate_batch(prompts, GREEDY), expected, tolerance=0.0 if deterministic else 1e-4)
        captures = engine_of(llm)._runner.model.captures
        assert captures(768, 768 * 768, 6) and captures(128, 1 << 40, 1 << 20) and captures(200, 200 * 9000, 36)
        assert captures(768, 1 << 40, 7) == captures(600, 1 << 40, 3) == deterministic
    assert {shape.tokens for shape, _ in ran} >= {768}


def test_updates_and_sleep_leave_nothing_stale(model: Path) -> None:
    ran: list[tuple[PromptShape, int]] = []
    with capturing(ran), opened(model, **SETTINGS) as llm:
        before = [llm.generate(PROMPTS[0], GREEDY) for _ in range(3)]
        llm.sleep(1)
        llm.wake_up()
        same_outputs([llm.generate(PROMPTS[0], GREEDY) for _ in range(3)], before)
    # Each time the largest shape is captured before the one that is wanted: the first one takes the memory for all.
    assert [(shape.tokens, count) for shape, count in ran] == 2 * [(64, 1), (64, 1), (128, 0), (128, 0), (64, 1)]


def test_engine_without_room_for_a_shape_runs_eagerly(model: Path) -> None:
    ran: list[tuple[PromptShape, int]] = []
    with capturing(ran, prompt_tokens=40), opened(model, **SETTINGS) as llm:
        assert len(llm.generate(PROMPTS[0], GREEDY).outputs[0].token_ids) == 9 and not ran


def test_shapes_are_ascending_and_the_first_that_fits_is_taken(model: Path) -> None:
    with opened(model, **SETTINGS) as llm:
        runner: Any = llm._session.engine("test")._runner
        limits = {"max_num_seqs": 100, "max_model_len": 1 << 20, "max_tokens": 4096, "most_drafts": 1}
        graphs = PromptGraphs(runner.model, runner.cache, **limits)
        short = runner.model.short_lengths[0]
        step = StepShape(tokens=130, sequences=3, width=64, decodes=False, longest=short)
        assert graphs.shape_for(step) == PromptShape(256, 16, short)
        assert graphs.shape_for(step._replace(sequences=17, tokens=64)) == PromptShape(64, 112, short)
        assert graphs.shape_for(step._replace(sequences=1)) == PromptShape(256, 1, short)
        assert graphs.shape_for(step._replace(longest=short + 1)) == PromptShape(256, 16, 8192)
        assert graphs.shape_for(step._replace(longest=8193)) == PromptShape(256, 16, 32768)
        assert graphs.shape_for(step._replace(longest=8193, tokens=2049)) is None is graphs.shape_for(step._replace(tokens=4097))
        assert graphs.shape_for(step._replace(longest=1 << 20, sequences=16)) == PromptShape(256, 16, 1 << 20)
        assert graphs.shape_for(step._replace(longest=1 << 20, sequences=100)) is None  # tables too large for every step
        assert graphs.shape_for(step._replace(max_drafts=1)) == PromptShape(256, 16, short, drafts=True)
        assert len(graphs.hidden) == 4096 and len(set(graphs.shapes)) == len(graphs.shapes)


def test_what_graphs_work_in_is_freed_without_the_collector(model: Path) -> None:
    """An engine that closes gives its memory back at once; a circle of references would keep it."""
    with opened(model, **SETTINGS) as llm:
        runner: Any = llm._session.engine("test")._runner
        gc.disable()
        try:
            graphs = StepGraphs(runner.model, runner.cache, max_num_seqs=8, max_model_len=1024, prompt_tokens=200)
            kept = weakref.ref(graphs), weakref.ref(graphs.prompts)
            del graphs
            assert [ref() for ref in kept] == [None, None]
        finally:
            gc.enable()


def test_memory_of_captured_prompts_is_planned(model: Path) -> None:
    """What graphs take grows with the tokens of a step with prompts up to the family's most, and stages capture none."""

    def graphs(tokens: int, **settings: Any) -> int:
        plan = plan_memory(str(model), gpu="h200", max_num_seqs=8, max_model_len=1024, max_num_batched_tokens=tokens, **settings)
        return plan.per_device[0].graphs

    assert graphs(16) < graphs(1024) < graphs(4096) == graphs(8192)
    assert graphs(4096, pipeline_parallel_size=2) < graphs(4096)
    assert FAMILIES["deepseek_v4"].captured_prompts == FAMILIES["deepseek_v3"].captured_prompts == 4096


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40), st.integers(1, 3)), min_size=1, max_size=5), st.data())
def test_paging_with_padding_holds_what_it_holds_without(spans: list[tuple[int, int, int]], data: st.DataObject) -> None:
    plans = [
        SequencePlan(i, i + 3, start, tuple(range(count)), (i, 7)[:pages], start // 64, (i,) * pages, sample=True)
        for i, (count, start, pages) in enumerate(spans)
    ]
    exact = PagingSizes.of(plans)
    room = PagingSizes(*(size + data.draw(st.integers(0, 5)) for size in exact))
    ids_T, paging, _ = make_paging(plans, torch.device("cpu"))
    padded_T, padded = read_paging(write_paging(plans, room), room, width=0)
    tokens, sequences, grow, window = exact
    assert padded_T[:tokens].equal(ids_T.int()) and not padded_T[tokens:].any()
    assert (padded.positions_T[tokens:] == -1).all()
    assert (padded.slots_S[sequences:] == -1).all() and not padded.lens_S[sequences:].any()
    for name in ("positions_T", "sequence_T"):
        assert getattr(padded, name)[:tokens].equal(getattr(paging, name)), name
    for name in ("slots_S", "first_S", "rows_S", "lens_S", "drafts_S", "state_copy_S", "window_first_S"):
        assert getattr(padded, name)[:sequences].equal(getattr(paging, name)), name
    assert padded.grow_SP[:sequences, :grow].equal(paging.grow_SP) and padded.window_SP[:sequences, :window].equal(paging.window_SP)
    assert (padded.window_SP[:, window:] == -1).all()
