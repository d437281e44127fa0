"""What ``examples/benchmarks/engine.py`` draws, and what it counts."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from dsv4lite.layout import Layout
from dsv4lite.models.deepseek_mla.config import parse_config as read_mla
from dsv4lite.models.deepseek_v4.config import parse_config
from dsv4lite.models.family import FAMILIES
from dsv4lite.weights.quant import Numerics
from examples.benchmarks.engine import MODELS, arguments, communication, flash, floor_bytes, plot, pro, run, ticks, v2_lite
from examples.benchmarks.rollouts import main as benchmark_rollouts
from tests import tiny
from tests.mla import V2_LITE, V3, V32

pytestmark = pytest.mark.usefixtures("forked_ranks")

RESIDENT = Numerics.choose(
    dtype=torch.bfloat16, quantized=True, deterministic=False, device=torch.device("cuda"), dense_fp8=True, expert_format="fp4"
)
SVG = "{http://www.w3.org/2000/svg}"


def floor(layers: int, batch: int, **axes: int) -> float:
    return floor_bytes(parse_config({**tiny.FLASH, **flash(layers)}), RESIDENT, Layout(**axes), [batch])[0]


def result(batches: list[int], contexts: list[int]) -> dict[str, Any]:
    floors = {batch: floor(8, batch) / 4.3e12 for batch in batches}
    rows = [
        {"batch": batch, "context": context, "step_s": 1.3 * floors[batch] * (1 + context / 65536), "floor_s": floors[batch]}
        for batch in batches
        for context in contexts
    ]
    return {"device": "An <unusual> & rare GPU", "model": "V4-Flash/8", "decode": rows}


def points(element: ElementTree.Element) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in element.attrib["points"].split())]


def test_plot_has_a_line_for_each_context_and_one_for_the_floor() -> None:
    batches = [1, 4, 16, 64]
    root = ElementTree.fromstring(plot(result(batches, [1024, 16384])))
    lines = [points(line) for line in root.iter(f"{SVG}polyline")]
    assert [len(line) for line in lines] == [4, 4, 4]
    assert len(list(root.iter(f"{SVG}circle"))) == 8
    for line in lines:
        steps = [b[0] - a[0] for a, b in pairwise(line)]
        assert steps == pytest.approx([steps[0]] * 3, abs=0.2), "batches grow by the same factor"
        assert [y for _, y in line] == sorted((y for _, y in line), reverse=True), "more sequences give more tokens, and up is less"
    short, long, floor = lines
    assert all(a[1] < b[1] for a, b in zip(short, long, strict=True)), "long contexts are slower"
    assert all(a[1] < b[1] for a, b in zip(floor, short, strict=True))
    names = [text.text for text in root.iter(f"{SVG}text")]
    assert {"context 1024", "context 16384", "bytes of weights", "1", "64", "sequences that decode together"} <= set(names)
    assert "An <unusual> & rare GPU, V4-Flash/8: decoded tokens per second" in names


def test_heights_are_logarithms_of_rates() -> None:
    data = result([1, 2, 8], [1024])
    rates = [row["batch"] / row["step_s"] for row in data["decode"]]
    line = points(next(ElementTree.fromstring(plot(data)).iter(f"{SVG}polyline")))
    scale = (line[0][1] - line[2][1]) / math.log(rates[2] / rates[0])
    assert line[0][1] - line[1][1] == pytest.approx(scale * math.log(rates[1] / rates[0]), abs=0.3)


def test_a_single_figure_can_be_drawn() -> None:
    root = ElementTree.fromstring(plot(result([8], [1024])))
    assert [len(points(line)) for line in root.iter(f"{SVG}polyline")] == [1, 1]


def test_ticks_are_round() -> None:
    assert ticks(70, 1200) == [100, 200, 500, 1000]


def test_shapes_are_those_of_the_releases() -> None:
    for name, released in (("flash", tiny.FLASH), ("pro", tiny.PRO)):
        layers = released["num_hidden_layers"]
        assert parse_config({**tiny.FLASH, **MODELS[name](layers)}) == parse_config(released)
    assert parse_config({**tiny.FLASH, **pro(4)}).ratios == (128, 128, 4, 128, 0)


def test_floor_is_what_layers_and_head_take() -> None:
    """The sizes of the parts of V4-Flash's layers, in millions of bytes, worked out by hand from its shapes."""
    for layers, batch in ((8, 1), (8, 64), (43, 8)):
        experts = 256 * (1 - (1 - 6 / 256) ** batch)
        expected = 129280 * 4096 * 2.0
        for layer in range(layers):
            extra = 5e6 if layer < 2 else 35e6 if layer % 2 == 0 else 14e6
            expected += 107e6 + 25e6 + extra + 13.4e6 * experts
        assert floor(layers, batch) == pytest.approx(expected, rel=0.01)


