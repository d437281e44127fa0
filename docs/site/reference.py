"""A hook of MkDocs: the page ``reference.md``, every public name with its fields and calls, made from docstrings."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import dsv4lite

GROUPS = {
    "llm": "Engines",
    "config": "Settings",
    "request": "Requests and outputs",
    "api": "What calls return",
    "errors": "Errors",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page."""
    files.append(File.generated(config, "reference.md", content=page()))
    return files


def page() -> str:
    """Return the page: a heading for each group, and a directive of mkdocstrings for each name."""
    found: dict[str, list[str]] = {}
    for name in dsv4lite.__all__:
        value: Any = getattr(dsv4lite, name)
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        part = value.__module__.removeprefix("dsv4lite.")
        found.setdefault(GROUPS.get(part.split(".")[0], "Weights, models and planning"), []).append(f"{part}.{name}")
    order = [*GROUPS.values(), "Weights, models and planning"]
    lines = [
        "# Reference",
        "",
        "Every public name, from its docstring. Most are described with examples on [the API page](api.md).",
    ]
    for group in sorted(found, key=order.index):
        lines += ["", f"## {group}", *(f"\n::: dsv4lite.{name}\n    options:\n      heading_level: 3" for name in found[group])]
    return "\n".join(lines) + "\n"


def on_post_build(config: MkDocsConfig) -> None:
    """Leave nothing in the site that a browser would fetch from elsewhere."""
    for path in Path(config.site_dir).rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace('<script src="https://unpkg.com/iframe-worker/shim"></script>', ""), encoding="utf-8")
