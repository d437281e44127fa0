"""The script that compares outputs with and without speculation, on a few prompts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4lite.request import Logprobs
from tests.e2e.speculate import DRAFTERS, answers, differing, random_case, run

SETTINGS = {"device": "cpu", "max_model_len": 1024, "kv_cache_memory_bytes": 16 << 20}


def test_outputs_are_the_same_with_drafts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case, name = random_case(tmp_path, 16), "NGram(3), MTP(2)"
    assert asyncio.run(run([case], {name: DRAFTERS[name]}, 8, SETTINGS)) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if name in line]
    assert len(lines) == 2 and all(line.split()[-5:-2] == ["0", "0", "0"] for line in lines)


def test_every_difference_counts(tmp_path: Path) -> None:
    """A run without drafts fails too, since it shows nothing."""
    case = random_case(tmp_path, 3)
    (first, *others), _, _ = asyncio.run(answers(case, 6, SETTINGS))
    completion = first.outputs[0]
    assert completion.logprobs is not None
    sampled = completion.logprobs.sampled.clone()
    sampled[2] += 1e-6
    logprobs = Logprobs(**{f: getattr(completion.logprobs, f) for f in ("ranks", "token_ids", "values", "mode")}, sampled=sampled)
    rounded = replace(first, outputs=(replace(completion, logprobs=logprobs),))
    other = replace(first, outputs=(replace(completion, token_ids=(9, *completion.token_ids[1:])),))
    for changed, bits, count in ((rounded, True, 1), (rounded, False, 0), (other, False, 1), (first, True, 0)):
        assert differing([changed, *others], [first, *others], bits=bits) == count
    assert asyncio.run(run([case], {"none": None}, 4, SETTINGS)) == 2
