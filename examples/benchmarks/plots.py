"""Draws what the benchmarks measure. Needs matplotlib: ``pip install 'dsv4lite[plots]'``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.figure import Figure

COLOURS = {"dsv4lite": "#1f6fb2", "vllm": "#c8501e"}


def rates(result: Mapping[str, Any]) -> Figure:
    """Draw decoded tokens per second against batch: a line for each context, and the roofline's, dashed.

    Args:
        result: Of ``engine.run``.
    """
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    rows = result["decode"]
    for context in sorted({row["context"] for row in rows}):
        points = [(row["batch"], row["batch"] / row["step_s"]) for row in rows if row["context"] == context]
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=f"context {context}")
    floor = sorted({(row["batch"], row["batch"] / row["floor_s"]) for row in rows})
    axes.plot(*zip(*floor, strict=True), color="grey", linestyle="--", label="bytes of weights")
    axes.set(xscale="log", yscale="log", xlabel="sequences that decode together", ylabel="tokens per second")
    batches = [batch for batch, _ in floor]
    axes.set_xticks(batches, labels=[str(batch) for batch in batches])
    axes.minorticks_off()
    axes.set_title(f"{result['device']}, {result['model']}: decoded tokens per second")
    axes.grid(alpha=0.3)
    axes.legend()
    pyplot.close(figure)
    return figure


def shares(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the share of the roofline that each engine reaches: a group of bars for each row of the table that has a roofline.

    Args:
        rows: Of ``table.run``, of one device, model and layout.
    """
    rows = [row for row in rows if row["roofline_s"]]
    names = list(dict.fromkeys(row["row"] for row in rows))
    engines = sorted({row["engine"] for row in rows})
    figure, axes = pyplot.subplots(figsize=(8, 1.5 + 0.5 * len(names)), layout="constrained")
    height = 0.8 / max(1, len(engines))
    for number, engine in enumerate(engines):
        given = {row["row"]: row["roofline_s"] / row["seconds"] for row in rows if row["engine"] == engine}
        places = [names.index(name) + number * height for name in given]
        axes.barh(places, list(given.values()), height, color=COLOURS.get(engine), label=engine)
    axes.set_yticks([place + (len(engines) - 1) * height / 2 for place in range(len(names))], labels=names)
    axes.invert_yaxis()
    axes.axvline(1, color="grey", linestyle="--")
    axes.set(xlabel="share of the roofline")
    if rows:
        axes.set_title(", ".join(rows[0][key] for key in ("device", "model", "layout")))
    axes.legend()
    pyplot.close(figure)
    return figure
