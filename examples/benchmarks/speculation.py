"""Measure cost and gain of speculation: step time and tokens per second by number of drafts, at a given acceptance.

    python -m examples.benchmarks.speculation --layers 8 --batch 1 8 64 --acceptance 0.8
    python -m examples.benchmarks.speculation --device cpu --layers 0 --batch 1 --drafts 0 1 2
    python -m examples.benchmarks.speculation --layers 0 --context 64 --compare --tokens 256 --learn 512
    python -m examples.benchmarks.speculation --layers 0 --context 64 --compare none "MTP(1)" "MTP(4)" "NGram(4)"

The temperature is so high that the seed of a request alone decides its text. A first run without drafts records the texts. The
measured drafter then proposes the recorded tokens, each with the given probability. So the acceptance is known, and the texts of
sequences are independent. With ``--mtp`` the model's MTP block also drafts after each step: its cost counts, its drafts are unused.
``--layers 0`` is the checkpoint that ships with the package. Other weights are those of ``engine.py``: V4-Flash's shapes, fewer
layers, random numbers.

``--compare`` compares adaptive drafting with none and with one draft of the MTP block at every step, or compares the engines that
you name. All these engines are open at once. Each continues the same pieces of Python source with the same seeds, so that their
texts are equal until roundings differ, which ``--deterministic`` prevents. One engine runs at a time, for a few tokens of each
sequence, in an order that is drawn anew for each round. The result is the median of the ratios within rounds and its 95 % bootstrap
interval. ``none again`` is one more engine without drafts: its ratio to ``none`` shows the error of the others. On a CPU time is
the processor time of the process, so that other work on the machine counts little; set OMP_NUM_THREADS=1. Milliseconds of a step,
and the host's part of them (for which an idle device would wait), are medians of single steps, sampled during all windows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from dsv4lite import MTP, AsyncLLM, NGram, SamplingParams, tiny_model
from dsv4lite.sampling.sampler import Sampler
from examples.benchmarks.engine import flash

START = 16  # steps before the measured ones
DRAFTERS: Mapping[str, Any] = {
    "none": None,
    "none again": None,
    **{f"MTP({k})": MTP(k, adaptive=False) for k in (1, 2, 3, 4)},
    "NGram(4)": NGram(4, adaptive=False),
    "auto": "auto",
}
COMPARED = ("none", "none again", "MTP(1)", "auto")


class Recorded:
    """Drafts the tokens of a recorded text, each with a given probability, else another token."""

    def __init__(self, k: int, chance: float, texts: Sequence[Sequence[int]]) -> None:
        self.k = k
        self._chance, self._rng = chance, random.Random(0)
        self._texts = {tuple(text[:8]): text for text in texts}

    def propose(self, sequence_id: int, token_ids: Sequence[int], max_drafts: int) -> list[int]:
        """Draft the next tokens."""
        following = self._texts[tuple(token_ids[:8])][len(token_ids) : len(token_ids) + max_drafts]
        return [token if self._rng.random() < self._chance else token ^ 1 for token in following]

    def forget(self, sequence_id: int) -> None:
        """Do nothing: no state is kept."""


@contextmanager
def accepting(chance: float) -> Iterator[None]:
    """Make the model's own drafter right with a given probability, in engines opened in this block, on ranks of this process.

    At the temperature of ``text_of`` every draft is right: the noise alone decides, and the draw that checks a draft has the same
    noise. A table, read by position and slot, says which drafts are replaced, so that a captured pass replaces others each time.
    """
    draft, right = Sampler.draft, torch.rand(4096, generator=torch.Generator().manual_seed(0), device="cpu") < chance

    def replaced(sampler: Sampler, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        nonlocal right
        right = right.to(logits.device)  # once, before anything is captured
        token_ids = draft(sampler, logits, slots, positions)
        return torch.where(right[(31 * positions + 977 * slots) % len(right)], token_ids, token_ids ^ 1)

    Sampler.draft = replaced  # type: ignore[method-assign]
    try:
        yield
    finally:
        Sampler.draft = draft  # type: ignore[method-assign]


async def text_of(llm: AsyncLLM, seed: int, context: int, tokens: int) -> list[int]:
    """Return a prompt and its continuation, which both depend on the seed alone."""
    rng = random.Random(seed)
    prompt = [rng.randrange(3, 4000) for _ in range(context)]
    params = SamplingParams(temperature=1e9, seed=seed, ignore_eos=True, detokenize=False, max_tokens=tokens)
    return prompt + list((await llm.generate(prompt, params)).token_ids)


async def rate(llm: AsyncLLM, batch: int, context: int, steps: int, tokens: int) -> dict[str, float]:
    """Return the seconds of a step in which ``batch`` sequences decode, and tokens per second."""
    running = [asyncio.create_task(text_of(llm, seed, context, tokens)) for seed in range(batch)]
    begun = llm.stats().generated_tokens
    while llm.stats().num_running < batch or llm.stats().generated_tokens < begun + START * batch:
        await asyncio.wait(running, timeout=0.002, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(*(task for task in running if task.done()))  # raises the error of a request
    before, started = llm.stats(), time.perf_counter()
    while llm.stats().steps < before.steps + steps and not any(task.done() for task in running):
        await asyncio.sleep(0.002)
    after, took = llm.stats(), time.perf_counter() - started
    llm.abort()
    await asyncio.gather(*running)
    made = after.steps - before.steps
    return {"step_s": took / made, "tokens_per_s": (after.generated_tokens - before.generated_tokens) / took}


def engine(args: argparse.Namespace, speculative: Any, **settings: Any) -> AsyncLLM:
    """Return an engine that is not started yet."""
    shape: dict[str, Any] = {"hf_overrides": flash(args.layers), "load_format": "dummy"} if args.layers else {}
    return AsyncLLM(
        tiny_model(),
        **shape,
        **settings,
        device=args.device,
        max_model_len=16384,
        max_num_seqs=max(args.batch),
        enable_prefix_caching=False,
        speculative=speculative,
        deterministic=args.deterministic,
    )


async def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every number of drafts; print each row at once."""
    found: list[dict[str, Any]] = []
    tokens = (args.steps + 2 * START) * (1 + max(args.drafts))  # enough if every draft is accepted
    print(f"{'drafts':>8}{'batch':>7}{'step ms':>10}{'tokens a step':>15}{'tok/s':>9}", flush=True)

    async def measure(llm: AsyncLLM, k: int) -> None:
        for batch in args.batch:
            row = {"drafts": k, "batch": batch, **await rate(llm, batch, args.context, args.steps, tokens)}
            found.append(row)
            each = row["tokens_per_s"] * row["step_s"] / batch
            print(f"{k:>8}{batch:>7}{row['step_s'] * 1e3:>10.2f}{each:>15.2f}{row['tokens_per_s']:>9.0f}", flush=True)

    async with engine(args, None) as llm:
        texts = await asyncio.gather(*(text_of(llm, seed, args.context, tokens) for seed in range(max(args.batch))))
        if 0 in args.drafts:
            await measure(llm, 0)
    for k in filter(None, args.drafts):
        own = (MTP(min(k, MTP.most), adaptive=False),) if args.mtp else ()
        async with engine(args, (Recorded(k, args.acceptance, texts), *own)) as llm:
            await measure(llm, k)
    return found


