"""Rows of drafts: sampled tokens, distributions and state are those of one row at a time."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsv4lite.request import Request
from dsv4lite.sampling.samples import Samples
from dsv4lite.scheduling.step_plan import Sampled
from dsv4lite.text.structured import GrammarCompiler, StructuredOutputs
from dsv4lite.text.tokenizer import Tokenizer
from tests.e2e.engines import FIRST_LETTER, LETTERS, write_tokenizer
from tests.sampling.test_sampler import CLOSE, EOS, OPEN, Reference, params_strategy, run_of, same_sampled, sample, sampler_of
from tests.sampling.test_sampler import request as make_request
from tests.text.shipped import SHIPPED

V = 13


class Text:
    """A model in which the last two tokens decide, with ties here and there."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(vocab_size, vocab_size, vocab_size, generator=generator).mul_(6).round_().div_(2)

    def logits(self, tokens: Sequence[int]) -> Tensor:
        return self.table[tokens[-2] if len(tokens) > 1 else 0, tokens[-1]]


class Writer:
    """Runs sequences to a length, with or without drafts, as the engine does."""

    def __init__(self, text: Text, requests: Sequence[Request], grammars: GrammarCompiler | None = None) -> None:
        self.text, self.requests = text, requests
        self.sampler = sampler_of(len(text.table), 3, grammars)
        for seq_id, r in enumerate(requests):
            self.sampler.add(seq_id, r, 0)
        self.tokens = [list(r.prompt_token_ids) for r in requests]
        self.results: list[list[Sampled]] = [[] for _ in requests]

    def run(self, length: int, draft: Callable[[int, int], Sequence[int]] | None = None) -> list[list[Sampled]]:
        """Sample ``length`` tokens of each; ``draft`` returns drafts of those of a sequence from a place on."""
        while True:
            alive = [i for i, found in enumerate(self.results) if len(found) < length and not (found and found[-1].error)]
            if not alive:
                return self.results
            runs, logits = [], []
            for i in alive:
                tokens, most = self.tokens[i], length - len(self.results[i]) - 1
                drafts = list([] if draft is None else draft(i, len(self.results[i])))[:most]
                runs.append(run_of(i, len(tokens), drafts))
                logits += [self.text.logits([*tokens, *drafts[:place]]) for place in range(1 + len(drafts))]
            for i, first in sample(self.sampler, torch.stack(logits), runs).to_host().items():
                for one in (first, *first.after):
                    self.results[i].append(one._replace(after=()))
                    if one.error is None:
                        self.tokens[i].append(one.token_id)
                        self.sampler.accept(i, one.token_id)


def same(ours: Sequence[Sequence[Sampled]], theirs: Sequence[Sequence[Sampled]]) -> None:
    for mine, others in zip(ours, theirs, strict=True):
        assert len(mine) == len(others)
        for one, other in zip(mine, others, strict=True):
            same_sampled(one, other)


def drafter(
    results: Sequence[Sequence[Sampled]], rng: random.Random, share: float, vocab_size: int
) -> Callable[[int, int], list[int]]:
    def draft(i: int, place: int) -> list[int]:
        right = [one.token_id for one in results[i][place : place + rng.randrange(5)]]
        return [t if rng.random() < share else rng.randrange(vocab_size) for t in right]

    return draft


