"""Replay records are complete whatever happens on the way, and what reads them chooses the same and computes the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4lite.config import MTP, NGram
from dsv4lite.errors import InvalidRequestError, UnsupportedError
from dsv4lite.llm import LLM
from dsv4lite.request import CompletionOutput, Replay, SamplingParams
from dsv4lite.training import completion_logprobs, load_model
from tests.e2e.engines import FIRST_LETTER, MODEST, SMALL, opened, prompts_of, room_for, same_logprobs, write_model
from tests.mla import raw_config, write_random_model

pytestmark = pytest.mark.usefixtures("forked_ranks")

# Two layers that select, in different stages of a pipeline of two.
V4 = {**SMALL, "num_hidden_layers": 4, "compress_ratios": [4, 8, 4, 0, 0]}
VOCAB, V4_TOP_K = V4["vocab_size"], V4["index_topk"]


@dataclass(frozen=True)
class Kind:
    """A model that selects.

    Attributes:
        name: A variant of ``tests.mla``, or V4.
        config: In the release form.
        selecting: How many layers select.
        first: The first token that sees more entries than it attends to.
        choosing: Parts of the names of what only chooses: the bias of a selection of experts, and what makes the indexer's choice.
    """

    name: str
    config: Mapping[str, Any]
    selecting: int
    first: int
    choosing: tuple[str, ...]

    @property
    def top_k(self) -> int:
        return int(self.config["index_topk"])


KINDS = {"v4": Kind("v4", V4, 2, 4 * (V4_TOP_K + 1) - 1, ("bias", "key_compressor"))}
for _name in ("v32", "glm5"):  # every layer selects, the drafter's, too
    _config = raw_config(_name, num_nextn_predict_layers=1)
    KINDS[_name] = Kind(_name, _config, _config["num_hidden_layers"], _config["index_topk"], ("bias", "indexer."))
SHORT, LONG = prompts_of((7, 300), VOCAB, seed=5)
LETTERS = tuple(range(FIRST_LETTER, VOCAB))
ROLLOUT = SamplingParams.for_rollout(seed=4, max_tokens=24, ignore_eos=True, temperature=0.8, top_p=0.9, return_replay=True)


@pytest.fixture(scope="module", params=("v4", "v32"))
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def small(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay") / "model"
    return write_model(folder, kind.config) if kind.name == "v4" else write_random_model(folder, kind.name, **kind.config)


@pytest.fixture(scope="module")
def llm(small: Path) -> Iterator[LLM]:
    with opened(small, deterministic=True) as llm:
        yield llm


def replay_of(completion: CompletionOutput) -> Replay:
    assert completion.replay is not None
    return completion.replay


def same_replay(a: Replay, b: Replay) -> None:
    assert a.index_from == b.index_from
    for name in ("routed_experts", "index_entries", "kept_counts", "kept_ids"):
        ours, theirs = getattr(a, name), getattr(b, name)
        assert (ours is None) == (theirs is None), name
        assert ours is None or (ours.dtype == theirs.dtype and torch.equal(ours, theirs)), name


def of_whole(llm: LLM, tokens: Sequence[int]) -> Replay:
    """Return what the model chooses for tokens in one prefill."""
    prefill = SamplingParams(max_tokens=1, ignore_eos=True, return_replay=True, temperature=0.0)
    return replay_of(llm.generate(list(tokens), prefill).outputs[0])


def test_record_can_be_used_where_gradients_are_computed(llm: LLM) -> None:
    replay = replay_of(llm.generate(LONG, ROLLOUT).outputs[0])
    table = torch.ones(VOCAB * 100, requires_grad=True)
    for record in (replay.routed_experts, replay.index_entries, replay.kept_ids):
        assert record is not None
        table[record.long()].sum().backward()  # type: ignore[no-untyped-call]
        record.add_(0)


def check(kind: Kind, llm: LLM, prompt: Sequence[int], completion: CompletionOutput) -> None:
    """Assert that a record is that of one prefill, and that it is complete."""
    replay, tokens = replay_of(completion), [*prompt, *completion.token_ids][:-1]
    whole = of_whole(llm, tokens)
    same_replay(replace(replay, kept_counts=None, kept_ids=None), whole)
    assert replay.routed_experts is not None and replay.routed_experts.dtype == torch.int16
    assert replay.routed_experts.shape == (len(tokens), kind.config["num_hidden_layers"], kind.config["num_experts_per_tok"])
    assert replay.index_from == kind.first
    if len(tokens) <= kind.first:
        assert replay.index_entries is None
    else:
        assert replay.index_entries is not None
        assert replay.index_entries.shape == (len(tokens) - kind.first, kind.selecting, kind.top_k)
        assert (replay.index_entries.diff(dim=-1) > 0).all() and replay.index_entries.min() >= 0
    kept = replay.kept(0, len(completion.token_ids), VOCAB)
    assert kept is not None and replay.kept_counts is not None and kept.sum(1).tolist() == replay.kept_counts.tolist()
    assert kept[torch.arange(len(kept)), torch.tensor(completion.token_ids)].all()


@pytest.mark.parametrize(
    "settings",
    [
        *({"overlap": False}, {"overlap": True}, {"max_num_batched_tokens": 50}),
        *({"speculative": NGram(4, adaptive=False)}, {"speculative": MTP(2, adaptive=False)}),
        {"speculative": MTP(2, adaptive=False), "overlap": True},
    ],
    ids=lambda settings: ",".join(f"{name}={value}" for name, value in settings.items()),
)
def test_record_is_that_of_one_prefill(kind: Kind, small: Path, llm: LLM, settings: dict[str, Any]) -> None:
    """Decoded in any steps, forked, with and without drafts, and though the prompt is cached."""
    with opened(small, deterministic=True, **settings) as other:
        other.generate(LONG, SamplingParams(max_tokens=1))
        outs = other.generate_batch([LONG, SHORT], ROLLOUT.replace(n=2, top_k=6))
        if "speculative" in settings:
            repeated, few = SHORT * 5, None if kind.name == "v4" else LETTERS[:2]  # tokens of which a text repeats itself
            out = other.generate(repeated, ROLLOUT.replace(top_k=1, max_tokens=40, allowed_token_ids=few))
            assert out.usage.accepted_tokens > 0
            check(kind, llm, repeated, out.outputs[0])
    for prompt, out in zip((LONG, SHORT), outs, strict=True):
        for completion in out.outputs:
            check(kind, llm, prompt, completion)
            assert max(replay_of(completion).kept_counts.tolist()) <= 6  # type: ignore[union-attr]


def test_record_is_complete_after_preemption(kind: Kind, small: Path, llm: LLM) -> None:
    prompt, room = LONG[:240], {"max_num_seqs": 4, "max_model_len": 600}
    memory = room_for(small, 3, max_num_seqs=4)
    with opened(small, deterministic=True, **room, kv_cache_memory_bytes=memory) as crowded:
        outs = crowded.generate_batch([prompt, prompt], ROLLOUT.replace(n=3), max_in_flight=2)
        assert crowded.stats().preemptions > 0
    for out in outs:
        for completion in out.outputs:
            check(kind, llm, prompt, completion)


@pytest.mark.parametrize(
    "layout",
    [
        *({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"expert_parallel_size": 2}),
        {"data_parallel_size": 2, "expert_parallel_size": 2, "dispatcher": "all_gather"},
    ],
    ids=lambda layout: next(iter(layout)),
)
def test_ranks_record_and_replay(kind: Kind, small: Path, llm: LLM, layout: dict[str, Any]) -> None:
    """Several pairs are scored by all replicas, a single one leaves one of two without work."""
    with LLM(str(small), **{**MODEST, "deterministic": True, **layout}) as ranks:
        completion = ranks.generate(LONG, ROLLOUT).outputs[0]
        check(kind, ranks, LONG, completion)
        same_logprobs(ranks.score(LONG, completion.token_ids, ROLLOUT, replay=replay_of(completion)), completion.logprobs)
        other = changed(kind, replay_of(completion))
        moved = ranks.score(LONG, completion.token_ids, ROLLOUT, replay=other)
        three = ranks.score_batch([(LONG, completion.token_ids)] * 3, ROLLOUT, replays=[replay_of(completion), other, other])
    for score, same in zip(three, (completion.logprobs, moved, moved), strict=True):
        same_logprobs(score, same)
    expected = llm.score(LONG, completion.token_ids, ROLLOUT, replay=other)
    torch.testing.assert_close(moved.sampled, expected.sampled, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["v4"], indirect=True)
def test_tokens_that_could_be_sampled_are_those_with_a_probability(small: Path) -> None:
    params = ROLLOUT.replace(logprobs=VOCAB, bad_words_ids=((LETTERS[0],), *((a, LETTERS[2]) for a in LETTERS)), min_p=0.01)
    with opened(small, max_logprobs=VOCAB) as wide:
        for overrides in ({}, {"top_k": 5}, {"temperature": 0.0}, {"top_p": 1.0, "min_p": 0.0}):
            completion = wide.generate(SHORT, params.replace(**overrides)).outputs[0]
            assert completion.logprobs is not None
            lists = completion.logprobs
            listed = torch.zeros(len(lists), VOCAB, dtype=torch.bool)
            listed.scatter_(1, lists.token_ids.long(), lists.values > -torch.inf)
            kept = replay_of(completion).kept(0, len(lists), VOCAB)
            assert kept is not None and torch.equal(kept, listed)
        for neutral in ({}, {"repetition_penalty": 1.2}, {"logit_bias": {9: 1.0}}):
            everything = SamplingParams.for_rollout(max_tokens=3, ignore_eos=True, return_replay=True, **neutral)
            assert replay_of(wide.generate(SHORT, everything).outputs[0]).kept_ids is None


def changed(kind: Kind, replay: Replay) -> Replay:
    """Return a record of other choices."""
    experts = replay.routed_experts
    assert experts is not None and replay.index_entries is not None
    experts = torch.where(experts < 0, experts, (experts + 1) % kind.config["n_routed_experts"])  # dense layers have none
    entries = torch.arange(kind.top_k, dtype=torch.int32).expand_as(replay.index_entries).contiguous()
    return replace(replay, routed_experts=experts, index_entries=entries)


@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_scores_and_trainer_make_the_recorded_choices(kind: Kind, small: Path, llm: LLM) -> None:
    """The rollout's own choices give its bits, others give others, and in both cases all ways of computing agree."""
    completions = [one for prompt in (LONG, SHORT) for one in llm.generate(prompt, ROLLOUT.replace(n=2)).outputs]
    prompts = [LONG, LONG, SHORT, SHORT]
    pairs = [(prompt, one.token_ids) for prompt, one in zip(prompts, completions, strict=True)]
    replays = [replay_of(one) for one in completions]
    neutral = SamplingParams.for_rollout(temperature=0.8)  # the record knows the rest
    for params in (ROLLOUT, neutral):
        for score, one in zip(llm.score_batch(pairs, params, replays=replays), completions, strict=True):
            same_logprobs(score, one.logprobs)
    model = load_model(str(small), device="cpu")
    others = [changed(kind, replays[0]), None]
    scores = llm.score_batch([pairs[0], pairs[1], pairs[0]], SamplingParams(), replays=[*others, replays[0]])
    assert not torch.equal(scores[0].sampled, scores[2].sampled)
    for score, pair, replay in zip(scores, (pairs[0], pairs[1], pairs[0]), [*others, replays[0]], strict=True):
        assert torch.equal(completion_logprobs(model, *pair, replay=replay), score.sampled)
    for one, pair, replay in zip(completions, pairs, replays, strict=True):
        assert one.logprobs is not None
        assert torch.equal(completion_logprobs(model, *pair, ROLLOUT, replay=replay), one.logprobs.sampled)


