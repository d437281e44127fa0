"""``deterministic=True`` on CPUs that this machine is not: the same checks in processes whose libraries take other instructions."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from dsv4lite.device import own_thread

ROOT = Path(__file__).parents[2]
OLDER = {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
PATHS: Mapping[str, Mapping[str, str]] = {
    "AVX2": OLDER,
    "AVX2, reproducible": {"MKL_CBWR": "AVX2"},
    "no vectors": {"ATEN_CPU_CAPABILITY": "default"},
}


@pytest.mark.parametrize("path", PATHS)
def test_rows_and_requests_are_the_same_in_company_and_on_any_number_of_threads(path: str) -> None:
    environment = {**os.environ, **PATHS[path], "OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT)}
    threads = ("2", "1") if path == "AVX2" else ("2",)
    program = [sys.executable, "-m", "tests.e2e.cpu_paths", *threads]
    ran = subprocess.run(program, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr


def test_own_thread_runs_operations_on_one_thread_and_leaves_others_alone() -> None:
    counts: dict[str, int] = {}

    def count(name: str) -> None:
        counts[name] = torch.get_num_threads()

    def beside(name: str) -> None:
        thread = threading.Thread(target=count, args=(name,))
        thread.start()
        thread.join()

    def run() -> None:
        count("before")
        with own_thread(torch.device("cpu"), deterministic=True):
            count("inside")
            beside("beside")
        count("after")
        with own_thread(torch.device("cpu"), deterministic=False):
            count("default mode")

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        beside("later")
        count("here")
    finally:
        torch.set_num_threads(threads)
    assert counts.pop("inside") == 1
    assert counts == dict.fromkeys(("before", "beside", "after", "default mode", "later", "here"), 2)
