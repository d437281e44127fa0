"""The benchmarks of several ranks, on a CPU: what they do is measured, and what they print is what happened."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from examples.benchmarks import balancing, placement

pytestmark = pytest.mark.usefixtures("forked_ranks")


def test_biases_make_choices_follow_the_law() -> None:
    bias = balancing.biases(16, 3, 1.0, torch.Generator().manual_seed(1))
    scores = torch.nn.functional.softplus(torch.randn(20_000, 16, generator=torch.Generator().manual_seed(2))).sqrt()
    counts = torch.bincount((scores + bias).topk(3).indices.flatten(), minlength=16) / 60_000
    harmonic = sum(1 / place for place in range(1, 17))
    expected = torch.tensor([1 / place / harmonic for place in range(1, 17)])
    torch.testing.assert_close(counts.sort(descending=True).values, expected, rtol=0.25, atol=0.0)
    assert counts.argsort(descending=True).tolist() != list(range(16)), "popular experts lie anywhere"


def test_moved_experts_even_out_the_load_and_change_no_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = "--model shipped --layers 1 --device cpu --dp 2 --ep 2 --batch 2 --prompts 2x32 --tokens 4 --redundant-experts 2"
    result = asyncio.run(balancing.run(balancing.arguments([*line.split(), "--rebalance-steps", "40"]), tmp_path))
    uneven, even = result["busiest"]
    assert uneven > 1.1 > even >= 1.0 and result["planned"] < uneven
    assert (result["equal"], result["outputs"]) == (4, 4) and result["matrices"] > 0
    assert "same bits: 4 of 4 outputs" in capsys.readouterr().out


def test_moves_amid_what_is_measured_are_refused(tmp_path: Path) -> None:
    line = "--model shipped --layers 1 --device cpu --ep 2 --batch 1 --prompts 1x16 --tokens 4 --redundant-experts 2"
    with pytest.raises(SystemExit, match="raise --rebalance-steps"):
        asyncio.run(balancing.run(balancing.arguments([*line.split(), "--rebalance-steps", "5"]), tmp_path))


def test_more_of_the_prompts_comes_from_the_cache_if_they_follow_it(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--layers 1 --device cpu --executor thread --rounds 1 --documents 4 --document-tokens 256 --questions 4 --in-flight 2"
    in_turn, by_prefix = placement.measure(placement.arguments(line.split()))
    assert (in_turn["placement"], by_prefix["placement"]) == ("round_robin", "prefix")
    assert by_prefix["hit_rate"] > in_turn["hit_rate"] > 0
    assert all(row["prompts_s"] > 0 and row["first_token_s"] > 0 for row in (in_turn, by_prefix))
    assert "prompts/s, prefix over round_robin" in capsys.readouterr().out
