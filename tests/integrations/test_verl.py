"""verl's rollouts, with the real package (and Ray's actors) where it is installed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4lite.errors import UnsupportedError
from dsv4lite.llm import LLM
from dsv4lite.request import SamplingParams
from tests.e2e.engines import MODEST, prompts_of, write_model
from tests.e2e.updates import read

pytestmark = pytest.mark.filterwarnings("ignore")
PROMPT = prompts_of((9,), 96, seed=1)[0]
ENGINE = {**MODEST, "max_model_len": 128}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    pytest.importorskip("verl")
    folder = tmp_path_factory.mktemp("models")
    return write_model(folder / "a", seed=0), write_model(folder / "b", seed=1)


def test_verl_finds_it_by_a_variable_of_the_environment(models: Any) -> None:
    """Both registries, without a patch, and before anything else of verl was imported."""
    program = """
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import get_rollout_replica_class
from verl.workers.config import RolloutConfig
print(get_rollout_class("dsv4lite").__qualname__, get_rollout_replica_class("dsv4lite").__qualname__)
RolloutConfig(name="dsv4lite", tensor_model_parallel_size=1)
"""
    environment = {**os.environ, "VERL_USE_EXTERNAL_MODULES": "dsv4lite.integrations.verl"}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, env=environment, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["Rollout", "Replica"]


def rollout_config(**settings: Any) -> Any:
    from verl.workers.config import RolloutConfig

    sizes: dict[str, Any] = {"tensor_model_parallel_size": 1, "prompt_length": 64, "response_length": 64, "max_num_seqs": 8}
    return RolloutConfig(
        name="dsv4lite", engine_kwargs={"dsv4lite": ENGINE}, full_determinism=True, load_format="auto", **sizes, **settings
    )


async def started(models: tuple[Path, Path], mode: str = "HYBRID", **settings: Any) -> Any:
    from verl.workers.rollout.replica import RolloutMode

    from dsv4lite.integrations.verl import Server

    server = Server(rollout_config(**settings), str(models[0]), RolloutMode[mode], 0)
    await server.launch()
    return server


def direct(model: Path, count: int) -> Any:
    with LLM(str(model), **ENGINE, deterministic=True) as llm:
        params = SamplingParams(max_tokens=count, seed=42, logprobs=0, logprobs_mode="processed", temperature=0.9)
        return llm.generate(PROMPT, params).outputs[0]


async def test_server_generates_what_an_engine_does(models: tuple[Path, Path]) -> None:
    server = await started(models)
    try:
        await server.set_global_steps(7)
        params = {"max_tokens": 10, "logprobs": True, "temperature": 0.9, "top_k": -1}
        output = await server.generate(PROMPT, params, "a")
        wanted = direct(models[0], 10)
        assert output.token_ids == list(wanted.token_ids) and output.log_probs == wanted.logprobs.sampled.tolist()
        assert output.stop_reason == "completed" and output.extra_fields["global_steps"] == 7
        plain = await server.generate(PROMPT, {"max_new_tokens": 500, "ignore_eos": True}, "b")
        assert plain.log_probs is None and len(plain.token_ids) == 128 - len(PROMPT)
        stopped = await server.generate(PROMPT, {"stop": ["c"], "allowed_token_ids": [9]}, "d")
        assert stopped.token_ids == [9] and stopped.stop_reason == "completed"
        nothing = dict.fromkeys(("max_new_tokens", "top_k", "stop", "stop_token_ids", "repetition_penalty", "seed"))
        assert (await server.generate(PROMPT, {**nothing, "ignore_eos": True}, "f")).token_ids == plain.token_ids[:64]
        for best in (0, 2):  # a teacher's: a row for each token of the prompt, of which the last says nothing
            taught = (await server.generate(PROMPT, {"max_tokens": 1, "prompt_logprobs": best}, "e")).extra_fields
            scores = await server._llm.score(PROMPT[:1], PROMPT[1:], top_logprobs=best)
            own = torch.tensor(PROMPT[1:])[:, None], scores.sampled[:, None]
            ids, values = (scores.token_ids, scores.values) if best else own
            assert taught["prompt_ids"] == [*ids.tolist(), [0] * max(best, 1)]
            assert taught["prompt_logprobs"] == [*values.tolist(), [0.0] * max(best, 1)]
            short = (await server.generate(PROMPT[:1], {"max_tokens": 1, "prompt_logprobs": best}, "f")).extra_fields
            assert (short["prompt_ids"], short["prompt_logprobs"]) == ([[0] * max(best, 1)], [[0.0] * max(best, 1)])
        with pytest.raises(UnsupportedError, match="images"):
            await server.generate(PROMPT, {}, "c", image_data=["picture"])
        with pytest.raises(UnsupportedError, match=r"'init_weights'\); use wake_up, .* and update_weights of the rollout"):
            await server.collective_rpc("init_weights", timeout=1.0, args=(1,))
    finally:
        await server._llm.aclose()


@pytest.mark.parametrize("k", [1, 2])
async def test_counts_of_drafts_are_complete_or_absent(models: tuple[Path, Path], k: int) -> None:
    """verl's metrics fail on some of the three fields. With more drafts in a step the engine does not count steps per request."""
    from verl.trainer.ppo.ray_trainer import compute_spec_decode_metrics
    from verl.workers.config import MtpConfig

    server = await started(models, mtp=MtpConfig(enable=True, enable_rollout=True, num_speculative_tokens=k))
    try:
        params = {"temperature": 0, "ignore_eos": True, "allowed_token_ids": [20, 21]}
        outputs = [(await server.generate(PROMPT, {**params, "max_tokens": n}, str(n))).extra_fields for n in (1, 40)]
        names = ("spec_num_draft_tokens", "spec_num_accepted_tokens", "spec_num_verify_steps")
        found = [[extra.get(name) for extra in outputs] for name in names]
        if k > 1:
            assert found == [[None, None]] * 3
            return
        metrics = compute_spec_decode_metrics(*found)
        assert metrics["rollout/spec_accept_length"] == found[1][1] / found[2][1] / 2 + 0.5 and 0 < found[1][1] < found[2][1] < 40
    finally:
        await server._llm.aclose()


