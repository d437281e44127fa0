"""The script that compares outputs with and without speculation, on a few prompts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsv4lite.request import Logprobs
from tests.e2e import speculate
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


@pytest.mark.parametrize(("own", "wrong"), [(1, 0), (2, 1)])
def test_runs_without_speculation_say_how_much_may_differ(own: int, wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run without speculation but the first has an output of its own: two of them differ in one or two prompts."""
    case = speculate.Case(name="none", model="", prompts=[[1]] * 10, exact=False)

    async def fake(case: speculate.Case, tokens: int, settings: dict[str, Any]) -> tuple[Any, str, float]:
        run = speculate.BATCHES.index(settings["max_num_seqs"])
        foreign = range(5, 5 + own) if settings.get("speculative") else range(run, run + (run > 0))
        return [-run if i in foreign else 100 for i in range(10)], "1/2", 0.0

    monkeypatch.setattr(speculate, "answers", fake)
    monkeypatch.setattr(speculate, "differing", lambda a, b, bits: sum(x != y for x, y in zip(a, b, strict=True)))
    assert asyncio.run(run([case], {"some": "auto"}, 1, {}, ["default"])) == wrong
