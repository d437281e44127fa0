"""Measure what a JSON schema costs in each step: the same batch with and without one, side by side.

    python -m examples.benchmarks.grammars                       # 32 sequences of the shipped checkpoint
    python -m examples.benchmarks.grammars --model PATH --device cuda

All sequences write arrays of objects that do not end before ``--tokens``. Each round runs both kinds. Prints milliseconds of
a step, the least of all rounds, and their ratio: in wall-clock time, and in processor time, which other programs disturb less.
The grammar is compiled before the first round.
"""

from __future__ import annotations

import argparse
import json
import time

from dsv4lite import LLM, SamplingParams, tiny_model

ITEM = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
    },
    "required": ["id", "name", "tags"],
    "additionalProperties": False,
}


def run(llm: LLM, params: SamplingParams, size: int) -> tuple[float, float]:
    """Run a batch; return milliseconds of a step, in wall-clock time and in processor time."""
    assert params.max_tokens is not None
    prompts = [f"# {i}\nx = " for i in range(size)]
    clock, processor = time.perf_counter(), time.process_time()
    outputs = llm.generate_batch(prompts, [params.replace(seed=i) for i in range(size)])
    scale = 1e3 / params.max_tokens
    took = (time.perf_counter() - clock) * scale, (time.process_time() - processor) * scale
    assert all(len(output.token_ids) == params.max_tokens for output in outputs)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=tiny_model())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", type=int, default=32, help="sequences (default: 32)")
    parser.add_argument("--tokens", type=int, default=48, help="of each (default: 48)")
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    plain = SamplingParams(max_tokens=args.tokens, temperature=1.0, ignore_eos=True)
    schema = {"type": "array", "items": ITEM, "minItems": args.tokens}
    kinds = {"without": plain, "with": plain.replace(structured_outputs={"json": schema})}
    with LLM(args.model, device=args.device, max_model_len=args.tokens + 64, max_num_seqs=args.size) as llm:
        for params in kinds.values():
            run(llm, params, args.size)
        rounds = [{name: run(llm, params, args.size) for name, params in kinds.items()} for _ in range(args.rounds)]
    found: dict[str, float] = {}
    for place, unit in enumerate(("clock_ms", "processor_ms")):
        least = {name: min(each[name][place] for each in rounds) for name in kinds}
        found |= {f"{name}_{unit}": round(value, 2) for name, value in least.items()}
        found[f"ratio_{unit.removesuffix('_ms')}"] = round(least["with"] / least["without"], 3)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