async def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure engines with and without drafts side by side; print each row at once."""
    found, rng = [], random.Random(0)
    async with AsyncExitStack() as stack:
        llms = {
            name: await stack.enter_async_context(
                engine(args, DRAFTERS[name], kv_cache_memory_bytes=1 << 29, max_num_batched_tokens=512)
            )
            for name in args.compare or COMPARED
        }
        first = next(iter(llms.values()))
        source = first.tokenizer.encode(Path(argparse.__file__).read_text(encoding="utf-8"))
        on_cpu = first.memory().per_device[0].device == "cpu"
        clock = time.process_time if on_cpu else time.perf_counter
        columns = f"{'batch':>5} {'engine':<11}{'tok/s':>9}{'tokens a step':>15}{'step ms':>9}{'host ms':>9}"
        print(f"{columns}  {'half of the windows':<20}over the better", flush=True)
        for batch in args.batch:
            starts = [rng.randrange(len(source) - args.context) for _ in range(batch)]
            prompts = [source[start : start + args.context] for start in starts]
            running = [asyncio.gather(*(continued(llm, prompt, i) for i, prompt in enumerate(prompts))) for llm in llms.values()]
            for llm in llms.values():  # to start, and to learn what pays
                await measured(llm, args.learn * batch, clock)
            windows: dict[str, list[Window]] = {name: [] for name in llms}
            for _ in range(args.rounds):
                for name in rng.sample(list(llms), len(llms)):
                    windows[name].append(await measured(llms[name], args.tokens * batch, clock))
            for llm, requests in zip(llms.values(), running, strict=True):
                llm.abort()
                await llm.resume()
                await requests
            rates = {name: [window.tokens_per_s for window in each] for name, each in windows.items()}
            fixed = [name for name in llms if name not in ("none again", "auto")]
            better = max(fixed, key=lambda name: median_ratio(rates[name], rates[fixed[0]])[0])
            for name, each in rates.items():
                ratio, low, high = median_ratio(each, rates[better])
                tokens = median([window.tokens_a_step for window in windows[name]]) / batch
                step_ms = 1e3 * median([second for window in windows[name] for second in window.step_s])
                host_ms = 1e3 * median([second for window in windows[name] for second in window.host_s])
                found.append({"batch": batch, "engine": name, "tokens_per_s": each, "over_better": (ratio, low, high)})
                mid, quarter, ordered = median(each), len(each) // 4, sorted(each)
                half = f"{ordered[quarter] / mid:.3f} to {ordered[-1 - quarter] / mid:.3f}"
                line = f"{batch:>5} {name:<11}{mid:>9.1f}{tokens:>15.2f}{step_ms:>9.3f}{host_ms:>9.3f}  {half:<20}{ratio:.3f}"
                line += "" if name == better else f"  ({low:.3f} to {high:.3f})"
                stats = llms[name].stats().speculation
                if stats.drafted:
                    right = zip(stats.accepted_by_position, stats.drafted_by_position, strict=True)
                    line += "; right so far " + ", ".join(f"{good / all_:.2f}" for good, all_ in right if all_)
                if stats.policy is not None:
                    line += f"; tries took {stats.policy.lost_seconds / stats.policy.seconds:.1%}"
                print(line, flush=True)
    return found


async def continued(llm: AsyncLLM, prompt: Sequence[int], seed: int) -> None:
    """Continue a prompt to 16,384 tokens in all."""
    params = SamplingParams(temperature=0.8, seed=seed, ignore_eos=True, detokenize=False, max_tokens=16384 - len(prompt))
    await llm.generate(list(prompt), params)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Measures of one window of an engine; the seconds, and the host's part, are of a sample of its steps."""

    tokens_per_s: float
    tokens_a_step: float
    step_s: Sequence[float]
    host_s: Sequence[float]


