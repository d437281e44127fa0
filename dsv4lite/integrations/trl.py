"""TRL's colocated generation by an engine of this package; written for TRL 1.16.

TRL's trainers make a ``VLLMGeneration`` and have no setting for another class, so a program replaces the name:

    import trl.trainer.grpo_trainer as grpo

    grpo.VLLMGeneration = Generation  # then GRPOConfig(use_vllm=True, vllm_mode="colocate")
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from trl.generation.vllm_generation import VLLMGeneration

from dsv4lite.errors import UnsupportedError
from dsv4lite.llm import LLM
from dsv4lite.request import Logprobs, SamplingParams
from dsv4lite.weights.update import NamedTensors

Rows = list[list[Any]]


class _Engine(LLM):
    @property
    def llm_engine(self) -> SimpleNamespace:
        """What trainers with tools read of vLLM's engine: the length at which they end a conversation."""
        return SimpleNamespace(model_config=SimpleNamespace(max_model_len=self.memory().max_model_len))


class Generation(VLLMGeneration):
    """Generates for a trainer in whose process it runs; one engine in each process.

    With ``vllm_enable_sleep_mode`` the engine sleeps at level 2 outside of ``generate``.

    Attributes:
        SETTINGS: Further settings of the engine, which a subclass may override.
    """

    SETTINGS: Mapping[str, Any] = {}

    def _init_vllm(self) -> None:
        if self.mode != "colocate" or self.tensor_parallel_size > 1:
            raise UnsupportedError(f"dsv4lite with TRL: vllm_mode={self.mode!r}, tensor_parallel_size={self.tensor_parallel_size}")
        settings: dict[str, Any] = {
            "max_model_len": self.max_model_length,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "seed": self.accelerator.process_index,
            "max_num_batched_tokens": 4096,
            "max_num_seqs": self.max_num_seqs or 64,
        }
        self.llm = _Engine.create(self.model.name_or_path, **{**settings, **self.SETTINGS})
        if self.enable_sleep_mode:
            self.llm.sleep(level=2)
        self._llm_weights_sleeping = self.enable_sleep_mode
        self.accelerator.wait_for_everyone()

    def sync_weights(self) -> None:
        """Give the engine all weights of the trainer's model, in one transaction."""
        if self.enable_sleep_mode:
            self.llm.wake_up(tags=["weights"])
        with self.llm.update_weights(self.llm.weight_version + 1) as update:
            update.load(NamedTensors(self._tensors()))
        self._llm_weights_sleeping = False

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters as TRL gathers them, and persistent buffers, which it leaves out: router biases and tables of ids."""
        yield from self._iter_named_params()
        for path, module in self.model.named_modules():
            if "original_module" in path:  # of PEFT, which trains a copy
                continue
            wrappers = ["_fsdp_wrapped_module.", "base_layer.", "modules_to_save.default."]
            place = self._fix_param_name_to_vllm(path and f"{path}.", wrappers).removeprefix("base_model.model.")
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    yield place + name, buffer

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        images: Sequence[Any] | None,
        num_generations: int,
        profiler: AbstractContextManager[Any] | None = None,
    ) -> tuple[Rows, Rows, list[Rows] | None, list[Rows] | None]:
        """Continue prompts, once each: TRL repeats a prompt ``num_generations`` times. A completion ends at ``max_model_len``.

        Returns:
            Ids of prompts and completions; then, for each token of each completion, the requested log-probabilities and the token
            ids that have them, best first.
        """
        if images is not None and any(image is not None for image in images):
            raise UnsupportedError("dsv4lite with TRL: images")
        if self._llm_weights_sleeping:
            self.sync_weights()
        params, longest = SamplingParams.from_dict(self._settings()), self.llm.memory().max_model_len
        most = params.max_tokens or longest  # with tools a prompt has completions in it, and there may be room for fewer
        each = [params.replace(max_tokens=max(1, min(most, longest - len(ids)))) for ids in prompts]
        if self.enable_sleep_mode:
            self.llm.wake_up(tags=["kv_cache"])
        with profiler or nullcontext():
            outputs = self.llm.generate_batch([list(ids) for ids in prompts], each)
        if self.enable_sleep_mode:
            self.llm.sleep(level=2)
            self._llm_weights_sleeping = True
        completions = [completion for output in outputs for completion in output.outputs]
        lists = [_ranked(c.logprobs, c.token_ids) for c in completions if c.logprobs is not None]
        values, ids = ([one[i] for one in lists] if lists else None for i in (0, 1))
        return [list(output.prompt_token_ids) for output in outputs], [list(c.token_ids) for c in completions], values, ids

    def _settings(self) -> dict[str, Any]:
        """Return fields of ``SamplingParams``; log-probabilities are those of the distribution that was sampled from."""
        found: dict[str, Any] = {
            "repetition_penalty": self.repetition_penalty,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p or 0.0,
            "max_tokens": self.max_completion_length,
            "logprobs": self.logprobs,
            "logprobs_mode": "processed",
            **{name: value for name, value in self.generation_kwargs.items() if value is not None},  # as vLLM reads ``None``
        }
        found["top_k"] = max(0, found["top_k"])  # -1 is no limit
        if self.structured_outputs_regex is not None:
            found["structured_outputs"] = {"regex": self.structured_outputs_regex}
        return {"detokenize": bool(found.get("stop") or found.get("structured_outputs")), **found}


def _ranked(logprobs: Logprobs, token_ids: Sequence[int]) -> tuple[Rows, Rows]:
    """Return for each token the best log-probabilities and its own, and the token ids that have them, best first."""
    values, ids = [], []
    best = zip(token_ids, logprobs.sampled.tolist(), logprobs.token_ids.tolist(), logprobs.values.tolist(), strict=True)
    for token, value, top_ids, top_values in best:
        apart = token not in top_ids
        ids.append(top_ids + [token] * apart)
        values.append(top_values + [value] * apart)
    return values, ids