def test_given_choices_are_in_no_cached_prefix(kind: Kind, llm: LLM) -> None:
    """Scores of the same prompt without them once started from the state that they had led to."""
    completion = llm.generate(LONG, ROLLOUT).outputs[0]
    llm.reset_prefix_cache()
    expected = llm.score(LONG, completion.token_ids)
    llm.reset_prefix_cache()
    other = llm.score(LONG, completion.token_ids, replay=changed(kind, replay_of(completion)))
    assert not torch.equal(other.sampled, expected.sampled)
    same_logprobs(llm.score(LONG, completion.token_ids), expected)


def test_gradients_flow_through_replayed_choices(kind: Kind, small: Path, llm: LLM) -> None:
    completion = llm.generate(LONG, ROLLOUT).outputs[0]
    model = load_model(str(small), device="cpu")
    completion_logprobs(model, LONG, completion.token_ids, ROLLOUT, replay=replay_of(completion)).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    without = [name for name, gradient in gradients.items() if gradient is None]
    assert all(any(part in name for part in kind.choosing) for name in without)
    found = [gradient for gradient in gradients.values() if gradient is not None]
    assert all(gradient.isfinite().all() for gradient in found) and sum(float(gradient.abs().sum()) for gradient in found) > 0


@pytest.mark.parametrize("kind", ["v4"], indirect=True)
def test_rollouts_under_a_grammar_are_scored_with_their_record(small: Path, llm: LLM) -> None:
    pytest.importorskip("llguidance")
    params = SamplingParams.for_rollout(
        seed=2, max_tokens=12, structured_outputs={"regex": "[a-f]{9}"}, detokenize=True, return_replay=True
    )
    completion = llm.generate(SHORT, params).outputs[0]
    same_logprobs(llm.score(SHORT, completion.token_ids, params, replay=replay_of(completion)), completion.logprobs)
    with pytest.raises(UnsupportedError, match="replay"):
        llm.score(SHORT, completion.token_ids, params)