async def test_aborted_requests_go_on_from_their_tokens(models: tuple[Path, Path]) -> None:
    """verl's partial rollout: it sends prompt and tokens again, and gets the undisturbed request's bits. Requests behind a closed
    gate wait, or end empty."""
    server = await started(models)
    try:
        params = {"max_tokens": 100, "ignore_eos": True, "logprobs": True}
        task = asyncio.create_task(server.generate(PROMPT, params, "a"))
        while not server._llm.stats().generated_tokens:
            await asyncio.sleep(0.01)
        found = await server.abort_all_requests(reject_request=True)
        output = await task
        assert output.stop_reason == "aborted" and 0 < len(output.token_ids) == len(output.log_probs) < 100
        assert found["aborted_count"] == 1
        assert (await server.generate(PROMPT, {"max_tokens": 3}, "b")).stop_reason == "aborted"
        await server.abort_all_requests()
        waiting = asyncio.create_task(server.generate([*PROMPT, *output.token_ids], {**params, "max_tokens": 3}, "c"))
        await asyncio.sleep(0.1)
        assert not waiting.done() and output.extra_fields["global_steps"] is None
        await server.set_global_steps(5)
        await server.resume_generation()
        continued = await waiting
        assert len(continued.token_ids) == 3 and continued.extra_fields["global_steps"] == 5
        whole = await server.generate(PROMPT, {**params, "max_tokens": len(output.token_ids) + 3}, "d")
        assert whole.token_ids == output.token_ids + continued.token_ids
        assert whole.log_probs == output.log_probs + continued.log_probs
        await server.wait_for_requests_to_drain()
        assert (await server.abort_request("nothing"))["request_id"] == "nothing"
        await server.clear_kv_cache()
    finally:
        await server._llm.aclose()


async def test_requests_wait_for_the_end_of_an_update_for_which_the_engine_sleeps(models: tuple[Path, Path]) -> None:
    """verl's other backends release the KV cache while agent loops go on; those that came then failed or were aborted."""
    server = await started(models, "STANDALONE")
    try:
        params = {"max_tokens": 3, "ignore_eos": True, "logprobs": True}
        await server.abort_all_requests()
        early = asyncio.create_task(server.generate(PROMPT, params, "a"))
        await asyncio.sleep(0.1)
        await server.release_kv_cache()
        late = asyncio.create_task(server.generate(PROMPT, params, "b"))
        await asyncio.sleep(0.1)
        assert not early.done() and not late.done()
        await server.set_global_steps(2)
        await server.resume_kv_cache()
        await server.resume_generation()
        for output in (await early, await late):
            assert (output.stop_reason, output.extra_fields["global_steps"]) == ("completed", 2) and len(output.token_ids) == 3
    finally:
        await server._llm.aclose()