async def measured(llm: AsyncLLM, tokens: int, clock: Callable[[], float]) -> Window:
    """Let a paused engine generate about so many tokens."""
    before, started, seen = llm.stats(), clock(), []
    await llm.resume()
    while llm.stats().generated_tokens < before.generated_tokens + tokens:
        await asyncio.sleep(0.005)
        seen.append(llm.stats())
    await llm.pause()
    after, took = llm.stats(), clock() - started
    made, seen = after.generated_tokens - before.generated_tokens, [*seen, after]
    return Window(
        tokens_per_s=made / took,
        tokens_a_step=made / (after.steps - before.steps),
        step_s=[stats.step_s for stats in seen],
        host_s=[stats.host_s for stats in seen],
    )


def median_ratio(ours: Sequence[float], theirs: Sequence[float], *, draws: int = 2000) -> tuple[float, float, float]:
    """Return the median of the ratios within rounds, and the ends of its 95 % bootstrap interval."""
    rng, ratios = random.Random(0), [a / b for a, b in zip(ours, theirs, strict=True)]
    drawn = sorted(median(rng.choices(ratios, k=len(ratios))) for _ in range(draws))
    return median(ratios), drawn[draws // 40], drawn[-1 - draws // 40]


def arguments(line: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8, help="number of the model's layers; 0 for the tiny checkpoint (default 8)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64], help="sequences that decode together (default 1 8 64)")
    parser.add_argument("--context", type=int, default=1024, help="prompt tokens of each (default 1024)")
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="in a step (default 0 1 2 3 4)")
    parser.add_argument("--acceptance", type=float, default=0.8, help="probability that a draft is accepted (default 0.8)")
    parser.add_argument("--mtp", action="store_true", help="also draft with the MTP block")
    parser.add_argument("--steps", type=int, default=64, help="to measure for each figure (default 64)")
    parser.add_argument(
        "--compare", nargs="*", choices=DRAFTERS, help=f"measure these engines side by side instead (default {', '.join(COMPARED)})"
    )
    parser.add_argument("--rounds", type=int, default=40, help="windows of each engine that is compared (default 40)")
    parser.add_argument("--tokens", type=int, default=16, help="of each sequence in such a window (default 16)")
    parser.add_argument("--learn", type=int, default=64, help="tokens of each sequence before the first window (default 64)")
    parser.add_argument("--deterministic", action="store_true", help="make roundings independent of the tokens in a step")
    parser.add_argument("--device", default="auto", help="where (default auto)")
    parser.add_argument("--json", help="write the figures to this file")
    return parser.parse_args(line)


def main() -> None:
    args = arguments()
    found = asyncio.run(run(args) if args.compare is None else compare(args))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
