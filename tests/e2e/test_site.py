"""The site of the pages: every page is in its menu, it needs no network, and its reference has every field."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass
from html.parser import HTMLParser
from pathlib import Path

import pytest

import dsv4lite
from dsv4lite import AsyncLLM

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ROOT / "docs/site/mkdocs.yml"


def test_every_page_is_in_the_menu_once() -> None:
    menu = re.findall(r"^ +- ([\w/-]+\.md)$", SETTINGS.read_text(encoding="utf-8"), re.MULTILINE)
    pages = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(menu) == sorted([*pages, "reference.md"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built in strict mode: a link without a target ends the build."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "-f", str(SETTINGS), "-d", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr
    return folder


class Addresses(HTMLParser):
    """What a browser fetches to show a page: scripts, styles, pictures, fonts; not what a reader may follow."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag != "a" and not (tag == "link" and given.get("rel") in ("canonical", "prev", "next")):
            self.found += [value for name in ("src", "href") if (value := given.get(name))]


def test_pages_fetch_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        parser = Addresses()
        parser.feed(page.read_text(encoding="utf-8"))
        for address in parser.found:
            assert "://" not in address and not address.startswith("//"), f"{page.name}: {address}"
            path = address.partition("?")[0].partition("#")[0]
            assert page.name == "404.html" or not path or (page.parent / path).exists(), f"{page.name}: {address}"
    assert not [path for path in site.rglob("*.css") if re.search(r"url\(['\"]?(https?:)?//", path.read_text(encoding="utf-8"))]


def test_reference_has_every_field_and_every_call(site: Path) -> None:
    text = (site / "reference.html").read_text(encoding="utf-8")
    anchors = set(re.findall(r'id="(dsv4lite\.[\w.]+)"', text))
    missing = []
    for name in dsv4lite.__all__:
        kind = getattr(dsv4lite, name)
        if isinstance(kind, type):
            where = f"{kind.__module__}.{name}"
            members = [field.name for field in fields(kind)] if is_dataclass(kind) else []
            members += [call for call in dir(AsyncLLM) if not call.startswith("_")] if kind is AsyncLLM else []
            missing += [place for place in (where, *(f"{where}.{member}" for member in members)) if place not in anchors]
    assert missing == []
