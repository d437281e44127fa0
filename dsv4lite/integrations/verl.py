"""verl's rollouts by engines of this package; written for verl 0.9.1.

    VERL_USE_EXTERNAL_MODULES=dsv4lite.integrations.verl    # then actor_rollout_ref.rollout.name=dsv4lite

Settings of the engine that verl does not have go to ``rollout.engine_kwargs.dsv4lite``.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, RolloutReplicaRegistry, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator

from dsv4lite.config import MTP, global_rank
from dsv4lite.errors import UnsupportedError
from dsv4lite.integrations.transfer import WeightTransfer
from dsv4lite.llm import AsyncLLM
from dsv4lite.request import Phase, SamplingParams
from dsv4lite.weights.shared import IPCSource, SharedTensor, SharedWeights

NAME = "dsv4lite"


class Server:
    """The engine of one replica, in an actor of Ray; the other classes call it.

    Args:
        config: verl's ``RolloutConfig``.
        model: Folder of the checkpoint.
        mode: How the replica shares its GPUs with the trainer.
        replica_rank: Number of the replica.
    """

    def __init__(self, config: Any, model: str, mode: RolloutMode, replica_rank: int) -> None:
        self._config, self._model, self._mode, self._rank = config, model, mode, replica_rank
        self._global_steps: int | None = None
        self._rejecting, self._gate = False, asyncio.Event()  # closed from ``abort_all_requests`` to ``resume_generation``
        self._gate.set()
        self._open: dict[str, str] = {}  # the caller's id by the engine's
        self._numbers = itertools.count()

    async def launch(self) -> None:
        """Start the engine."""
        config = self._config
        drafts = config.mtp.enable and config.mtp.enable_rollout
        settings: dict[str, Any] = {
            "tensor_parallel_size": config.tensor_model_parallel_size,
            "data_parallel_size": config.data_parallel_size,
            "pipeline_parallel_size": config.pipeline_model_parallel_size,
            "expert_parallel_size": config.expert_parallel_size,
            "max_model_len": config.max_model_len or config.prompt_length + config.response_length,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "enable_prefix_caching": config.enable_prefix_caching,
            "load_format": "dummy" if config.load_format == "dummy" else "auto",
            "deterministic": config.full_determinism,
            "speculative": MTP(config.mtp.num_speculative_tokens) if drafts else None,
            "seed": self._rank + config.seed,
        }
        self._llm = await AsyncLLM.create(self._model, **{**settings, **config.engine_kwargs.get(NAME, {})})
        self._transfer = WeightTransfer(self._llm)
        await self._transfer.init_weight_transfer_engine(IPCSource)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        image_data: Sequence[Any] | None = None,
        video_data: Sequence[Any] | None = None,
        audio_data: Sequence[Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
    ) -> TokenOutput:
        """Continue a prompt. A request that was aborted has ``stop_reason="aborted"`` and its tokens so far."""
        if image_data or video_data or audio_data:
            raise UnsupportedError("dsv4lite with verl: images, video and audio")
        while not self._gate.is_set():
            if self._rejecting:
                return TokenOutput(token_ids=[], stop_reason="aborted", extra_fields={"global_steps": self._global_steps})
            await self._gate.wait()  # the engine may be asleep meanwhile
        params = self._params(len(prompt_ids), dict(sampling_params))
        name = f"{request_id}-{next(self._numbers)}"  # with full_determinism verl's trainers may give all requests one id
        self._open[name] = request_id
        try:
            output = await self._llm.generate(list(prompt_ids), params, request_id=name, priority=priority)
        finally:
            del self._open[name]
        extra: dict[str, Any] = {"global_steps": self._global_steps}  # an update may have come while the request was waiting
        (completion,) = output.outputs
        if (best := params.prompt_logprobs) is not None:
            scores = output.prompt_logprobs
            assert scores is not None
            ids = scores.token_ids.tolist() if best else [[token] for token in output.prompt_token_ids[1:]]
            values = scores.values.tolist() if best else scores.sampled[:, None].tolist()
            extra["prompt_ids"] = [*ids, [0] * max(best, 1)]  # verl wants a row for each token, and the last has none
            extra["prompt_logprobs"] = [*values, [0.0] * max(best, 1)]
        drafter, usage = self._llm.config.speculative, output.usage
        extra["num_cached_tokens"] = usage.cached_tokens
        extra["weight_versions"] = completion.weight_versions
        if isinstance(drafter, MTP) and drafter.k == 1:  # each verify step has one draft token; verl needs all three fields or none
            extra["spec_num_draft_tokens"] = extra["spec_num_verify_steps"] = usage.drafted_tokens
            extra["spec_num_accepted_tokens"] = usage.accepted_tokens
        reasons: dict[str | None, str] = {"abort": "aborted", "stop": "completed", "length": "completed"}
        return TokenOutput(
            token_ids=list(completion.token_ids),
            log_probs=None if completion.logprobs is None else completion.logprobs.sampled.tolist(),
            routed_experts=completion.routed_experts,
            stop_reason=reasons.get(completion.finish_reason, completion.finish_reason),
            extra_fields=extra,
        )

    def _params(self, prompt_tokens: int, given: dict[str, Any]) -> SamplingParams:
        config = self._config
        given = {name: value for name, value in given.items() if value is not None}  # as if it was not given, as vLLM reads it
        left = (config.max_model_len or config.prompt_length + config.response_length) - prompt_tokens
        default = min(config.response_length, config.prompt_length + config.response_length - prompt_tokens)
        wanted = given.pop("max_tokens", given.pop("max_new_tokens", default))
        given["top_k"] = max(0, given.get("top_k", 0))  # verl also writes -1 for no limit
        given["logprobs"] = 0 if given.pop("logprobs", False) else None
        settings: dict[str, Any] = {
            "max_tokens": max(1, min(wanted, left)),
            "repetition_penalty": config.repetition_penalty,
            "ignore_eos": config.ignore_eos,
            "logprobs_mode": "processed" if config.logprobs_mode == "processed_logprobs" else "raw",
            "return_routed_experts": config.enable_rollout_routing_replay,
            "detokenize": bool(given.get("stop") or given.get("structured_outputs")),
            **({"seed": self._rank + config.seed} if config.full_determinism else {}),
        }
        return SamplingParams.from_dict({**settings, **given})

    async def wake_up(self, tags: Sequence[Any] | None = None) -> None:
        """Allocate weights, KV cache or both; without effect in a replica that has its GPUs alone."""
        if self._mode is not RolloutMode.STANDALONE:
            await self._llm.wake_up(tags)

    async def sleep(self) -> None:
        """Free the KV cache and the weights, which are dropped if the trainer will send them again."""
        if self._config.free_cache_engine and self._mode is not RolloutMode.STANDALONE:
            await self._llm.sleep(level=2 if self._mode is RolloutMode.HYBRID else 1)

    async def release_kv_cache(self) -> None:
        """Give the memory of the KV cache back for an update; the weights are kept."""
        if self._config.free_cache_engine and self._mode is not RolloutMode.COLOCATED:
            await self._llm.sleep(level=1)
            await self._llm.wake_up(["weights"])

    async def resume_kv_cache(self) -> None:
        """Allocate the KV cache again."""
        await self._llm.wake_up(["kv_cache"])

    async def clear_kv_cache(self) -> None:
        """Forget cached prefixes."""
        await self._llm.reset_prefix_cache()

    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> dict[str, Any]:
        """End all requests with what they have; later ones wait for ``resume_generation``, or with ``reject_request`` end empty."""
        stats = self._llm.stats()
        self._rejecting = reject_request
        self._gate.clear()
        await self._llm.pause(mode="abort")
        if reset_prefix_cache:
            await self._llm.reset_prefix_cache()
        return {"aborted_count": stats.num_running + stats.num_waiting, "request_ids": []}

    async def abort_request(self, request_id: str, reset_prefix_cache: bool = True) -> dict[str, Any]:
        """End all requests of an id with what they have."""
        for name in [name for name, given in self._open.items() if given == request_id]:
            self._llm.abort(name)
        if reset_prefix_cache:
            await self._llm.reset_prefix_cache()
        return {"aborted": True, "request_id": request_id}

    async def resume_generation(self) -> None:
        """Go on after ``abort_all_requests``."""
        await self._llm.resume()
        self._rejecting = False
        self._gate.set()

    async def wait_for_requests_to_drain(self) -> None:
        """Return when no request is open; those that come meanwhile wait."""
        if self._llm.state in (Phase.READY, Phase.PAUSED):
            async with self._llm.paused("wait"):
                return

    async def set_global_steps(self, global_steps: int) -> None:
        """Remember the trainer's step, for ``extra_fields``."""
        self._global_steps = global_steps

    async def start_update(self, version: int | None) -> None:
        """Open an update of all weights."""
        await self._transfer.cancel_weight_update()  # of a trainer that has failed
        await self._transfer.start_weight_update(version)

    async def update(self, handles: Sequence[SharedTensor]) -> None:
        """Take a bucket of the trainer's tensors."""
        await self._transfer.update_weights(handles)

    async def finish_update(self) -> None:
        """Publish the weights."""
        await self._transfer.finish_weight_update()

    async def collective_rpc(self, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None) -> None:
        """Refuse: the methods that verl calls by name are those of vLLM's workers.

        Raises:
            UnsupportedError: Always.
        """
        instead = "use wake_up, sleep, clear_kv_cache and set_global_steps of the server, and update_weights of the rollout"
        raise UnsupportedError(f"dsv4lite with verl: collective_rpc({method!r}); {instead}")

    async def start_profile(self, **settings: Any) -> None:
        """Do nothing: a profiler of the host's sees the engine."""

    async def stop_profile(self) -> None:
        """See ``start_profile``."""