@pytest.mark.parametrize("kind", ["v4"], indirect=True)
def test_trainer_needs_the_record_of_a_rollout_under_a_grammar(small: Path, llm: LLM) -> None:
    """Without it, it ignored the grammar."""
    pytest.importorskip("llguidance")
    params = SamplingParams.for_rollout(seed=2, structured_outputs={"regex": "[a-f]{9}"}, detokenize=True, return_replay=True)
    completion, model = llm.generate(SHORT, params).outputs[0], load_model(str(small), device="cpu")
    assert completion.logprobs is not None
    replayed = completion_logprobs(model, SHORT, completion.token_ids, params, replay=replay_of(completion))
    assert torch.equal(replayed, completion.logprobs.sampled)
    with pytest.raises(UnsupportedError, match="structured_outputs"):
        completion_logprobs(model, SHORT, completion.token_ids, params)
    raw = params.replace(logprobs_mode="raw")
    assert torch.equal(completion_logprobs(model, SHORT, completion.token_ids, raw), llm.score(SHORT, completion.token_ids).sampled)


@pytest.mark.parametrize("kind", ["v4"], indirect=True)
@pytest.mark.parametrize(
    "settings",
    [{"logit_bias": {}}, {"logit_bias": {5: 0.0}}, {"top_k": 96}, {"top_k": 97}, {"allowed_token_ids": range(96)}],
    ids=str,
)
def test_trainer_takes_settings_without_effect(small: Path, llm: LLM, settings: dict[str, Any]) -> None:
    """Without a replay, a bias of 0 and lists of all tokens were refused."""
    model = load_model(str(small), device="cpu")
    assert model.config.vocab_size == 96
    for replayed, top_p in ((True, 0.9), (True, 1.0), (False, 1.0)):
        params = ROLLOUT.replace(top_p=top_p, max_tokens=8, **settings)
        completion = llm.generate(SHORT, params).outputs[0]
        assert completion.logprobs is not None
        replay = replay_of(completion) if replayed else None
        again = completion_logprobs(model, SHORT, completion.token_ids, params, replay=replay)
        assert torch.equal(again, completion.logprobs.sampled)


