"""vLLM under the workloads of ``examples.benchmarks.table``, through its public offline interface.

Written from the documentation of vLLM 0.26.0 (``vllm.LLM``, ``vllm.SamplingParams``, engine arguments); imported only with
``--peer``. vLLM's random weights do not initialize the tables from tokens to experts. ``LLM.apply_model`` fills them, which vLLM
allows only with ``VLLM_ALLOW_INSECURE_SERIALIZATION=1`` in the environment.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dsv4lite import EngineConfig


def fill_tables(experts: int, model: nn.Module) -> int:
    """Give each token other experts in every table of a model; return the number of tables."""
    tables = [tensor for name, tensor in (*model.named_parameters(), *model.named_buffers()) if name.endswith("tid2eid")]
    for seed, table_VK in enumerate(tables):
        generator = torch.Generator().manual_seed(seed)
        chosen_VK = torch.rand(len(table_VK), experts, generator=generator).topk(table_VK.shape[1]).indices
        table_VK.data.copy_(chosen_VK)
    return len(tables)


class Peer:
    """An engine of vLLM with random weights and the settings of one of ours: context, sequences, tokens of a step, layout.

    Args:
        folder: With ``config.json`` and a tokenizer.
        config: Settings of our engine.

    Raises:
        SystemExit: vLLM is not installed, or the layout has replicas, which its offline interface runs in processes of the caller.
    """

    name = "vllm"

    def __init__(self, folder: str, config: EngineConfig) -> None:
        try:
            import vllm
        except ImportError as error:
            raise SystemExit(f"--peer: {error}; install vllm beside dsv4lite") from error
        layout = config.layout
        if layout.dp > 1:
            raise SystemExit("--peer: vllm.LLM runs one replica; leave out --dp")
        self.version: str = vllm.__version__
        self._params = vllm.SamplingParams
        self._llm: Any = vllm.LLM(
            model=folder,
            load_format="dummy",
            tensor_parallel_size=layout.stage,  # these ranks share the experts as well
            pipeline_parallel_size=layout.pp,
            enable_expert_parallel=layout.ep > 1,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            enable_prefix_caching=False,
            kv_cache_dtype="fp8",
        )
        raw = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        if raw.get("num_hash_layers"):
            self._llm.apply_model(partial(fill_tables, raw["n_routed_experts"]))

    def seconds(self, prompts: Sequence[list[int]], counts: Sequence[int]) -> float:
        """Return how long it takes to continue each prompt by so many tokens, sampled at temperature 1."""
        params = [self._params(temperature=1.0, max_tokens=count, ignore_eos=True, detokenize=False) for count in counts]
        started = time.perf_counter()
        self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return time.perf_counter() - started

    def close(self) -> None:
        """End the engine, which ends its processes."""
        del self._llm
        gc.collect()
