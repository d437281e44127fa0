"""The same requests under different scheduling: the same bits with ``deterministic=True``, nearly the same without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dsv4lite.config import tiny_model
from dsv4lite.llm import LLM
from dsv4lite.request import Logprobs, RequestOutput, SamplingParams
from tests.e2e.engines import SMALL, opened, prompts_of, room_for, same_logprobs, same_outputs, write_model
from tests.mla import VARIANTS
from tests.mla import write_random_model as write_mla_model

VOCAB = SMALL["vocab_size"]
MODELS: Mapping[str, Mapping[str, Any]] = {
    "short_groups": SMALL,
    "release_ratios": {**SMALL, "compress_ratios": [4, 128, 0, 0], "sliding_window": 128, "index_topk": 17},
}
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Ask:
    """A request with an id, which also names its random stream."""

    name: str
    prompt: Sequence[int]
    params: SamplingParams


def asks(vocab_size: int = VOCAB, generated: int = 20) -> tuple[Ask, ...]:
    """Return requests around the boundaries of pages, groups and windows, with all kinds of sampling."""
    short, middle, long, single = prompts_of((130, 243, 300, 1), vocab_size, seed=5)
    some = {"max_tokens": generated, "ignore_eos": True}
    return (
        Ask("seeded", short, SamplingParams(**some, seed=1, logprobs=4, prompt_logprobs=2)),
        Ask(
            "greedy",
            middle,
            SamplingParams(
                **some, temperature=0, logprobs=3, logprobs_mode="processed", repetition_penalty=1.2, frequency_penalty=0.3
            ),
        ),
        Ask("forked", long, SamplingParams(**some, n=3, seed=3, top_p=0.95, top_k=40, logprobs=2)),
        Ask("named", single, SamplingParams(**some, min_p=0.01, temperature=1.3, logprobs=0)),
    )


STRANGERS = tuple(
    Ask(f"stranger {i}", prompt, SamplingParams(max_tokens=5 + 3 * i, seed=i, temperature=i / 3, presence_penalty=0.2 * i))
    for i, prompt in enumerate(prompts_of((3, 64, 17, 258, 90), VOCAB, seed=6))
)


def ask_all(llm: LLM, requests: Sequence[Ask]) -> list[RequestOutput]:
    """Run requests together."""
    with ExitStack() as stack:
        return [
            stream.final() for stream in [stack.enter_context(llm.stream(a.prompt, a.params, request_id=a.name)) for a in requests]
        ]


@dataclass(frozen=True)
class Reference:
    """A model, and the outputs of ``asks`` run alone, each prompt in one pass, nothing cached."""

    folder: Path
    deterministic: bool
    outputs: Sequence[RequestOutput]

    @property
    def tolerance(self) -> float:
        return 0.0 if self.deterministic else TOLERANCE

    def check(self, outputs: Sequence[RequestOutput]) -> None:
        """Assert that the last outputs are those of ``asks``."""
        same_outputs(outputs[-len(self.outputs) :], self.outputs, tolerance=self.tolerance)

    def open(self, **settings: Any) -> Any:
        return opened(self.folder, deterministic=self.deterministic, **settings)


CASES = [
    *(("short_groups", True), ("release_ratios", True), ("short_groups", False)),
    *(("v3", True), ("v32", True), ("v2_lite", False)),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{'deterministic' if case[1] else 'free'}")
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    name, deterministic = request.param
    folder = tmp_path_factory.mktemp(name)
    if name in VARIANTS:
        write_mla_model(folder, name)
    else:
        write_model(folder, MODELS[name], seed=2)
    with opened(folder, deterministic=deterministic, enable_prefix_caching=False) as llm:
        outputs = [ask_all(llm, [ask])[0] for ask in asks()]
    assert len({c.token_ids for c in outputs[2].outputs}) == 3
    return Reference(folder, deterministic, outputs)


def test_requests_that_share_a_batch_come_out_the_same(reference: Reference) -> None:
    with reference.open(max_num_seqs=16) as llm:
        reference.check(ask_all(llm, [*STRANGERS, *asks()]))


@pytest.mark.parametrize(("tokens", "overlap", "strangers"), [(19, False, STRANGERS[3:4]), (131, True, STRANGERS)])
def test_prompts_cut_into_chunks_come_out_the_same(
    reference: Reference, tokens: int, overlap: bool, strangers: Sequence[Ask]
) -> None:
    with reference.open(overlap=overlap, max_num_batched_tokens=tokens, enable_prefix_caching=False, max_num_seqs=16) as llm:
        reference.check(ask_all(llm, [*strangers, *asks()]))


@pytest.mark.parametrize(("overlap", "caching"), [(False, False), (True, True)])
def test_preempted_and_resumed_requests_come_out_the_same(reference: Reference, overlap: bool, caching: bool) -> None:
    settings = {"max_num_seqs": 8, "max_model_len": 512, "enable_prefix_caching": caching}
    room = room_for(reference.folder, 4, **settings)
    with reference.open(overlap=overlap, kv_cache_memory_bytes=room, max_num_batched_tokens=100, **settings) as llm:
        assert llm.memory().sizes.grow_pages == 4
        outputs = ask_all(llm, asks())
        assert llm.stats().preemptions > 0
    reference.check(outputs)


@pytest.mark.parametrize("overlap", [False, True])
def test_cached_prefixes_come_out_the_same(reference: Reference, overlap: bool) -> None:
    with reference.open(overlap=overlap) as llm:
        fresh, again = (ask_all(llm, asks()) for _ in range(2))
        assert fresh[2].usage.cached_tokens == 0 and again[2].usage.cached_tokens == 256
        reference.check(fresh)
        reference.check(again)
        # A completion that crossed a page boundary is a prefix, too.
        longer = [*asks()[1].prompt, *fresh[1].token_ids]
        assert len(longer) > 256
        cached = llm.generate(longer, SamplingParams(temperature=0, max_tokens=1, logprobs=0))
        assert cached.usage.cached_tokens == 256
        llm.reset_prefix_cache()
        uncached = llm.generate(longer, SamplingParams(temperature=0, max_tokens=1, logprobs=0))
        assert uncached.usage.cached_tokens == 0
        assert cached.token_ids == uncached.token_ids
        same_logprobs(cached.outputs[0].logprobs, uncached.outputs[0].logprobs, tolerance=reference.tolerance)


def test_scores_of_given_completions_are_those_of_decoding(reference: Reference) -> None:
    """Scored at once, in chunks, after a cached prefix, and token by token."""
    for settings in ({}, {"max_num_batched_tokens": 37}):
        with reference.open(**settings) as llm:
            for ask, output in zip(asks(), reference.outputs, strict=True):
                if ask.params.logprobs_mode != "raw":
                    continue
                for completion in output.outputs:
                    assert completion.logprobs is not None
                    for _ in range(2):  # the second time from the prefix cache
                        scores = llm.score(ask.prompt, completion.token_ids, top_logprobs=ask.params.logprobs or 0)
                        same_logprobs(scores, completion.logprobs, tolerance=reference.tolerance)
                for i in range(0, len(completion.token_ids), 4):
                    before = [*ask.prompt, *completion.token_ids[:i]]
                    one = llm.score(before, completion.token_ids[i : i + 1], top_logprobs=ask.params.logprobs or 0)
                    same_logprobs(one, part(completion.logprobs, i, i + 1), tolerance=reference.tolerance)


def test_scores_of_a_prompt_do_not_depend_on_its_chunks(reference: Reference) -> None:
    long = [*asks()[2].prompt, *asks()[1].prompt]
    with reference.open() as llm:
        whole = llm.score(long[:1], long[1:], top_logprobs=3)
    with reference.open(max_num_batched_tokens=77, overlap=True) as llm:
        same_logprobs(llm.score(long[:1], long[1:], top_logprobs=3), whole, tolerance=reference.tolerance)
        same_logprobs(llm.score(long[:400], long[400:], top_logprobs=3), part(whole, 399), tolerance=reference.tolerance)


def part(logprobs: Logprobs, begin: int, end: int | None = None) -> Logprobs:
    cut = {name: getattr(logprobs, name)[begin:end] for name in ("sampled", "ranks", "token_ids", "values")}
    return Logprobs(**cut, mode=logprobs.mode)


def test_quantized_model_comes_out_the_same_in_company() -> None:
    requests = asks(4096, generated=6)[:2]
    settings = {"deterministic": True, "max_num_seqs": 4, "max_model_len": 512, "kv_cache_memory_bytes": 64 << 20}
    with opened(tiny_model(), enable_prefix_caching=False, **settings) as llm:
        outputs = [ask_all(llm, [ask])[0] for ask in requests]
        same_logprobs(llm.score(requests[0].prompt, outputs[0].token_ids, top_logprobs=4), outputs[0].outputs[0].logprobs)
    with opened(tiny_model(), overlap=True, max_num_batched_tokens=101, **settings) as llm:
        same_outputs(ask_all(llm, [STRANGERS[1], *requests])[1:], outputs)
        same_logprobs(llm.score(requests[0].prompt, outputs[0].token_ids, top_logprobs=4), outputs[0].outputs[0].logprobs)
