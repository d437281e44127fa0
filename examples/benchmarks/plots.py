"""Draws the figures of the benchmarks. Needs matplotlib: ``pip install 'dsv4lite[plots]'``."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rcParams
from matplotlib.figure import Figure

rcParams["svg.fonttype"] = "none"  # text stays text


def rates(result: Mapping[str, Any]) -> Figure:
    """Draw decoded tokens per second against batch: a line for each context, and the roofline's, dashed.

    Args:
        result: The result of ``engine.run``.
    """
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    rows = result["decode"]
    for context in sorted({row["context"] for row in rows}):
        points = [(row["batch"], row["batch"] / row["step_s"]) for row in rows if row["context"] == context]
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=f"context {context}")
    roofline = sorted({(row["batch"], row["batch"] / row["roofline_s"]) for row in rows})
    axes.plot(*zip(*roofline, strict=True), color="grey", linestyle="--", label="bytes of weights")
    axes.set(xscale="log", yscale="log", xlabel="sequences that decode together", ylabel="tokens per second")
    batches = [batch for batch, _ in roofline]
    axes.set_xticks(batches, labels=[str(batch) for batch in batches])
    axes.minorticks_off()
    axes.set_title(f"{result['device']}, {result['model']}: decoded tokens per second")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def shares(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the share of the roofline that each engine reaches: a group of bars for each row of the table that has a roofline.

    Args:
        rows: Rows of ``table.run``, possibly of several models and layouts.
    """
    rows = [row for row in rows if row["roofline_s"]]
    groups = dict.fromkeys((row["device"], row["model"], row["layout"]) for row in rows)
    names = [f"{row['model']}, {row['layout']}: {row['row']}" if len(groups) > 1 else str(row["row"]) for row in rows]
    places = {name: place for place, name in enumerate(dict.fromkeys(names))}
    engines = sorted({row["engine"] for row in rows})
    figure = Figure(figsize=(9, 1.5 + 0.45 * len(places)), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / max(1, len(engines))
    for number, engine in enumerate(engines):
        given = {
            places[name]: row["roofline_s"] / row["seconds"]
            for name, row in zip(names, rows, strict=True)
            if row["engine"] == engine
        }
        bars = axes.barh([place + number * height for place in given], list(given.values()), height, label=engine)
        axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=8)
    axes.set_yticks([place + (len(engines) - 1) * height / 2 for place in places.values()], labels=list(places))
    axes.invert_yaxis()
    axes.axvline(1, color="grey", linestyle="--")
    axes.set(xlabel="share of the roofline", title="; ".join(", ".join(group) for group in groups) if len(groups) == 1 else None)
    axes.legend(loc="lower right")
    return figure


def main() -> None:
    """Draw the rows of a file of ``table.py``: ``python -m examples.benchmarks.plots table.json table.svg``."""
    rows = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    shares(rows).savefig(sys.argv[2])


if __name__ == "__main__":
    main()
