"""Compare the outputs of the same prompts with and without speculation, under load and with aborts.

    python -m tests.e2e.speculate --prompts 200                       # on this machine's CPU
    python -m tests.e2e.speculate --prompts 200 --tokens 64 --device cuda

With ``deterministic=True`` every token and every bit of a log-probability must be the same, and in the default mode of an
unquantized float32 model every token. A quantized model amplifies rounding: in its default mode, runs without speculation already
differ where steps have other batch sizes. A run with speculation may differ from these runs, on average, by no more prompts than
the pair of them that differs most. The exit status is 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from dsv4lite.config import MTP, NGram, tiny_model
from dsv4lite.llm import AsyncLLM
from dsv4lite.request import RequestOutput, SamplingParams
from tests.e2e.engines import SMALL, assert_idle, engine_of, prompts_of, write_model

ABORTS = 4  # requests that are about to be aborted, at any time
BATCHES = (32, 16, 8, 3, 1)  # most requests of a step, for every kind of kernel; runs with drafts take the first
MODES = ("deterministic", "default")
DRAFTERS: Mapping[str, Any] = {
    **{f"MTP({k})": MTP(k, adaptive=False) for k in (1, 2, 3, 4)},
    "NGram(3)": NGram(3, adaptive=False),
    "NGram(3), MTP(2)": (NGram(3, adaptive=False), MTP(2, adaptive=False)),
    "adaptive": "auto",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Prompts for a model.

    Attributes:
        exact: Whether the default mode must give the same tokens.
    """

    name: str
    model: str
    prompts: Sequence[Sequence[int]]
    exact: bool


def library_prompts(count: int, tokenizer: Any, *, seed: int = 0) -> list[list[int]]:
    """Return pieces of the standard library's source, 5 to 300 tokens long."""
    rng, source = random.Random(seed), Path(traceback.__file__).parent
    files = sorted(file for file in source.glob("*.py") if file.stat().st_size > 8000)
    prompts = []
    for _ in range(count):
        text = rng.choice(files).read_text(encoding="utf-8", errors="replace")
        begin = text.index("\n", rng.randrange(len(text) // 2)) + 1
        prompts.append(tokenizer.encode(text[begin : begin + 1500])[: rng.choice((5, 40, 90, 130, 300))])
    return prompts


async def answers(case: Case, tokens: int, settings: Mapping[str, Any]) -> tuple[list[RequestOutput], str, float]:
    """Send all prompts at once, and meanwhile others that are aborted.

    Returns:
        The outputs in order, accepted and drafted tokens as text, and the seconds.
    """
    rng = random.Random(1)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=2)
    async with AsyncLLM(case.model, **settings) as llm:

        async def disturb() -> None:
            while True:
                work = asyncio.ensure_future(llm.generate(list(rng.choice(case.prompts)), params))
                await asyncio.sleep(rng.random() / 2)
                work.cancel()

        others = [asyncio.ensure_future(disturb()) for _ in range(ABORTS)]
        started = time.perf_counter()
        outputs = await asyncio.gather(*(llm.generate(list(prompt), params) for prompt in case.prompts))
        seconds = time.perf_counter() - started
        for other in others:
            other.cancel()
        llm.abort()
        while llm._session._in_engine:  # the last ones are being aborted
            await asyncio.sleep(0.01)
        await asyncio.wrap_future(engine_of(llm).call(assert_idle))
        stats = llm.stats().speculation
        return list(outputs), f"{stats.accepted}/{stats.drafted}" if stats.drafted else "", seconds


def differing(ours: Sequence[RequestOutput], theirs: Sequence[RequestOutput], *, bits: bool) -> int:
    """Count the prompts whose tokens differ, or with ``bits`` also their log-probabilities."""
    return sum(not _same(one, other, bits) for one, other in zip(ours, theirs, strict=True))


def _same(one: RequestOutput, other: RequestOutput, bits: bool) -> bool:
    if one.token_ids != other.token_ids:
        return False
    a, b = one.outputs[0].logprobs, other.outputs[0].logprobs
    assert a is not None and b is not None
    return not bits or all(torch.equal(getattr(a, x), getattr(b, x)) for x in ("sampled", "ranks", "token_ids", "values"))


async def compare(case: Case, drafters: Mapping[str, Any], tokens: int, settings: Mapping[str, Any], *, deterministic: bool) -> int:
    """Print a table; return in how many of its lines too many prompts differ."""
    base = {"max_num_seqs": BATCHES[0], "max_num_batched_tokens": 512, **settings, "deterministic": deterministic}
    wrong = 0
    mode = MODES[not deterministic]

    def show(drafter: str, counts: Sequence[int], drafts: str, seconds: float) -> None:
        spread = f"{mean(counts):>7.0f}{min(counts):>7}{max(counts):>7}"
        print(f"{case.name:<10}{mode:<15}{drafter:<32}{spread}{drafts:>15}{seconds:>8.1f}", flush=True)

    batches = BATCHES[:1] if deterministic or case.exact else BATCHES
    runs = [await answers(case, tokens, {**base, "max_num_seqs": batch}) for batch in batches]
    plain = [outputs for outputs, _, _ in runs]
    pairs = [differing(a, b, bits=False) for a, b in combinations(plain, 2)] or [0]
    show(f"none, in steps of {', '.join(map(str, batches))}", pairs, "", runs[0][2])
    for name, speculative in drafters.items():
        found, drafts, seconds = await answers(case, tokens, {**base, "speculative": speculative})
        counts = [differing(found, expected, bits=deterministic) for expected in plain]
        show(name, counts, drafts, seconds)
        wrong += mean(counts) > max(pairs) or not drafts
    return wrong


async def run(
    cases: Sequence[Case], drafters: Mapping[str, Any], tokens: int, settings: Mapping[str, Any], modes: Sequence[str] = MODES
) -> int:
    """Compare everything; return the number of lines in which too many prompts differ."""
    print(f"{'model':<10}{'mode':<15}{'drafter':<32}{'differ':>7}{'least':>7}{'most':>7}{'accepted':>15}{'seconds':>8}")
    return sum([await compare(case, drafters, tokens, settings, deterministic=m == MODES[0]) for case in cases for m in modes])


def random_case(folder: Path, count: int) -> Case:
    """Write an unquantized float32 model with random weights; prompts of up to three pages."""
    prompts = prompts_of([1 + (i * 83) % (700 if i % 16 == 0 else 200) for i in range(count)], SMALL["vocab_size"], seed=8)
    return Case(name="random", model=str(write_model(folder, seed=2)), prompts=prompts, exact=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=16, help="to generate for each prompt (default 16)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", nargs="+", choices=("random", "tiny"), default=["random", "tiny"])
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=list(DRAFTERS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    args = parser.parse_args()
    settings = {"device": args.device, "max_model_len": 1024, "kv_cache_memory_bytes": 64 << 20}
    drafters = {name: DRAFTERS[name] for name in args.drafters}
    with tempfile.TemporaryDirectory() as folder:
        cases = []
        if "random" in args.models:
            cases.append(random_case(Path(folder), args.prompts))
        if "tiny" in args.models:
            from dsv4lite.text.tokenizer import Tokenizer

            prompts = library_prompts(args.prompts, Tokenizer.from_folder(tiny_model()))
            cases.append(Case(name="tiny", model=str(tiny_model()), prompts=prompts, exact=False))
        sys.exit(1 if asyncio.run(run(cases, drafters, args.tokens, settings, args.modes)) else 0)


if __name__ == "__main__":
    main()