class Replica(RolloutReplica):
    """One engine on the GPUs of one machine; verl calls its server."""

    async def launch_servers(self) -> None:
        """Start the actor with the engine.

        Raises:
            UnsupportedError: The replica needs several machines.
        """
        if self.nnodes > 1:
            raise UnsupportedError(f"dsv4lite with verl: a replica on {self.nnodes} machines")
        places = [await worker.__ray_call__.remote(_place) for worker in self.workers]
        node, devices = places[0][0], ",".join(device for _, device in places if device)
        environment = {"CUDA_VISIBLE_DEVICES": devices, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"} if devices else {}
        kind = "reward_" if self.is_reward_model else "teacher_" if self.is_teacher_model else ""
        name = f"{_actor_name(kind, self.replica_rank)}{self.name_suffix}"
        server = ray.remote(Server).options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
            runtime_env={"env_vars": environment},
            name=name,
            max_concurrency=self.max_concurrency,
        )
        model = getattr(self.model_config, "local_path", None) or self.model_config.path
        self._server_handle = server.remote(self.config, model, self.rollout_mode, self.replica_rank)
        self.servers, self._server_address = [self._server_handle], name
        await self._server_handle.launch.remote()


def _place(worker: Any) -> tuple[str, str]:
    """Return the node of a worker of Ray, and its GPUs."""
    context = ray.get_runtime_context()
    return context.get_node_id(), ",".join(context.get_accelerator_ids().get("GPU", ()))


