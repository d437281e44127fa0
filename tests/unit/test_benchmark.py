"""What ``examples/benchmark.py`` draws."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest

from examples.benchmark import floor_bytes, plot, ticks

SVG = "{http://www.w3.org/2000/svg}"


def result(batches: list[int], contexts: list[int]) -> dict[str, Any]:
    floors = {batch: floor_bytes(8, batch) / 4.3e12 for batch in batches}
    rows = [
        {"batch": batch, "context": context, "step_s": 1.3 * floors[batch] * (1 + context / 65536), "floor_s": floors[batch]}
        for batch in batches
        for context in contexts
    ]
    return {"device": "An <unusual> & rare GPU", "layers": 8, "decode": rows}


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
