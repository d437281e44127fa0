"""What replicas that share experts say to each other: the same in the same order on every rank, whatever each of them has to do."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from dsv4lite.layout import Layout
from dsv4lite.llm import LLM
from dsv4lite.parallel import mesh as mesh_module
from dsv4lite.request import SamplingParams
from tests.e2e.engines import MODEST, SMALL, overlapping, prompts_of
from tests.parallel.ranks import Ranks
from tests.parallel.test_external import Job, job_of, on_ranks
from tests.parallel.test_shared_experts import as_on_a_device
from tests.recorded import Recording

COLLECTIVES = ("allreduce", "_allgather_base", "_reduce_scatter_base", "alltoall_base", "broadcast")
LENGTHS = (40, 200, 700, 900, 17)
Said = list[tuple[str, tuple[tuple[str, tuple[int, ...]], ...]]]
"""Of each collective its name, and dtypes and shapes of its tensors."""


class Overheard:
    """A process group whose collectives are written down."""

    def __init__(self, group: Any, said: Said) -> None:
        self._group, self._said = group, said

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._group, name)
        return self._overhear(name, method) if name in COLLECTIVES else method

    def _overhear(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            flat = [x for arg in args for x in (arg if isinstance(arg, list) else [arg]) if isinstance(x, Tensor)]
            self._said.append((name, tuple((str(x.dtype), tuple(x.shape)) for x in flat)))
            return method(*args)

        return run


def traffic(llm: LLM) -> None:
    """Run uneven prompts together, one alone, then whatever chance brings from several sides."""
    greedy = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=1)
    prompts = prompts_of(LENGTHS, SMALL["vocab_size"], seed=5)
    llm.generate_batch([{"prompt_token_ids": prompt} for prompt in prompts], greedy)
    llm.generate({"prompt_token_ids": prompts[0]}, greedy)

    def ask(chance: random.Random) -> None:
        for _ in range(3):
            (prompt,) = prompts_of((chance.randrange(1, 60),), SMALL["vocab_size"], seed=chance.randrange(100))
            params = SamplingParams(
                max_tokens=chance.randrange(1, 8),
                temperature=chance.choice([0.0, 1.0]),
                prompt_logprobs=chance.choice([None, 1]),
                return_routed_experts=chance.random() < 0.3,
                seed=1,
            )
            llm.generate({"prompt_token_ids": prompt}, params)

    threads = [threading.Thread(target=ask, args=(random.Random(seed),)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def overheard(model: Path, settings: Job, rank: int) -> tuple[Said, list[str]]:
    """Return what a rank has said, and in which order its graphs and groups came to their ends."""
    said: Said = []
    ends: list[str] = []
    making = mesh_module._make_group
    recording = Recording.__init__

    def make(*args: Any) -> Overheard:
        group = Overheard(making(*args), said)
        weakref.finalize(group, ends.append, "group")
        return group

    def record(self: Recording, *args: Any) -> None:
        recording(self, *args)
        weakref.finalize(self, ends.append, "graph")

    with pytest.MonkeyPatch.context() as patch, overlapping(True):
        as_on_a_device(patch, [])
        patch.setattr(mesh_module, "_make_group", make)
        patch.setattr(Recording, "__init__", record)
        with LLM(str(model), **settings) as llm:
            engine: Any = llm._session.engine("test")
            if rank == 0:
                traffic(llm)
        assert engine._dead is None  # the leader has left on purpose
    del llm, engine
    gc.collect()
    return said, ends


@pytest.mark.parametrize("deterministic", [False, True])
def test_ranks_say_the_same_in_the_same_order_and_free_graphs_before_groups(ranks: Ranks, model: Path, deterministic: bool) -> None:
    settings = {**MODEST, "data_parallel_size": 2, "expert_parallel_size": 2, "deterministic": deterministic}
    settings["dispatcher"] = "all_gather"  # that of CUDA devices
    job = job_of(ranks, model, overheard, settings, 2)
    (first, first_ends), (second, second_ends) = ranks.run(on_ranks, job, layout=Layout(dp=2))
    assert first == second and {name for name, _ in first} == {"_allgather_base", "_reduce_scatter_base"}
    for ends in (first_ends, second_ends):
        assert ends == ["graph"] * (len(ends) - 1) + ["group"] and len(ends) > 1
