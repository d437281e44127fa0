"""What ``examples/benchmarks/engine.py`` draws, and what it counts."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from dsv4lite import LLM
from dsv4lite.layout import Layout
from dsv4lite.models.deepseek_mla.config import parse_config as read_mla
from dsv4lite.models.deepseek_v4.config import parse_config
from dsv4lite.models.family import FAMILIES
from dsv4lite.weights.quant import Numerics
from examples.benchmarks.engine import MODELS, arguments, configured, flash, pro, roofline_bytes, run, v2_lite
from examples.benchmarks.rollouts import main as benchmark_rollouts
from examples.benchmarks.rollouts import process as updates_from_a_process
from tests import tiny
from tests.mla import V2_LITE, V3, V32

pytestmark = pytest.mark.usefixtures("forked_ranks")

RESIDENT = Numerics.choose(
    dtype=torch.bfloat16, quantized=True, deterministic=False, device=torch.device("cuda"), dense_fp8=True, expert_format="fp4"
)


def roofline(layers: int, batch: int, **axes: int) -> float:
    return roofline_bytes(parse_config({**tiny.FLASH, **flash(layers)}), RESIDENT, Layout(**axes), [batch])[0]


def result(batches: list[int], contexts: list[int]) -> dict[str, Any]:
    least = {batch: roofline(8, batch) / 4.3e12 for batch in batches}
    rows = [
        {"batch": batch, "context": context, "step_s": 1.3 * least[batch] * (1 + context / 65536), "roofline_s": least[batch]}
        for batch in batches
        for context in contexts
    ]
    return {"device": "An <unusual> & rare GPU", "model": "V4-Flash/8", "decode": rows}


def lines_of(figure: Any) -> list[list[tuple[float, float]]]:
    """The points of each line, where they are drawn: right and up are more."""
    axes = figure.axes[0]
    return [[tuple(point) for point in axes.transData.transform(line.get_xydata())] for line in axes.get_lines()]


def test_plot_has_a_line_for_each_context_and_one_for_the_roofline() -> None:
    pytest.importorskip("matplotlib")
    from examples.benchmarks.plots import rates

    batches = [1, 4, 16, 64]
    figure = rates(result(batches, [1024, 16384]))
    lines, axes = lines_of(figure), figure.axes[0]
    assert [len(line) for line in lines] == [4, 4, 4]
    assert [line.get_marker() for line in axes.get_lines()] == ["o", "o", "None"]
    for line in lines:
        steps = [b[0] - a[0] for a, b in pairwise(line)]
        assert steps == pytest.approx([steps[0]] * 3, abs=0.2), "batches grow by the same factor"
        assert [y for _, y in line] == sorted(y for _, y in line), "more sequences give more tokens"
    short, long, roofline = lines
    assert all(a[1] > b[1] for a, b in zip(short, long, strict=True)), "long contexts are slower"
    assert all(a[1] > b[1] for a, b in zip(roofline, short, strict=True))
    names = {text.get_text() for text in (*axes.get_legend().get_texts(), *axes.get_xticklabels())}
    assert {"context 1024", "context 16384", "bytes of weights", "1", "64"} <= names
    assert axes.get_xlabel() == "sequences that decode together"
    assert axes.get_title() == "An <unusual> & rare GPU, V4-Flash/8: decoded tokens per second"


def test_heights_are_logarithms_of_rates() -> None:
    pytest.importorskip("matplotlib")
    from examples.benchmarks.plots import rates

    data = result([1, 2, 8], [1024])
    expected = [row["batch"] / row["step_s"] for row in data["decode"]]
    line = lines_of(rates(data))[0]
    scale = (line[2][1] - line[0][1]) / math.log(expected[2] / expected[0])
    assert line[1][1] - line[0][1] == pytest.approx(scale * math.log(expected[1] / expected[0]), abs=0.3)


def test_a_single_figure_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from examples.benchmarks.plots import rates

    figure = rates(result([8], [1024]))
    assert [len(line) for line in lines_of(figure)] == [1, 1]
    figure.savefig(tmp_path / "rates.svg")
    title = "An &lt;unusual&gt; &amp; rare GPU, V4-Flash/8: decoded tokens per second"
    assert title in (tmp_path / "rates.svg").read_text(encoding="utf-8")


def test_shapes_are_those_of_the_releases() -> None:
    for name, released in (("flash", tiny.FLASH), ("pro", tiny.PRO)):
        layers = released["num_hidden_layers"]
        assert parse_config({**tiny.FLASH, **MODELS[name](layers)}) == parse_config(released)
    assert parse_config({**tiny.FLASH, **pro(4)}).ratios == (128, 128, 4, 128, 0)


def test_roofline_is_what_layers_and_head_take() -> None:
    """The sizes of the parts of V4-Flash's layers, in millions of bytes, worked out by hand from its shapes."""
    for layers, batch in ((8, 1), (8, 64), (43, 8)):
        experts = 256 * (1 - (1 - 6 / 256) ** batch)
        expected = 129280 * 4096 * 2.0
        for layer in range(layers):
            extra = 5e6 if layer < 2 else 35e6 if layer % 2 == 0 else 14e6
            expected += 107e6 + 25e6 + extra + 13.4e6 * experts
        assert roofline(layers, batch) == pytest.approx(expected, rel=0.01)