def test_records_that_do_not_fit_are_refused(kind: Kind, small: Path, llm: LLM) -> None:
    completion = llm.generate(LONG, ROLLOUT).outputs[0]
    good = replay_of(completion)
    assert good.routed_experts is not None and good.index_entries is not None and good.kept_ids is not None
    far: Tensor = good.index_entries.clone()
    far[0, 0, -1] = kind.top_k + 1  # not there yet
    assert good.kept_counts is not None
    uneven = good.kept_counts.clone()  # of the same sum, with a position that has none
    uneven[0], uneven[1] = uneven[0] + uneven[1], 0
    for wrong in (
        replace(good, routed_experts=good.routed_experts[1:]),
        replace(good, routed_experts=good.routed_experts.long()),
        replace(good, routed_experts=good.routed_experts + kind.config["n_routed_experts"] - 1),
        replace(good, routed_experts=good.routed_experts[..., :1].expand_as(good.routed_experts).contiguous()),
        replace(good, index_entries=far),
        replace(good, index_entries=-good.index_entries),
        replace(good, index_from=kind.first + 1),
        replace(good, kept_ids=good.kept_ids[1:]),
        replace(good, kept_ids=good.kept_ids + VOCAB),
        replace(good, kept_counts=uneven),
        replace(good, kept_counts=good.kept_counts.tolist()),
        replace(good, routed_experts=True),
        "replay",
    ):
        with pytest.raises(InvalidRequestError, match="replay"):
            llm.score(LONG, completion.token_ids, ROLLOUT, replay=wrong)  # type: ignore[arg-type]
    pairs = [(LONG, completion.token_ids)] * 2
    for given, problem in ((pairs, "has 1 entries for 2 pairs"), (iter(pairs), "has no entry for pair 1")):
        with pytest.raises(InvalidRequestError, match=problem):
            llm.score_batch(given, replays=[good])
    model = load_model(str(small), device="cpu")
    with pytest.raises(UnsupportedError, match=r"top_p=0\.9"):
        completion_logprobs(model, LONG, completion.token_ids, ROLLOUT)
