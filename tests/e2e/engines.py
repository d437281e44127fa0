"""Small checkpoints for whole engines, comparisons of outputs, and what tests ask of an engine's inside."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from dsv4lite.api import session
from dsv4lite.engine.engine import Engine
from dsv4lite.engine.runner import Runner
from dsv4lite.llm import LLM, AsyncLLM
from dsv4lite.models.deepseek_v4.config import parse_config
from dsv4lite.models.deepseek_v4.tensors import V4_TENSORS
from dsv4lite.planning.memory import plan_memory
from dsv4lite.request import Logprobs, RequestOutput
from dsv4lite.scheduling.pages import IdPool
from dsv4lite.scheduling.replicas import Replicas
from dsv4lite.weights.dummy import dummy_tensors
from tests.tiny import TINY, refreshed, write_checkpoint

SPECIAL = (
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>", "<｜User｜>", "<｜Assistant｜>"),
    *("<think>", "</think>"),
)
EOS, THINK, END_THINK = 1, 5, 6
FIRST_LETTER = len(SPECIAL)
# One token each; small vocabularies take the head of the list.
LETTERS = "abcdefghijklmnopqrstuvwxyz 0123456789{}\":,[]-+._/\n!?'()<>=ABCDEFGHIJKLMNOPQRSTUVWXYZ#$%&*;@\\^`|~"

# Every kind of layer; short prompts cross groups, windows and pages, and make the indexer select.
SMALL: Mapping[str, Any] = {
    **TINY,
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "head_dim": 16,
    "qk_rope_head_dim": 4,
    "q_lora_rank": 16,
    "o_lora_rank": 8,
    "n_routed_experts": 4,
    "moe_intermediate_size": 16,
    "num_hash_layers": 1,
    "index_n_heads": 4,
    "index_head_dim": 8,
    "index_topk": 5,
    "sliding_window": 16,
    "compress_ratios": [4, 8, 0, 0],
    "hc_mult": 2,
    "hc_sinkhorn_iters": 3,
    "torch_dtype": "float32",
}
REFRESHED = {**refreshed(SMALL, targets=[1, 2], rank=8, block=4, noise=0), "compress_ratios": [4, 8, 0, 0, 0]}


MODEST: Mapping[str, Any] = {"device": "cpu", "max_model_len": 1024, "max_num_seqs": 8, "kv_cache_memory_bytes": 16 << 20}
"""Settings of an engine that starts at once."""


def write_tokenizer(folder: Path, vocab_size: int) -> Path:
    """Write a byte-level tokenizer without merges: special tokens, then single characters."""
    names = [*SPECIAL, *(pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(c)[0][0] for c in LETTERS)]
    backend = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names[:vocab_size])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    return folder


def float32(tensors: Any) -> Iterator[tuple[str, Tensor]]:
    """Widen what is floating."""
    for name, tensor in tensors:
        yield name, tensor.float() if tensor.is_floating_point() else tensor


def nan_embedding(name: str, tensor: Tensor) -> Tensor:
    """Make the embedding of the last token NaN: a change for ``write_model``."""
    if name == "embed.weight":
        tensor = tensor.clone()
        tensor[-1] = float("nan")
    return tensor


def write_model(
    folder: Path,
    config: Mapping[str, Any] = SMALL,
    *,
    seed: int = 0,
    change: Callable[[str, Tensor], Tensor | None] = lambda name, tensor: tensor,
    shard_bytes: int | None = None,
) -> Path:
    """Write a plain float32 checkpoint with random weights, and a tokenizer of its size.

    Args:
        folder: Where.
        config: In the release form.
        seed: Of the weights.
        change: Returns what to store instead of a tensor; ``None`` leaves it out.
        shard_bytes: Size of a shard; default is a single file.
    """
    tensors = float32(dummy_tensors(parse_config(config), V4_TENSORS, expert_format="unquantized", quantized=False, seed=seed))
    changed = ((name, change(name, tensor)) for name, tensor in tensors)
    write_checkpoint(folder, config, ((n, t) for n, t in changed if t is not None), shard_bytes=shard_bytes)
    return write_tokenizer(folder, config["vocab_size"])


def engine_of(llm: LLM | AsyncLLM) -> Engine:
    """Return the engine of an API object."""
    engine = llm._session.engine("test")
    assert isinstance(engine, Engine)
    return engine


def thread_of(llm: LLM | AsyncLLM) -> threading.Thread:
    """Return the thread of an engine."""
    thread = engine_of(llm)._thread
    assert thread is not None
    return thread


def unopened(model: Path | str, **settings: Any) -> LLM:
    """Return an engine on the CPU that is not started."""
    return LLM(str(model), **{**MODEST, **settings})


@contextmanager
def overlapping(on: bool | None) -> Iterator[None]:
    """Let engines opened meanwhile plan a step before the results of the previous one are known (or not)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "open_engine", lambda config: Engine(config, overlap=on))
        yield


