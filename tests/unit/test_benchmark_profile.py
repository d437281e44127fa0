"""What ``examples/benchmarks/profile.py`` makes of what the host launches and of what the device runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from dsv4lite import AsyncLLM
from dsv4lite.engine.step_graphs import StepGraphs
from dsv4lite.kernels.dispatch import Op
from dsv4lite.kernels.gemm import float_linear
from dsv4lite.models.deepseek_v4.config import parse_config
from examples.benchmarks import profile
from examples.benchmarks.engine import configured
from examples.benchmarks.profile import COLLECTIVES, Call, Costs, Kernel, Tape, Watch, op_times
from tests import tiny

SMALL = "--model shipped --layers 2 --device cpu --max-model-len 1024 --batch 2 --context 8 --steps 2 --prefill 1x16".split()


def kernels(*rows: tuple[str, float, float]) -> list[Kernel]:
    return [Kernel(name=name, begin=begin, end=end) for name, begin, end in rows]


def test_kernels_belong_to_the_launch_of_the_same_number_and_overlaps_count_once() -> None:
    wide, narrow = Call("linear wide", product_s=3.0), Call("linear narrow", product_s=1.0)
    tape = Tape(calls=[wide, narrow, wide], kernels=[("product", wide), ("product", narrow), ("sum", narrow), ("product", wide)])
    ran = kernels(
        *(("product", 10, 14), ("product", 13, 16), ("sum", 16, 17), ("copy", 18, 19)),
        *(("nccl_sum", 19, 21), ("product", 20.999995, 26)),
    )
    ops, idle, late = op_times(tape, ran)
    assert {op: (one.calls, one.seconds, one.roofline_s) for op, one in ops.items()} == {
        "linear wide": (2, pytest.approx(4 + 5), 6.0),
        "linear narrow": (1, pytest.approx(2 + 1), 1.0),
        "library: copy": (1, 1.0, None),
        COLLECTIVES: (1, 2.0, None),
    }
    assert (idle, late) == (1.0, 1.0)
    assert sum(one.seconds for one in ops.values()) + idle == pytest.approx(16)
    assert ops["linear wide"].loss_s == pytest.approx(3) and ops["library: copy"].loss_s == 1


def test_kernels_that_do_not_fit_their_launches_keep_their_names() -> None:
    call = Call("linear", product_s=1.0)
    ops, *_ = op_times(Tape(calls=[call], kernels=[("product", call)]), kernels(("product", 0, 1), ("product", 1, 2)))
    assert ops["product (launched 1 times, ran 2 times)"].seconds == 2 and ops["linear"].seconds == 0


def test_launches_are_noted_with_their_ops_in_graphs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    jit = pytest.importorskip("triton.runtime.jit").JITFunction
    launched: list[str] = []
    monkeypatch.setattr(jit, "run", lambda kernel, *, grid, warmup: launched.append(kernel.__name__))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: launched.append("replay"))
    graph = SimpleNamespace()
    monkeypatch.setattr(StepGraphs, "_record", lambda self, work: (graph, work()))

    def launch(folder: str, name: str, *, warmup: bool = False) -> None:
        jit.run(SimpleNamespace(__name__=name, module=f"dsv4lite.kernels.{folder}.triton"), grid=(1,), warmup=warmup)

    def inner(x: torch.Tensor) -> torch.Tensor:
        launch("norm", "inner_kernel")
        return x

    def outer(x: torch.Tensor) -> torch.Tensor:
        launch("gemm", "outer_kernel", warmup=True)
        launch("gemm", "outer_kernel")
        return inner_op(x)

    def step() -> None:
        outer_op(torch.zeros(4, 8))
        launch("peer_memory", "all_reduce_kernel")

    inner_op, outer_op = (Op(function, "gemm.triton:none", lambda *_: False) for function in (inner, outer))
    watch = Watch(Costs(parse_config(tiny.FLASH), 10))
    record: Callable[..., Any] = StepGraphs._record
    with watch.watching():
        StepGraphs._record(object.__new__(StepGraphs), step)
        assert watch.tape == Tape()
        launch("spans", "place_kernel")
        torch.cuda.CUDAGraph.replay(graph)  # type: ignore[arg-type]
        torch.cuda.CUDAGraph.replay(graph)  # type: ignore[arg-type]
    assert StepGraphs._record is record
    step_ops = [("outer_kernel", "outer"), ("inner_kernel", "outer"), ("all_reduce_kernel", COLLECTIVES)]
    assert [(name, call.op) for name, call in watch.tape.kernels] == [("place_kernel", "spans"), *step_ops, *step_ops]
    assert [(call.op, call.bytes) for call in watch.tape.calls] == [("outer", 2 * 4 * 8 * 4)] * 2
    assert launched == ["outer_kernel", "outer_kernel", "inner_kernel", "all_reduce_kernel", "place_kernel", "replay", "replay"]


def test_a_call_costs_its_tensors_and_products() -> None:
    x, weight = torch.zeros(3, 16, dtype=torch.bfloat16), torch.zeros(5, 16, dtype=torch.bfloat16)
    call = Costs(parse_config(tiny.FLASH), 10).call(float_linear, (x, weight, torch.float32), {}, torch.zeros(3, 5))
    assert call.op == "float_linear 5x16" and call.bytes == 2 * (3 * 16 + 5 * 16) + 4 * 3 * 5
    assert call.product_s == pytest.approx(2 * 3 * 5 * 16 / 790e12)


def test_a_profile_on_a_cpu_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    decode, prefill = asyncio.run(profile.run(profile.arguments(SMALL)))
    assert decode["name"] == "decode, batch 2, context 8" and decode["steps"] >= 2 and decode["model"] == "V4-Shipped/2"
    assert prefill["name"] == "prefill 1 x 16" and prefill["steps"] == 1
    for result in (decode, prefill):
        ops = {row["op"]: row for row in result["ops"]}
        assert ops["experts_outputs"]["calls"] == ops["paged_attention"]["calls"] == 2, "one for each layer"
        assert ops["argmax_finite"]["calls"] == 1
        assert sum(row["seconds"] for row in result["ops"]) + result["idle_s"] == pytest.approx(result["seconds"])
        assert all(row["seconds"] > row["roofline_s"] > 0 for row in result["ops"])
        losses = [row["loss_s"] for row in result["ops"]]
        assert losses == sorted(losses, reverse=True)
    printed = capsys.readouterr().out
    assert "decode, batch 2, context 8:" in printed and "collectives 0.000" in printed and "float_linear 4096x256" in printed


async def test_every_sequence_decodes_in_the_watched_steps() -> None:
    """Prompts that take many steps are done before."""
    args = profile.arguments([*SMALL, "--context", "300", "--batch", "8", "--steps", "5"])

    class Profiler:
        async def during(self, name: str, length: int, work: Callable[[], Awaitable[None]], *, per_step: bool) -> dict[str, Any]:
            before = llm.stats()
            await work()
            after = llm.stats()
            return {"steps": after.steps - before.steps, "tokens": after.generated_tokens - before.generated_tokens}

    async with AsyncLLM(replace(configured(args), max_num_batched_tokens=64)) as llm:
        found = await profile.decode(llm, cast(Any, Profiler()), args, 8)
    assert found["steps"] >= 5 and found["tokens"] == 8 * found["steps"], found


def test_a_step_with_drafts_has_a_layer_more_for_each() -> None:
    decode, _ = asyncio.run(profile.run(profile.arguments([*SMALL, "--drafts", "2"])))
    ops = {row["op"]: row for row in decode["ops"]}
    assert ops["paged_attention"]["calls"] == 2 + 2


def test_ranks_of_other_processes_are_not_watched(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        profile.arguments([*SMALL, "--tp", "2"])
    assert "needs --executor thread" in capsys.readouterr().err