def test_mla_shapes_are_those_of_the_releases() -> None:
    for name, released in (("v2-lite", V2_LITE), ("v3", V3), ("v3.2", V32)):
        layers = released["num_hidden_layers"]
        ours = {**MODELS[name](layers), "first_k_dense_replace": released["first_k_dense_replace"]}
        ids = {key: released[key] for key in ("bos_token_id", "eos_token_id")}
        assert read_mla({**ours, **ids}) == read_mla({**released, "num_nextn_predict_layers": 0})


def test_floor_counts_the_layers_that_have_experts() -> None:
    family, numerics = FAMILIES["deepseek_v2"], replace(RESIDENT, resident_experts="fp8")
    one, all_experts = floor_bytes(read_mla(v2_lite(3)), numerics, Layout(), [1, 10**6], family)
    assert all_experts - one == pytest.approx(2 * (64 - 6) * 3 * 2048 * 1408)


def test_floor_of_several_gpus_is_what_one_of_them_reads() -> None:
    one, all_experts = floor(8, 1), floor(8, 10**6)
    assert floor(8, 10**6, ep=2) > all_experts / 2 > floor(8, 10**6, tp=4)
    assert floor(8, 64, dp=2, ep=2) == pytest.approx(floor(8, 64, ep=2)), "the same tokens choose experts"
    assert floor(8, 1, pp=2) == pytest.approx(one, rel=0.01), "a token goes through one stage after the other"


def test_communication_is_the_time_of_collectives() -> None:
    kernels = [{"kernel": "ncclDevKernel_AllReduce", "us": 30.0}, {"kernel": "gemm", "us": 5.0}, {"kernel": "ncclDev", "us": 2.0}]
    assert communication(kernels) == pytest.approx(32e-6)


def test_benchmark_measures_a_layout_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--model shipped --layers 1 --device cpu --ep 2 --executor thread --batch 1 2 --context 8 --tokens 6 --prefill 2x16"
    result = asyncio.run(run(arguments([*line.split(), "--max-model-len", "1024"])))
    assert [row["batch"] for row in result["decode"]] == [1, 2] and result["ranks"] == 2
    assert all(row["step_s"] > 0 and row["host_s"] > 0 and row["floor_s"] > 0 for row in result["decode"])
    assert result["prefill_2x16"] > 0 and result["start_s"] > 0 and result["host_bytes"] > 1 << 20
    assert "V4-Shipped/1, tp=1 ep=2 dp=1 pp=1: started in" in capsys.readouterr().out


def test_profile_of_what_cannot_be_watched_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for line, reason in (("--device cpu", "watches a GPU"), ("--prefill 64", "invalid prompts_of value")):
        with pytest.raises(SystemExit):
            arguments([*line.split(), "--profile"])
        assert reason in capsys.readouterr().err


def test_rollouts_are_measured_phase_by_phase(capsys: pytest.CaptureFixture[str]) -> None:
    report = benchmark_rollouts(
        ["--model", "shipped", "--layers", "3", "--device", "cpu", "--batch", "2", "--max-model-len", "512"]
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
