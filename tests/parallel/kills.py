"""Kill random ranks of random layouts at random moments: python -m tests.parallel.kills --count 50

Every open request must fail within ten seconds and name the rank, nothing may be left behind, and the next engine must start.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from dsv4lite.errors import EngineDeadError
from dsv4lite.llm import LLM
from dsv4lite.request import SamplingParams
from tests.e2e.engines import MODEST, write_model
from tests.parallel.holdings import held
from tests.parallel.requests import PROMPTS, SHARED
from tests.parallel.test_engine_ranks import is_alive, processes

ENOUGH_S = 10.0
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"executor": "process"},
    {"tensor_parallel_size": 2},
    {"tensor_parallel_size": 2, "executor": "thread"},
    {"expert_parallel_size": 2, "executor": "thread"},
    {"data_parallel_size": 2, "expert_parallel_size": 2},
    {"data_parallel_size": 2, "executor": "thread"},
    {"pipeline_parallel_size": 2},
    {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "executor": "thread"},
)


def kill_one(model: Path, settings: dict[str, Any], chance: random.Random) -> str:
    """Open an engine, kill one of its ranks a little later, and look at what becomes of everybody; return what happened."""
    before = held()
    errors: list[BaseException] = []
    stop = threading.Event()

    def ask(llm: LLM, prompt: list[int]) -> None:
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        while not stop.is_set():
            try:
                llm.generate({"prompt_token_ids": prompt}, params)
            except BaseException as error:
                errors.append(error)
                return

    with LLM(str(model), **MODEST, **settings) as llm:
        pids = processes(llm)
        threads = [threading.Thread(target=ask, args=(llm, prompt)) for prompt in PROMPTS]
        for thread in threads[: chance.randrange(len(threads) + 1)]:
            thread.start()
        time.sleep(chance.random() * 2)
        rank = chance.choice(sorted(pids))
        os.kill(pids[rank], signal.SIGKILL)
        killed = time.monotonic()
        for thread in threads:
            if thread.ident is not None:
                thread.join(ENOUGH_S)
                assert not thread.is_alive(), "a request did not end"
        ask(llm, PROMPTS[0])
        took = time.monotonic() - killed
        assert took < ENOUGH_S, f"it took {took:.1f} s"
        for error in errors:
            assert isinstance(error, EngineDeadError) and error.rank == rank and "SIGKILL" in str(error), repr(error)
    assert not any(map(is_alive, pids.values())), "a process is left"
    assert held() <= before, f"{held() - before} is left"
    return f"rank {rank} of {settings}: {len(errors)} requests failed within {took:.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chance = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), SHARED)
        for number in range(arguments.count):
            print(number, kill_one(model, LAYOUTS[number % len(LAYOUTS)], chance), flush=True)


if __name__ == "__main__":
    main()
