"""Measure what placing requests by their cached prefixes brings: questions about a few documents, on replicas of attention.

    python examples/benchmark_placement.py                              # the shipped checkpoint, two replicas
    python examples/benchmark_placement.py --layers 8 --dp 2 --documents 32 --document-tokens 8192 --in-flight 32

Asks the questions in random order, once with each placement (``data_parallel_placement``), in engines of their own. Prints which
part of the prompts came from the prefix cache, prompts per second, and how long they waited for their first token. A cached
document takes one of a replica's snapshots, ``max(16, max_num_seqs)``: with more documents a replica cannot keep all of them.
``--layers`` is V4-Flash's shapes with random weights; without it the model is the checkpoint that ships with the package.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import Any

from benchmark import flash

from dsv4lite import LLM, SamplingParams, tiny_model

PLACEMENTS = ("round_robin", "prefix")


def workload(args: argparse.Namespace) -> list[list[int]]:
    """Return the prompts: every question is a document and a few tokens of its own."""
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(16, 4000) for _ in range(count)]

    documents = [tokens(args.document_tokens) for _ in range(args.documents)]
    prompts = [[*document, *tokens(args.question_tokens)] for document in documents for _ in range(args.questions)]
    rng.shuffle(prompts)
    return prompts


def measure(args: argparse.Namespace, placement: str) -> dict[str, Any]:
    """Ask everything with one placement."""
    shape: dict[str, Any] = {"hf_overrides": flash(args.layers), "load_format": "dummy"} if args.layers else {}
    llm = LLM(
        tiny_model(),
        **shape,
        device=args.device,
        data_parallel_size=args.dp,
        data_parallel_placement=placement,
        executor=args.executor,
        max_model_len=args.document_tokens + args.question_tokens + args.answer_tokens,
        max_num_seqs=-(-args.in_flight // args.dp),
        start_timeout_s=args.timeout,
        step_timeout_s=args.timeout,
    )
    answer = SamplingParams(temperature=0, max_tokens=args.answer_tokens, ignore_eos=True, detokenize=False)
    prompts = workload(args)
    with llm:
        llm.generate_batch([[7] * args.document_tokens] * args.dp, answer)  # what happens only once is no part of it
        before, started = llm.stats(), time.perf_counter()
        outputs = list(llm.as_completed(prompts, answer, max_in_flight=args.in_flight))
        took, after = time.perf_counter() - started, llm.stats()
    return {
        "placement": placement,
        "hit_rate": (after.cached_tokens - before.cached_tokens) / (after.prompt_tokens - before.prompt_tokens),
        "prompts_s": len(prompts) / took,
        "first_token_s": statistics.median(output.timing.first_token for output in outputs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=0, help="of V4-Flash, with random weights (default: the shipped model)")
    parser.add_argument("--device", default="auto", help="cpu or cuda (default auto)")
    parser.add_argument("--dp", type=int, default=2, help="replicas (default 2)")
    parser.add_argument("--executor", default="auto", help="where ranks live (default auto)")
    parser.add_argument("--documents", type=int, default=20, help="prefixes (default 20)")
    parser.add_argument("--document-tokens", type=int, default=512, help="tokens of each; 256 are a page (default 512)")
    parser.add_argument("--questions", type=int, default=4, help="questions about each (default 4)")
    parser.add_argument("--question-tokens", type=int, default=32, help="tokens of each (default 32)")
    parser.add_argument("--answer-tokens", type=int, default=8, help="tokens of an answer (default 8)")
    parser.add_argument("--in-flight", type=int, default=8, help="questions at the same time (default 8)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for the start, and for a step (default 600)")
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    print(f"{args.documents} documents of {args.document_tokens} tokens, {args.questions} questions about each, {args.dp} replicas")
    print(f"{'placement':>14}{'from cache':>12}{'prompts/s':>11}{'first token s':>15}")
    found = []
    for placement in PLACEMENTS:
        row = measure(args, placement)
        found.append(row)
        print(f"{placement:>14}{row['hit_rate']:>12.1%}{row['prompts_s']:>11.2f}{row['first_token_s']:>15.3f}", flush=True)
    print(f"prompts/s, {PLACEMENTS[1]} over {PLACEMENTS[0]}: {found[1]['prompts_s'] / found[0]['prompts_s']:.2f}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
