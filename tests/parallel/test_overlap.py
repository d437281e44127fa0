"""The shared expert beside rows on their way, and by whom it is computed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4lite.layout import Layout
from dsv4lite.models import moe
from dsv4lite.models import shard as shard_module
from dsv4lite.models.deepseek_v4.tensors import V4_TENSORS
from dsv4lite.models.shard import UNSHARED_TOKENS, ModelShard
from dsv4lite.parallel.experts import DispatcherFactory
from dsv4lite.parallel.mesh import Mesh
from tests.golden import tiny_checkpoint, tiny_ids
from tests.parallel.dispatchers import OwnAllGather
from tests.parallel.models import PLAIN, Job, build, run, write
from tests.parallel.ranks import Ranks

ONE = Layout()
TOGETHER = (Layout(ep=2), Layout(tp=2, ep=4))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    config = replace(PLAIN, num_hidden_layers=1, ratios=PLAIN.ratios[:1] + PLAIN.ratios[-1:])
    folder = write(tmp_path_factory.mktemp("plain") / "model", tiny_checkpoint(config))
    ids = tiny_ids(30, config)
    return Job(folder=folder, config=config, prompts=(tuple(ids), tuple(reversed(ids))), cuts=((26,), (21,)), known_shapes=True)


class Noted:
    """A process group that logs when each collective begins, and when a rank waits for it."""

    def __init__(self, group: Any, log: list[str]) -> None:
        self._group, self._log = group, log

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._group, name)
        return partial(self._begin, name.strip("_").removesuffix("_base"), found) if callable(found) else found

    def _begin(self, name: str, method: Any, *args: Any) -> Any:
        self._log.append(f"begin {name}")
        return NotedWork(method(*args), f"wait {name}", self._log)


class NotedWork:
    def __init__(self, work: Any, name: str, log: list[str]) -> None:
        self._work, self._name, self._log = work, name, log

    def wait(self) -> None:
        self._log.append(self._name)
        self._work.wait()


@torch.no_grad()
def noted(mesh: Mesh, job: Job, least: int) -> tuple[list[str], Tensor | None]:
    """Return what a rank does in the first step, with the rows of the shared expert's products, and the logits of all steps."""
    log: list[str] = []
    if mesh.ep.size > 1:
        mesh = replace(mesh, ep=replace(mesh.ep, group=Noted(mesh.ep.group, log)))
    model = build(mesh, job)
    (layer,) = model.layers
    block: Any = layer.ffn
    multiply, first = moe.linear, block.shared.w13

    def linear(x: Tensor, matrix: Any, *args: Any, **options: Any) -> Tensor:
        if matrix is first:
            log.append(f"first {len(x)}")
        return multiply(x, matrix, *args, **options)

    block.shared.register_forward_pre_hook(lambda module, args: log.append(f"second {len(args[0])}"))
    work = block.experts.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_module, "UNSHARED_TOKENS", least)
        patch.setattr(moe, "linear", linear)
        patch.setattr(block.experts, "forward", lambda *args: [log.append("experts"), work(*args)][1])
        return log, run(model, mesh, job)


@pytest.mark.parametrize(
    ("dispatcher", "there", "back"),
    [
        ("all_gather", ["allgather"], "reduce_scatter"),
        (OwnAllGather, ["allgather"], "reduce_scatter"),
        ("all_to_all", ["alltoall", "alltoall"], "alltoall"),  # first how many rows
    ],
)
@pytest.mark.parametrize("layout", [Layout(dp=2, ep=2), Layout(dp=2, tp=2, ep=4)], ids=str)
def test_shared_expert_runs_while_rows_are_on_their_way_there_and_back(
    ranks: Ranks, job: Job, layout: Layout, dispatcher: str | DispatcherFactory, there: list[str], back: str
) -> None:
    answers = ranks.run(noted, replace(job, dispatcher=dispatcher), UNSHARED_TOKENS, layout=layout)
    for rank, (log, _) in enumerate(answers):
        tokens = job.cuts[layout.place(rank).dp][0]
        *known, last = there
        before = [f"{event} {name}" for name in known for event in ("begin", "wait")]
        went = [f"begin {last}", f"first {tokens}", f"wait {last}", "experts"]
        events = [event for event, _ in groupby(log)]  # gloo moves several tensors one by one
        assert events[: len(before) + 7] == [*before, *went, f"begin {back}", f"second {tokens}", f"wait {back}"]


@pytest.mark.parametrize("dispatcher", ["local", "all_gather", "all_to_all"])
@pytest.mark.parametrize("layout", TOGETHER, ids=str)
def test_copies_share_the_shared_expert_of_many_tokens(ranks: Ranks, job: Job, layout: Layout, dispatcher: str) -> None:
    (_, expected), *_ = ranks.run(noted, job, UNSHARED_TOKENS, layout=ONE)
    answers = ranks.run(noted, replace(job, dispatcher=dispatcher), 4, layout=layout)
    for rank, (log, found) in enumerate(answers):
        rows = [event for event in log if event.startswith(("first", "second"))]
        few = ["first 4", "second 4"] if layout.place(rank).copy == 0 else []
        assert rows == ["first 13", "second 13", *few]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", [ONE, Layout(tp=2), Layout(dp=2, ep=2), Layout(ep=4), *TOGETHER], ids=str)
def test_shared_expert_of_every_token_is_added_by_one_copy(layout: Layout) -> None:
    for tokens in (1, UNSHARED_TOKENS, UNSHARED_TOKENS + 1, 1001):
        shards = [ModelShard.of(PLAIN, V4_TENSORS, Mesh.outline(layout, rank)) for rank in range(layout.world)]
        for tp in range(layout.tp):
            for dp in range(layout.dp):
                parts = [range(tokens)[s.shared_tokens(tokens)] for s in shards if (s.mesh.place.tp, s.mesh.place.dp) == (tp, dp)]
                assert sorted(token for part in parts for token in part) == list(range(tokens))
                assert tokens <= UNSHARED_TOKENS or max(map(len, parts)) == -(-tokens // layout.copies)