def _actor_name(kind: str, replica_rank: int) -> str:
    return f"{NAME}_server_{kind}{replica_rank}"


class Rollout(BaseRollout):
    """The trainer's side. Every rank of the trainer has one, and the first rank of a replica calls the server."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        rank, sizes = global_rank() or 0, self.config
        world = sizes.tensor_model_parallel_size * sizes.data_parallel_size * sizes.pipeline_model_parallel_size
        self._replica = rank // world if replica_rank == -1 else replica_rank
        self._leads = rank % world == 0

    @property
    def _server(self) -> Any:
        return ray.get_actor(_actor_name("", self._replica))

    async def resume(self, tags: list[str]) -> None:
        """Allocate weights, KV cache or both."""
        if self._leads and self.config.free_cache_engine:
            await self._server.wake_up.remote(tags)

    async def release(self) -> None:
        """Give the memory of weights and KV cache back."""
        if self._leads and self.config.free_cache_engine:
            await self._server.sleep.remote()

    async def update_weights(
        self, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors", **options: Any
    ) -> None:
        """Give the server all weights. Every rank iterates over them, because that gathers them.

        Raises:
            UnsupportedError: Deltas in verl's own form.
        """
        if wire_format != "named_tensors":
            raise UnsupportedError(f"dsv4lite with verl: wire_format={wire_format!r}")
        if self._leads:
            await self._server.start_update.remote(global_steps)
        bucket: list[tuple[str, Any]] = []
        size = 0
        async for name, tensor in ensure_async_iterator(weights):
            if not self._leads:
                continue
            bucket.append((name, tensor.detach().clone()))  # verl may use one buffer for all
            size += tensor.nbytes
            if size >= self.config.checkpoint_engine.update_weights_bucket_megabytes << 20:
                await self._send(bucket)
                bucket, size = [], 0
        if self._leads:
            await self._send(bucket)
            await self._server.finish_update.remote()
            if global_steps is not None:
                await self._server.set_global_steps.remote(global_steps)

    async def _send(self, bucket: Sequence[tuple[str, Any]]) -> None:
        with SharedWeights(bucket) as shared:
            await self._server.update.remote(shared.handles)


_ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.{Rollout.__qualname__}"
RolloutReplicaRegistry.register(NAME, lambda: Replica)
