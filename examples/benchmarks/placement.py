"""Measure the gain of placing requests by their cached prefixes: questions about a few documents, on replicas of attention.

    python -m examples.benchmarks.placement                              # the shipped checkpoint's shapes, two replicas
    python -m examples.benchmarks.placement --model flash --layers 8 --documents 32 --document-tokens 4096 --in-flight 32

Opens an engine for each placement (``data_parallel_placement``) and asks both the same questions in random order, one engine after
the other, in rounds with other documents. Prints the share of prompt tokens from the prefix cache, prompts per second, and the
time to the first token. A cached document takes one of a replica's snapshots, ``max(16, max_num_seqs)``: with more
documents a replica cannot keep all of them. Weights are random.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import defaultdict
from contextlib import ExitStack
from typing import Any

from dsv4lite import LLM, SamplingParams, tiny_model
from dsv4lite.config import ReplicaPlacement
from examples.benchmarks.engine import MODELS

PLACEMENTS: tuple[ReplicaPlacement, ...] = ("round_robin", "prefix")


def workload(args: argparse.Namespace, seed: int) -> list[list[int]]:
    """Return the prompts of a round. Each is a document followed by a few tokens that no other prompt has."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(16, 4000) for _ in range(count)]

    documents = [tokens(args.document_tokens) for _ in range(args.documents)]
    prompts = [[*document, *tokens(args.question_tokens)] for document in documents for _ in range(args.questions)]
    rng.shuffle(prompts)
    return prompts


def engine(args: argparse.Namespace, placement: ReplicaPlacement) -> LLM:
    """Return an engine, not yet started."""
    return LLM(
        tiny_model(),
        hf_overrides=MODELS[args.model](args.layers),
        load_format="dummy",
        device=args.device,
        data_parallel_size=args.dp,
        expert_parallel_size=args.ep,
        data_parallel_placement=placement,
        executor=args.executor,
        max_model_len=args.document_tokens + args.question_tokens + args.answer_tokens,
        max_num_seqs=args.in_flight,  # on each replica: a full one gets no requests
        gpu_memory_utilization=0.4,  # there are two engines
        start_timeout_s=args.timeout,
        step_timeout_s=args.timeout,
    )


def ask(llm: LLM, prompts: list[list[int]], args: argparse.Namespace) -> dict[str, list[float]]:
    """Ask all questions; return the numbers that the caller adds up."""
    answer = SamplingParams(temperature=0, max_tokens=args.answer_tokens, ignore_eos=True, detokenize=False)
    before, started = llm.stats(), time.perf_counter()
    outputs = list(llm.as_completed(prompts, answer, max_in_flight=args.in_flight))
    took, after = time.perf_counter() - started, llm.stats()
    return {
        "seconds": [took],
        "cached": [after.cached_tokens - before.cached_tokens],
        "tokens": [after.prompt_tokens - before.prompt_tokens],
        "waits": [output.timing.first_token for output in outputs],
    }


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all placements; print and return a row for each."""
    found: dict[str, dict[str, list[float]]] = {placement: defaultdict(list) for placement in PLACEMENTS}
    with ExitStack() as stack:
        engines = [(placement, stack.enter_context(engine(args, placement))) for placement in PLACEMENTS]
        for _, llm in engines:
            ask(llm, [[7] * args.document_tokens] * args.dp, args)  # leaves out what happens only once
        for number in range(args.rounds):
            for placement, llm in engines if number % 2 == 0 else reversed(engines):
                for name, values in ask(llm, workload(args, number), args).items():
                    found[placement][name] += values
    print(f"{'placement':>14}{'from cache':>12}{'prompts/s':>11}{'first token s':>15}")
    rows = []
    for placement, sums in found.items():
        row = {
            "placement": placement,
            "hit_rate": sum(sums["cached"]) / sum(sums["tokens"]),
            "prompts_s": len(sums["waits"]) / sum(sums["seconds"]),
            "first_token_s": statistics.median(sums["waits"]),
        }
        rows.append(row)
        print(f"{placement:>14}{row['hit_rate']:>12.1%}{row['prompts_s']:>11.2f}{row['first_token_s']:>15.3f}", flush=True)
    print(f"prompts/s, {rows[1]['placement']} over {rows[0]['placement']}: {rows[1]['prompts_s'] / rows[0]['prompts_s']:.2f}")
    return rows


def arguments(line: list[str] | None = None) -> argparse.Namespace:
    """Read a command line, by default this program's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(MODELS), default="shipped", help="whose shapes (default shipped)")
    parser.add_argument("--layers", type=int, default=4, help="how many of its layers (default 4)")
    parser.add_argument("--device", default="auto", help="cpu or cuda (default auto)")
    parser.add_argument("--dp", type=int, default=2, help="replicas (default 2)")
    parser.add_argument("--ep", type=int, default=1, help="ranks that share the experts (default 1)")
    parser.add_argument("--executor", default="auto", help="where ranks run (default auto)")
    parser.add_argument("--rounds", type=int, default=2, help="rounds, each with other documents (default 2)")
    parser.add_argument("--documents", type=int, default=12, help="prefixes (default 12)")
    parser.add_argument("--document-tokens", type=int, default=512, help="tokens of each; 256 are a page (default 512)")
    parser.add_argument("--questions", type=int, default=4, help="questions about each (default 4)")
    parser.add_argument("--question-tokens", type=int, default=32, help="tokens of each (default 32)")
    parser.add_argument("--answer-tokens", type=int, default=4, help="tokens of an answer (default 4)")
    parser.add_argument("--in-flight", type=int, default=4, help="questions at the same time (default 4)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for the start, and for a step (default 600)")
    parser.add_argument("--json", help="write the figures to this file")
    return parser.parse_args(line)


def main() -> None:
    args = arguments()
    print(f"{args.documents} documents of {args.document_tokens} tokens, {args.questions} questions about each, {args.dp} replicas")
    rows = measure(args)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
