"""Time dsv4lite and transformers side by side: the same random V4 model, the same machine, the same run.

    python -m examples.benchmarks.compare_transformers                 # both comparisons, as a table
    python -m examples.benchmarks.compare_transformers --json out.json

One request decodes alone; then 64 requests of mixed lengths run, in transformers as padded batches of 16. The model has the shape
of the checkpoint that ships with the package, in float32. Needs ``pip install 'dsv4lite[test]'``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
import warnings

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, logging

from dsv4lite import AsyncLLM, SamplingParams, tiny_model


def tiny_shape() -> DeepseekV4Config:
    """Return transformers' configuration of the shipped checkpoint's shape."""
    with open(os.path.join(tiny_model(), "config.json"), encoding="utf-8") as file:
        raw = json.load(file)
    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    layers = raw["num_hidden_layers"]
    same = """vocab_size hidden_size num_hidden_layers num_attention_heads head_dim q_lora_rank o_groups o_lora_rank
        n_routed_experts num_experts_per_tok n_shared_experts moe_intermediate_size routed_scaling_factor swiglu_limit
        sliding_window index_n_heads index_head_dim index_topk hc_mult hc_sinkhorn_iters hc_eps rms_norm_eps rope_theta
        compress_rope_theta max_position_embeddings qk_rope_head_dim""".split()
    return DeepseekV4Config(
        **{key: raw[key] for key in same},
        partial_rotary_factor=raw["qk_rope_head_dim"] / raw["head_dim"],
        layer_types=[kinds[ratio] for ratio in raw["compress_ratios"][:layers]],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        mlp_layer_types=["hash_moe" if i < raw["num_hash_layers"] else "moe" for i in range(layers)],
        pad_token_id=2,
        bos_token_id=0,
        eos_token_id=1,
    )


def random_model(folder: str) -> DeepseekV4ForCausalLM:
    """Make a random model in float32, save it for dsv4lite, and return it."""
    torch.manual_seed(0)
    model = DeepseekV4ForCausalLM(tiny_shape()).float().eval()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                rows = [torch.randperm(model.config.n_routed_experts)[: buffer.shape[1]] for _ in range(len(buffer))]
                buffer.copy_(torch.stack(rows))
    model.save_pretrained(folder)
    return model


def transformers_batch(model: DeepseekV4ForCausalLM, prompts: list[list[int]], lengths: list[int]) -> float:
    """Continue a padded batch greedily until its longest output is done; return seconds."""
    width = max(len(p) for p in prompts)
    ids = torch.tensor([[2] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    started = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=max(lengths), min_new_tokens=max(lengths), use_cache=True
        )
    return time.perf_counter() - started


async def dsv4lite_batch(llm: AsyncLLM, prompts: list[list[int]], lengths: list[int]) -> float:
    """Continue all prompts greedily, each to its own length; return seconds."""
    started = time.perf_counter()
    outputs = await asyncio.gather(
        *(
            llm.generate(prompt, SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False))
            for prompt, length in zip(prompts, lengths, strict=True)
        )
    )
    seconds = time.perf_counter() - started
    assert [len(o.token_ids) for o in outputs] == lengths
    return seconds


async def compare(deterministic: bool, tokens: int, requests: int, repeats: int) -> dict[str, float]:
    """Run both comparisons; return seconds and ratios."""
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(folder)
        vocab = model.config.vocab_size
        prompt = [rng.randrange(3, vocab) for _ in range(64)]
        prompts = [[rng.randrange(3, vocab) for _ in range(rng.randint(16, 512))] for _ in range(requests)]
        lengths = [rng.randint(16, 256) for _ in range(requests)]
        settings = {"max_num_seqs": 64, "max_model_len": 1024, "enable_prefix_caching": False, "deterministic": deterministic}
        async with AsyncLLM(folder, tokenizer=tiny_model(), device="cpu", **settings) as llm:
            transformers_batch(model, [prompt], [4])
            await dsv4lite_batch(llm, [prompt], [4])
            single = {"transformers": [], "dsv4lite": []}
            for _ in range(repeats):  # alternately, so that a disturbance hits both
                prefill = transformers_batch(model, [prompt], [1])
                single["transformers"].append((transformers_batch(model, [prompt], [tokens + 1]) - prefill) / tokens)
                prefill = await dsv4lite_batch(llm, [prompt], [1])
                single["dsv4lite"].append((await dsv4lite_batch(llm, [prompt], [tokens + 1]) - prefill) / tokens)
            ours = await dsv4lite_batch(llm, prompts, lengths)
            theirs = sum(transformers_batch(model, prompts[i : i + 16], lengths[i : i + 16]) for i in range(0, requests, 16))
    step_theirs, step_ours = (sorted(single[name])[repeats // 2] for name in ("transformers", "dsv4lite"))
    return {
        "decode_step_transformers_ms": step_theirs * 1000,
        "decode_step_dsv4lite_ms": step_ours * 1000,
        "decode_ratio": step_theirs / step_ours,
        "batch_transformers_s": theirs,
        "batch_dsv4lite_s": ours,
        "batch_ratio": theirs / ours,
        "batch_tokens": float(sum(lengths)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Time dsv4lite and transformers side by side on CPU.")
    parser.add_argument("--tokens", type=int, default=64, help="decode steps of the single request (default: 64)")
    parser.add_argument("--requests", type=int, default=64, help="requests of the batch (default: 64)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of the single request; the median counts (default: 3)")
    parser.add_argument("--deterministic", action="store_true", help="run dsv4lite with deterministic=True")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    figures = asyncio.run(compare(args.deterministic, args.tokens, args.requests, args.repeats))
    print(f"{'':<32}{'transformers':>14}{'dsv4lite':>14}{'ratio':>8}")
    print(
        f"{'one request, ms per step':<32}{figures['decode_step_transformers_ms']:>14.2f}"
        f"{figures['decode_step_dsv4lite_ms']:>14.2f}{figures['decode_ratio']:>8.2f}"
    )
    print(
        f"{f'{args.requests} requests, seconds':<32}{figures['batch_transformers_s']:>14.1f}"
        f"{figures['batch_dsv4lite_s']:>14.1f}{figures['batch_ratio']:>8.2f}"
    )
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=2)


if __name__ == "__main__":
    main()