def test_mla_shapes_are_those_of_the_releases() -> None:
    for name, released in (("v2-lite", V2_LITE), ("v3", V3), ("v3.2", V32)):
        layers = released["num_hidden_layers"]
        ours = {**MODELS[name](layers), "first_k_dense_replace": released["first_k_dense_replace"]}
        ids = {key: released[key] for key in ("bos_token_id", "eos_token_id")}
        assert read_mla({**ours, **ids}) == read_mla(released)


def test_roofline_counts_the_layers_that_have_experts() -> None:
    family, numerics = FAMILIES["deepseek_v2"], replace(RESIDENT, resident_experts="fp8")
    one, all_experts = roofline_bytes(read_mla(v2_lite(3)), numerics, Layout(), [1, 10**6], family)
    assert all_experts - one == pytest.approx(2 * (64 - 6) * 3 * 2048 * 1408)


def test_roofline_of_several_gpus_is_what_one_of_them_reads() -> None:
    one, all_experts = roofline(8, 1), roofline(8, 10**6)
    assert roofline(8, 10**6, ep=2) > all_experts / 2 > roofline(8, 10**6, tp=4)
    assert roofline(8, 64, dp=2, ep=2) == pytest.approx(roofline(8, 64, ep=2)), "the same tokens choose experts"
    assert roofline(8, 1, pp=2) == pytest.approx(one, rel=0.01), "a token goes through one stage after the other"


def test_benchmark_measures_a_layout_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--model shipped --layers 1 --device cpu --ep 2 --executor thread --batch 1 2 --context 8 --tokens 6 --prefill 2x16"
    result = asyncio.run(run(arguments([*line.split(), "--max-model-len", "1024"])))
    assert [row["batch"] for row in result["decode"]] == [1, 2] and result["ranks"] == 2
    assert all(row["step_s"] > 0 and row["host_s"] > 0 and row["roofline_s"] > 0 for row in result["decode"])
    assert result["prefill_2x16"] > 0 and result["start_s"] > 0 and result["host_bytes"] > 1 << 20
    assert "V4-Shipped/1, tp=1 ep=2 dp=1 pp=1: started in" in capsys.readouterr().out


def test_prompts_without_a_length_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(["--prefill", "64"])
    assert "invalid prompts_of value" in capsys.readouterr().err


def test_rollouts_are_measured_phase_by_phase(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("examples.benchmarks.rollouts.TURNS", 3)
    report = benchmark_rollouts(
        ["--model", "shipped", "--layers", "1", "--device", "cpu", "--batch", "2", "--max-model-len", "512"]
    )
    names = [name for name, _ in report]
    assert names[:4] == ["update, staged", "first request after it", "update, in place", "first request after it"]
    assert names[4:8] == ["sleep(1)", "wake_up()", "first request after it", "second request"] == names[8:12]
    assert names[12:15] == ["sleep(2)", "wake_up()", "update after it"]
    assert names[-3:] == ["prefill, 2 x 128", "scores, raw, 2 x 128", "scores, processed, 2 x 128"]
    assert {"update in flight", "update from a process, staged", "update from a process, in place"} <= {*names}
    assert all(seconds > 0 for _, seconds in report)
    out = capsys.readouterr().out
    assert "update after it" in out and "2 requests of 60 tokens, none lost; 2 have tokens of both versions" in out


def test_process_that_cannot_share_weights_ends_the_measurement() -> None:
    config = replace(configured(arguments(["--model", "shipped", "--device", "cpu"])), model="/no/such/checkpoint")
    with pytest.raises(EOFError):
        updates_from_a_process(config, cast(LLM, None), [])