@contextmanager
def opened(model: Path | str, *, overlap: bool | None = None, **settings: Any) -> Iterator[LLM]:
    """Open an engine on the CPU; when the block ends it must be idle, and everything accounted for."""
    with overlapping(overlap), unopened(model, **settings) as llm:
        yield llm
        engine = engine_of(llm)
        for _ in range(100):  # the engine delivers what an abort has left once the commands that have come have run
            if engine.call(lambda engine: not engine._outputs).result(timeout=60):
                break
            time.sleep(0.01)
        engine.call(assert_idle).result(timeout=60)


def assert_idle(engine: Engine) -> None:
    """Assert that nothing is left of any request."""
    engine._finish_all()
    scheduler, runner = engine._scheduler, engine._runner
    # What a finished step still held is released when the next one is planned.
    assert not scheduler.has_work() and scheduler.schedule(0.0) is None
    scheduler.check()
    counts = scheduler.stats()
    assert (counts.num_running, counts.num_waiting) == (0, 0)
    for replica in scheduler._schedulers if isinstance(scheduler, Replicas) else (scheduler,):
        for pool in (replica._pools.grow, replica._pools.window, replica._pools.slots, replica._pools.snapshots):
            assert pool.num_available == pool.total
    if isinstance(runner, Runner):  # of several ranks each has its own
        assert not runner._requests and not runner.sampler.num_sequences
    for kept in (engine._choices, engine._seq_ids, engine._with_host_rules, engine._outputs, engine._in_flight):
        assert not kept, kept


def raising(error: BaseException) -> Callable[..., Any]:
    """Return a function that raises an error."""

    def fail(*args: object, **settings: object) -> None:
        raise error

    return fail


def pools_of(engine: Engine) -> tuple[IdPool, ...]:
    """Return an engine's pools of ids."""
    pools = engine._scheduler._pools
    return (pools.grow, pools.window, pools.slots, pools.snapshots)


def room_for(model: Path, pages: int, **settings: Any) -> int:
    """Return the bytes of state that hold so many grow pages, besides what sequences take anyway."""
    plan = plan_memory(str(model), device="cpu", **settings)
    budget = plan.per_device[0]
    return budget.window_pages + budget.slots + budget.snapshots + pages * int(256 * plan.bytes_per_token)


def prompts_of(lengths: Sequence[int], vocab_size: int, *, seed: int = 0) -> list[list[int]]:
    """Return random prompts without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(FIRST_LETTER, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def tensor_bytes() -> int:
    """Return the bytes of all tensors that the garbage collector tracks."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if issubclass(type(t), Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def same_logprobs(ours: Logprobs | None, theirs: Logprobs | None, *, tolerance: float = 0.0) -> None:
    """Assert that log-probabilities have the same bits; with a tolerance, that sampled and listed values are this close."""
    assert (ours is None) == (theirs is None)
    if ours is None or theirs is None:
        return
    assert ours.mode == theirs.mode
    for field in ("sampled", "values"):
        torch.testing.assert_close(getattr(ours, field), getattr(theirs, field), rtol=0, atol=tolerance)
    for field in ("ranks", "token_ids") if tolerance == 0 else ():  # else close ones may change places
        assert torch.equal(getattr(ours, field), getattr(theirs, field)), field


def same_outputs(ours: Iterable[RequestOutput], theirs: Iterable[RequestOutput], *, tolerance: float = 0.0) -> None:
    """Assert that outputs have the same tokens, texts, ends, log-probabilities and routed experts."""
    for mine, expected in zip(ours, theirs, strict=True):
        for a, b in zip(mine.outputs, expected.outputs, strict=True):
            assert (a.token_ids, a.text, a.finish_reason, a.stop_reason) == (b.token_ids, b.text, b.finish_reason, b.stop_reason)
            same_logprobs(a.logprobs, b.logprobs, tolerance=tolerance)
            assert (a.routed_experts is None) == (b.routed_experts is None)
            if a.routed_experts is not None and b.routed_experts is not None:
                assert torch.equal(a.routed_experts, b.routed_experts)
        same_logprobs(mine.prompt_logprobs, expected.prompt_logprobs, tolerance=tolerance)