async def test_requests_may_have_one_id(models: tuple[Path, Path]) -> None:
    """With full_determinism verl's v1 trainer and its fully asynchronous one call every request ``det-0``."""
    server = await started(models)
    try:
        params = {"max_tokens": 60, "ignore_eos": True}
        await server._llm.pause(mode="keep")
        tasks = [asyncio.create_task(server.generate(PROMPT, params, name)) for name in ("det-0", "det-0", "other")]
        await asyncio.sleep(0.1)
        await server.abort_request("det-0")
        await server._llm.resume()
        assert [(await task).stop_reason for task in tasks] == ["aborted", "aborted", "completed"]
    finally:
        await server._llm.aclose()


@pytest.mark.parametrize(
    ("mode", "asleep", "valid"), [("HYBRID", True, False), ("COLOCATED", True, True), ("STANDALONE", False, True)]
)
async def test_sleep_is_as_the_mode_says(models: tuple[Path, Path], mode: str, asleep: bool, valid: bool) -> None:
    """Weights are dropped where the trainer brings them again, and kept where it does not; nothing sleeps on GPUs of its own."""
    server = await started(models, mode)
    try:
        await server.sleep()
        assert (server._llm.state == "asleep") is asleep
        await server.wake_up(["weights"])
        await server.wake_up(["kv_cache"])
        assert server._llm.state == ("ready" if valid else "weights_invalid")
    finally:
        await server._llm.aclose()


@pytest.fixture(scope="module")
def cluster(models: Any) -> Iterator[Any]:
    import ray

    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": environment}, logging_level="ERROR")
    yield ray
    ray.shutdown()


async def test_trainer_s_weights_reach_the_server_in_its_actor(models: tuple[Path, Path], cluster: Any, monkeypatch: Any) -> None:
    """Replica, server and rollout together: sleep at level 2, an update in buckets through shared memory, and generation."""
    from verl.workers.config import CheckpointEngineConfig, HFModelConfig
    from verl.workers.rollout.replica import RolloutMode

    from dsv4lite.integrations.verl import Replica, Rollout

    class Worker:
        def __init__(self) -> None:
            pass

    config = rollout_config(checkpoint_engine=CheckpointEngineConfig(update_weights_bucket_megabytes=1))
    replica = Replica(0, config, SimpleNamespace(local_path=str(models[0])), gpus_per_node=1)  # type: ignore[arg-type]
    replica.rollout_mode, replica.workers = RolloutMode.HYBRID, [cluster.remote(Worker).remote()]
    await replica.launch_servers()
    monkeypatch.setenv("RANK", "0")
    rollout = Rollout.__new__(Rollout)
    monkeypatch.setattr("verl.workers.rollout.base.omega_conf_to_dataclass", lambda value: value)
    rollout.__init__(config, HFModelConfig.__new__(HFModelConfig), None)  # type: ignore[misc]
    new = read(models[1])

    async def weights() -> AsyncIterator[tuple[str, Tensor]]:
        for name, tensor in new.items():
            yield name, tensor

    await rollout.release()
    await rollout.resume(["weights"])
    await rollout.update_weights(weights(), global_steps=3)
    await rollout.resume(["kv_cache"])
    params = {"max_tokens": 10, "logprobs": True, "temperature": 0.9}
    output = await replica.server_handle.generate.remote(PROMPT, params, "a")
    wanted = direct(models[1], 10)
    assert output.token_ids == list(wanted.token_ids) and output.log_probs == wanted.logprobs.sampled.tolist()
    assert output.extra_fields["global_steps"] == 3 and output.extra_fields["weight_versions"] == ((3, 0, len(output.token_ids)),)
    await rollout.update_weights(iter(new.items()), global_steps=4)  # awake, and from a plain iterator
    assert (await replica.server_handle.generate.remote(PROMPT, params, "b")).token_ids == output.token_ids
    with pytest.raises(UnsupportedError, match="delta_flush"):
        await rollout.update_weights(iter(()), wire_format="delta_flush")
    await replica.sleep()
    await replica.wake_up()
