"""From updates to outputs, without an engine."""

from __future__ import annotations

import gc
import re
from array import array
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4lite.api.collect import Collector
from dsv4lite.config import tiny_model
from dsv4lite.errors import EngineDeadError, InvalidRequestError, RequestFailedError
from dsv4lite.request import Request, SamplingParams, SequenceUpdate, TokenLogprob
from dsv4lite.text.parse import CallSyntax, ChatParser
from dsv4lite.text.tokenizer import Tokenizer
from tests.text.shipped import SHIPPED


def collector(params: SamplingParams, **more: Any) -> Collector:
    request = Request(request_id="r", prompt_token_ids=(5, 6), params=params, eos_token_id=1, arrival=10.0)
    return Collector(request, SHIPPED, **more)


def update(*ids: int, **more: Any) -> SequenceUpdate:
    return SequenceUpdate(request_id="r", token_ids=ids, **more)


@given(
    text=st.text(alphabet="ab STOP!é世😀\n", max_size=60),
    stops=st.lists(st.text(alphabet="ab STOP!é世😀\n", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(1, 5), min_size=60, max_size=60),
    include=st.booleans(),
)
def test_collector_output_does_not_depend_on_the_cuts(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    """Whatever a step brings at once (drafts bring several tokens), text, tokens and reason are the same."""
    ids = SHIPPED.encode(text)
    params = SamplingParams(stop=tuple(stops), include_stop_str_in_output=include)
    outputs = []
    for sizes in ([*cuts, len(ids)], [1] * len(ids), [1000]):
        got = collector(params, streaming=True)
        deltas, rest = "", list(ids)
        for size in sizes:
            step, rest = rest[:size], rest[size:]
            if step:
                deltas += got.push(update(*step), 11).text
        deltas += got.push(update(finish_reason="length"), 12).text
        out = got.output(13)
        assert deltas == out.text
        outputs.append(out)
    assert outputs[0] == outputs[1] == outputs[2]
    out = outputs[0].outputs[0]
    ends = [text.find(s) + len(s) for s in stops if s in text]
    if ends:
        end = min(ends)
        assert out.finish_reason == "stop" and out.stop_reason in stops
        assert isinstance(out.stop_reason, str)
        assert out.text == text[: end if include else end - len(out.stop_reason)]
        needed, size = len(text[:end].encode()), len(SHIPPED.decode_bytes(out.token_ids))
        assert len(SHIPPED.decode_bytes(out.token_ids[:-1])) < needed <= size
        assert out.token_ids == tuple(ids[: len(out.token_ids)])
    else:
        assert (out.text, out.token_ids, out.finish_reason) == (text, tuple(ids), "length")


def test_collector_reads_what_it_kept_like_what_was_pushed() -> None:
    """Tokens without a stream or stop strings are read many at a time, with the next other update."""
    text = "né世😀, and so on " * 20
    entries = [TokenLogprob(logprob=-i, rank=i, token_ids=array("i", [i]), values=array("f", [-i])) for i in range(400)]
    for end in ("length", "abort"):
        params = SamplingParams(n=2, logprobs=1)
        plain, keeping = collector(params, streaming=True), collector(params)
        for i, token in enumerate(SHIPPED.encode(text)):
            one = update(token, index=i % 2, logprobs=(entries[i],), weight_version=i // 50, drafted=2, accepted=1)
            plain.push(one, 11)
            assert (keeping.push(one, 11) is None) == (i > 0)  # the first is the time of the first token
        for got in (plain, keeping):
            if end == "abort":
                got.end("abort")
            for index in range(2):
                assert got.push(update(101, index=index, finish_reason="length"), 999) is not None
        expected, found = plain.output(1000), keeping.output(1000)
        assert (expected.usage, expected.timing) == (found.usage, found.timing)
        for a, b in zip(expected.outputs, found.outputs, strict=True):
            assert (a.text, a.token_ids, a.finish_reason, a.weight_versions) == (
                b.text,
                b.token_ids,
                b.finish_reason,
                b.weight_versions,
            )
            assert a.logprobs is not None and b.logprobs is not None and a.logprobs.sampled.equal(b.logprobs.sampled)


DSML_CALL = '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
TOKEN_CALL = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize(("syntax", "call"), [("dsml", DSML_CALL), ("tokens", TOKEN_CALL), ("none", "")])
def test_collector_of_a_chat_skips_special_tokens_but_its_markup(syntax: CallSyntax, call: str, streaming: bool) -> None:
    """Texts of chats once had all special tokens. Here every token of markup is special."""
    backend = tokenizers.Tokenizer.from_file(str(Path(tiny_model()) / "tokenizer.json"))
    backend.add_special_tokens(re.findall("<｜tool[^>]*>", TOKEN_CALL))
    tokenizer, special = Tokenizer(backend), "<｜begin▁of▁sentence｜><｜▁pad▁｜>"
    ids = tokenizer.encode(f"{special}Let {special}me see.</think>{special}It is {special}4.{call}<｜end▁of▁sentence｜>")
    for skip, between in ((True, ""), (False, special)):
        request = Request(request_id="r", prompt_token_ids=(5,), params=SamplingParams(skip_special_tokens=skip), eos_token_id=1)
        got = Collector(request, tokenizer, parser=lambda prefix: ChatParser(True, syntax=syntax), streaming=streaming)
        for id in ids:
            got.push(update(id), 11)
        got.push(update(finish_reason="stop"), 12)
        out = got.output(13)
        assert (out.reasoning, out.text) == (f"{between}Let {between}me see.", f"{between}It is {between}4.")
        assert [made.name for made in out.tool_calls] == ["f"] * bool(call)


@pytest.mark.parametrize("stop", ["sentence", ">", "<", "｜"])
def test_stop_strings_of_a_chat_do_not_match_the_end_of_sequence(stop: str) -> None:
    """They matched the token's text: the turn ended with its first characters, and the stop string was said to be the reason."""
    ids, params = SHIPPED.encode("Hello<｜end▁of▁sentence｜>"), SamplingParams(stop=(stop,))
    for made in (None, lambda prefix: ChatParser(False, call_id_prefix=prefix)):
        got = collector(params, parser=made)
        got.push(update(*ids, finish_reason="stop"), 11)
        out = got.output(12).outputs[0]
        assert (out.text, out.token_ids, out.finish_reason, out.stop_reason) == ("Hello", tuple(ids), "stop", None)


def test_collector_counts_cached_tokens_of_the_completion_that_ran_the_prompt() -> None:
    """A second one that waits for a place finds the first one's prompt in the cache: a new prompt was said to come from there."""
    got = collector(SamplingParams(n=2))
    got.push(update(7, cached_tokens=1), 11)
    assert got.push(update(7, index=1, cached_tokens=2), 12) is None
    for index in range(2):
        got.push(update(index=index, finish_reason="length"), 13)
    assert got.output(14).usage.cached_tokens == 1


def test_collector_keeps_no_object_per_token() -> None:
    """An object per token would make the garbage collector walk through the whole process."""
    got, entry = collector(SamplingParams(logprobs=1)), (array("i", [3]), array("f", [-1.0]), None)
    objects = []
    for count in range(60):  # fewer than are read at once
        got.push(update(100, logprobs=(TokenLogprob(-1.0, 1, *entry),)), 11)
        if count in (5, 59):
            gc.collect()
            objects.append(len(gc.get_objects()))
    assert objects[1] - objects[0] < 10
    got.end("abort")
    assert len(got.output(12).outputs[0].token_ids) == 60


def test_collector_drops_tokens_that_come_after_the_end() -> None:
    got = collector(SamplingParams())
    got.push(update(100), 11)
    got.end("abort")
    assert got.push(update(100), 12) is not None and got.output(13).outputs[0].token_ids == (100,)
    assert got.output(13).outputs[0].finish_reason == "abort"


@pytest.mark.parametrize("params, streaming", [(SamplingParams(), True), (SamplingParams(stop=("b",)), False)])
def test_collector_reads_at_once_for_a_stream_and_stop_strings(params: SamplingParams, streaming: bool) -> None:
    got = collector(params, streaming=streaming)
    assert [got.push(update(100), 11) is None for _ in range(2)] == [False, False]


@pytest.mark.parametrize("streaming", [True, False])
def test_collector_cuts_logprobs_at_a_stop_string_within_an_update(streaming: bool) -> None:
    """Drafts bring several tokens at once, and those behind the stop string have no log-probabilities either."""
    entries = [TokenLogprob(logprob=-i, rank=i, token_ids=array("i", [i]), values=array("f", [-i])) for i in range(1, 6)]
    ids = [SHIPPED.encode(letter)[0] for letter in "axbcd"]
    got = collector(SamplingParams(stop=("b",), logprobs=1), streaming=streaming)
    parts = ((ids[:1], entries[:1]), (ids[1:], entries[1:]))
    deltas = [got.push(update(*some, logprobs=tuple(their)), 11) for some, their in parts]
    out = got.output(13).outputs[0]
    assert (out.text, out.token_ids, out.cumulative_logprob) == ("ax", tuple(ids[:3]), -6)
    assert out.logprobs is not None and out.logprobs.sampled.tolist() == [-1, -2, -3]
    assert out.logprobs.token_ids.tolist() == [[1], [2], [3]] and out.logprobs.ranks.tolist() == [1, 2, 3]
    assert [None if d.logprobs is None else d.logprobs.sampled.tolist() for d in deltas] == (
        [[-1], [-2, -3]] if streaming else [None, None]
    )


def test_collector_ignores_what_comes_after_the_end() -> None:
    got = collector(SamplingParams(stop=("b",)))
    ids = SHIPPED.encode("ab")
    got.push(update(*ids, finish_reason="length"), 11)
    assert got.push(update(100, finish_reason="abort"), 12).token_ids == ()
    assert got.finished and got.output(13).outputs[0].stop_reason == "b"


def test_collector_joins_spans_of_weight_versions() -> None:
    got = collector(SamplingParams())
    for version, count in ((3, 2), (3, 1), (4, 1), (5, 0), (5, 2)):
        got.push(update(*[100] * count, weight_version=version), 11)
    got.end("abort")
    assert got.output(12).outputs[0].weight_versions == ((3, 0, 3), (4, 3, 4), (5, 4, 6))


def test_collector_cuts_routed_experts_at_the_stop() -> None:
    got = collector(SamplingParams(stop=("b",)))
    got.push(update(*SHIPPED.encode("a"), *SHIPPED.encode("b"), 9, routed_experts=torch.arange(24.0).view(4, 3, 2)), 11)
    experts = got.output(12).outputs[0].routed_experts
    assert experts is not None and torch.equal(experts, torch.arange(18.0).view(3, 3, 2))
    assert len(got.output(12).token_ids) == 2


def test_collector_measures_from_arrival() -> None:
    got = collector(SamplingParams())
    got.push(update(started=11.0, cached_tokens=2), 11.5)
    got.push(update(100), 12.0)
    got.push(update(finish_reason="length"), 13.0)
    out = got.output(14.0)
    assert (out.timing.queued, out.timing.first_token, out.timing.total) == (1.0, 2.0, 4.0)
    assert (out.usage.prompt_tokens, out.usage.completion_tokens, out.usage.cached_tokens, out.usage.total_tokens) == (2, 1, 2, 3)


def test_collector_aborted_at_once_has_an_empty_output() -> None:
    got = collector(SamplingParams(n=2, logprobs=3, prompt_logprobs=2))
    got.end("abort")
    out = got.output(15.0)
    assert out.prompt_logprobs is not None and out.prompt_logprobs.values.shape == (0, 2)
    assert [(c.text, c.token_ids, c.finish_reason) for c in out.outputs] == [("", (), "abort")] * 2
    logprobs = out.outputs[0].logprobs
    assert logprobs is not None and logprobs.token_ids.shape == (0, 3) and out.outputs[0].cumulative_logprob == 0
    assert (out.timing.queued, out.timing.first_token, out.timing.total) == (5.0, 0.0, 5.0)


def test_collector_deltas_carry_logprobs_only_for_streams() -> None:
    entry = TokenLogprob(logprob=-1.5, rank=2, token_ids=array("i", [7]), values=array("f", [-0.5]))
    for streaming in (True, False):
        got = collector(SamplingParams(logprobs=1), streaming=streaming)
        delta = got.push(update(100, logprobs=(entry,)), 11)
        assert (delta.logprobs is not None) is streaming
        got.end("abort")
        logprobs = got.output(12).outputs[0].logprobs
        assert logprobs is not None and logprobs.sampled.tolist() == [-1.5] and logprobs.token_ids.tolist() == [[7]]


@pytest.mark.parametrize("error", [InvalidRequestError("no", parameter="prompt"), EngineDeadError("dead")])
def test_collector_passes_typed_errors_on(error: Exception) -> None:
    got = collector(SamplingParams())
    got.push(update(finish_reason="error", error=error), 11)
    assert got.output(12).error is error


def test_collector_wraps_a_failure_with_the_partial_output() -> None:
    got = collector(SamplingParams(n=2))
    got.push(update(100), 11)
    cause = RequestFailedError("not finite")
    got.push(update(finish_reason="error", error=cause), 11)
    assert not got.finished
    got.push(update(101, index=1, finish_reason="length"), 11)
    error = got.output(12).error
    assert isinstance(error, RequestFailedError) and error.__cause__ is cause and error.output is not None
    assert [(c.token_ids, c.finish_reason) for c in error.output.outputs] == [((100,), "error"), ((101,), "length")]