@given(
    rows=st.lists(st.tuples(params_strategy(V), st.lists(st.integers(0, V - 1), min_size=1, max_size=5)), min_size=1, max_size=5),
    thinking=st.sampled_from([None, None, 0, 2]),
    seed=st.integers(0, 10_000),
    share=st.sampled_from([0.0, 0.8, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_drafts_change_no_token_and_no_logprob(
    rows: list[tuple[dict[str, object], list[int]]], thinking: int | None, seed: int, share: float
) -> None:
    scores = [{}, {"logprobs": 3}, {"logprobs": 2, "logprobs_mode": "processed"}]
    requests = []
    for i, (params, prompt) in enumerate(rows):
        made = make_request(prompt, f"r{i}", **params, **scores[(seed + i) % 3], thinking_budget=thinking)
        requests.append(Request(**{**{f: getattr(made, f) for f in made.__dataclass_fields__}, "think_ids": (11, 12)}))
    text = Text(V, seed)
    expected = Writer(text, requests).run(9)
    got = Writer(text, requests).run(9, drafter(expected, random.Random(seed), share, V))
    same(got, expected)


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    pytest.importorskip("llguidance")
    return GrammarCompiler(SHIPPED)


@pytest.mark.parametrize("share", [0.0, 0.8, 1.0])
def test_grammars_look_ahead_along_drafts(grammars: GrammarCompiler, share: float) -> None:
    """Also behind a thinking part, up to and beyond the end of the text, and with drafts that the grammar forbids."""
    size = grammars.vocab_size
    table = torch.randn(64, size, generator=torch.Generator().manual_seed(1)) * 3

    class Wide(Text):
        def __init__(self) -> None:
            self.table = table.new_empty(size, 0)

        def logits(self, tokens: Sequence[int]) -> Tensor:
            return table[sum(tokens[-3:]) % 64]

    specs = [{"regex": "(ab|cd)+[0-9]{3}"}, {"choice": ["yes", "no", "yesterday"]}, {"json": {"type": "array", "maxItems": 3}}]
    requests = [
        Request(
            request_id=str(i),
            prompt_token_ids=(20, 21, 22) if i % 2 else (20, 21, OPEN),
            params=make_request(
                structured_outputs=StructuredOutputs(**spec), seed=i, logprobs=2, thinking_budget=3, temperature=t
            ).params,
            eos_token_id=EOS,
            think_ids=(OPEN, CLOSE),
        )
        for i, (spec, t) in enumerate(itertools.product(specs, (0.0, 1.0)))
    ]
    expected = Writer(Wide(), requests, grammars).run(14)
    assert all(one.error is None for found in expected for one in found)
    got = Writer(Wide(), requests, grammars).run(14, drafter(expected, random.Random(5), share, size))
    same(got, expected)


@pytest.mark.parametrize(
    ("sampled", "right", "after"),
    [
        ([3, 5, 1, 8, 2, 0], [2, 0, 1], [1, 8, 0]),
        ([3, 4, 1, 8, 0, 0], [1, 0, 0], [4, 8, 0]),
        ([0, 5, 1, 8, 2, 2], [0, 0, 1], [0, 8, 2]),
    ],
)
def test_samples_count_accepted_drafts_and_name_the_token_that_follows(
    sampled: list[int], right: list[int], after: list[int]
) -> None:
    runs = [run_of(7, 4, (3, 5)), run_of(4, 9), run_of(9, 1, (2,))]
    samples = Samples(torch.tensor([sampled, [1] * 6, [1] * 6], dtype=torch.int32), runs, [0, 3, 4])
    assert [x.tolist() for x in samples.accepted()] == [right, after]
    found = samples.to_host()
    assert [(len(one.after), (one, *one.after)[-1].token_id) for one in found.values()] == list(zip(right, after, strict=True))


# ------------------------------------------------------------------------------------------------------------ distributions

SMALL = 8
SEQUENCES, ROUNDS = 2000, 50
FOLLOWS = {"a": "bdf", "b": "ace", "c": "bdfh", "e": "afgi"}  # what a grammar lets begin a text, and come then
CASES: Mapping[str, Mapping[str, object]] = {
    "plain": {},
    "truncated": {"top_p": 0.9, "min_p": 0.05, "top_k": 6},
    "warm": {"temperature": 1.7, "min_p": 0.1, "logit_bias": {3: 1.0}},
    "grammar": {"structured_outputs": StructuredOutputs(regex=f"({'|'.join(f'{a}[{b}]' for a, b in FOLLOWS.items())})[a-i]{{3}}")},
    "penalised": {"repetition_penalty": 1.5, "frequency_penalty": 0.7, "presence_penalty": -0.4, "top_p": 0.95},
}


def limit_of(freedom: int, score: float) -> float:
    """Chi-square quantile (Wilson and Hilferty) at a standard score."""
    return freedom * (1 - 2 / (9 * freedom) + score * math.sqrt(2 / (9 * freedom))) ** 3


def check_pairs(pairs: Tensor, expected: Tensor) -> None:
    """Compare counts of pairs [V, V] with their probabilities; one hundredth of the mass elsewhere must be noticed."""
    total = pairs.sum()
    assert pairs[expected == 0].sum() == 0
    kept = expected * total > 5
    freedom = int(kept.sum()) - 1
    assert freedom > 5

    def statistic(p: Tensor) -> float:
        return float(((pairs - p * total) ** 2 / (p * total))[kept].sum())

    assert statistic(expected) < limit_of(freedom, 2.326)  # p = 0.01
    biased = expected.flatten().clone()
    first, second = biased.topk(2).indices
    biased[first] += 0.01
    biased[second] -= 0.01
    assert statistic(biased.view_as(expected)) > limit_of(freedom, 4.75)


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    """Grammars over nine letters, one token each."""
    pytest.importorskip("llguidance")
    return GrammarCompiler(Tokenizer.from_folder(write_tokenizer(tmp_path_factory.mktemp("letters"), FIRST_LETTER + 9)))


def allowed_after(tokens: Sequence[int], vocab_size: int) -> Tensor:
    """Return what ``FOLLOWS`` lets come behind so many tokens, bool [V]."""
    following = FOLLOWS if not tokens else FOLLOWS.get(LETTERS[tokens[0] - FIRST_LETTER], "") if tokens[0] >= FIRST_LETTER else ""
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    return mask.index_fill(0, torch.tensor([FIRST_LETTER + LETTERS.index(x) for x in following], dtype=torch.int64), 1)


@pytest.mark.parametrize("name", CASES)
def test_drafted_tokens_have_the_processed_distribution(name: str, request: pytest.FixtureRequest) -> None:
    """200,000 draws, in pairs; the first of each is drafted by a model that is off, with the very noise that verifies the draft."""
    grammar = "structured_outputs" in CASES[name]
    grammars = request.getfixturevalue("letters") if grammar else None
    vocab_size = grammars.vocab_size if grammar else SMALL
    made = make_request((5, 6, 2), **CASES[name])
    table = torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(3)) * 1.2
    reference = Reference(made)

    def distribution_after(*tokens: int) -> Tensor:
        reference.output = list(tokens)
        logits = table[(2, *tokens)[-1]].clone()
        if grammar:
            allowed = allowed_after(tokens, vocab_size)
            if not allowed.any():  # behind a token that has no probability
                return torch.zeros(vocab_size, dtype=torch.float64)
            logits[~allowed] = -math.inf
        return torch.tensor(reference.processed(logits.tolist()), dtype=torch.float64).softmax(-1)

    expected = torch.stack([share * distribution_after(first) for first, share in enumerate(distribution_after())])
    sampler, ids = sampler_of(vocab_size, 11, grammars, places=2 * SEQUENCES), range(SEQUENCES)
    slots = torch.arange(SEQUENCES, dtype=torch.int32)
    off = (table[2] + torch.randn(vocab_size, generator=torch.Generator().manual_seed(4))).expand(SEQUENCES, -1)
    pairs = torch.zeros(vocab_size * vocab_size, dtype=torch.float64)
    right = 0
    for turn in range(ROUNDS):
        place = 3 + 2 * turn
        for i in ids if name in ("grammar", "penalised") or not turn else ():  # after the prompt again, with other noise
            sampler.remove(i)
            sampler.add(i, made, i)
        sampler.prepare([run_of(i, place) for i in ids])
        drafts = sampler.draft(off, slots, torch.full((SEQUENCES,), place - 1, dtype=torch.int32))
        logits = torch.stack([table[2].expand(SEQUENCES, -1), table[drafts]], 1).flatten(0, 1)
        samples = sample(sampler, logits, [run_of(i, place, (draft,)) for i, draft in enumerate(drafts.tolist())])
        first, second = samples.out[0].long().view(-1, 2).unbind(1)
        wrong = (first != drafts).nonzero()[:, 0]
        right += SEQUENCES - len(wrong)
        for i, token_id in zip(wrong.tolist(), first[wrong].tolist(), strict=True):
            sampler.accept(i, token_id)
        again = sample(sampler, table[first[wrong]], [run_of(i, place + 1) for i in wrong.tolist()])
        second = second.index_copy(0, wrong, again.out[0].long())
        pairs += torch.bincount(first * vocab_size + second, minlength=vocab_size * vocab_size)
    assert pairs.sum() == 100_000
    assert 0.3 < right / pairs.sum() < 0.9
    check_pairs(pairs.view(vocab_size, vocab_size), expected)
