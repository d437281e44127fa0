"""What is shipped: one pure wheel with everything that the package needs, and dependencies that others can live with."""

from __future__ import annotations

import re
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    (built,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    return Path(built)


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_wheel_is_pure(wheel: Path, names: set[str]) -> None:
    assert wheel.name == f"dsv4lite-{PROJECT['version']}-py3-none-any.whl"
    assert not [name for name in names if name.endswith((".so", ".cu", ".c", ".pyc"))]


def test_wheel_holds_the_package_and_nothing_else(names: set[str]) -> None:
    assert {name.split("/")[0] for name in names} == {"dsv4lite", f"dsv4lite-{PROJECT['version']}.dist-info"}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "dsv4lite").rglob("*.py")}
    assert modules <= names


def test_wheel_holds_types_and_the_small_checkpoint(names: set[str]) -> None:
    assert "dsv4lite/py.typed" in names
    assets = {f"dsv4lite/assets/tiny/{path.name}" for path in (ROOT / "dsv4lite" / "assets" / "tiny").iterdir()}
    assert assets <= names
    wanted = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {f"dsv4lite/assets/tiny/{name}" for name in wanted} <= assets


def test_wheel_is_small(wheel: Path) -> None:
    assert wheel.stat().st_size < 64 << 20


def test_metadata_names_licence_and_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        info = f"dsv4lite-{PROJECT['version']}.dist-info"
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
        commands = archive.read(f"{info}/entry_points.txt").decode()
        assert f"{info}/licenses/LICENSE" in archive.namelist()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert "dsv4lite = dsv4lite.__main__:main" in commands


def test_dependencies_are_six_with_lower_bounds_only() -> None:
    always = PROJECT["dependencies"]
    assert len(always) == 6
    extras = PROJECT["optional-dependencies"]
    for requirement in [*always, *(one for extra in extras.values() for one in extra)]:
        own = re.fullmatch(r"dsv4lite\[([a-z,-]+)\]", requirement)  # extras that bring others
        assert own is None or set(own[1].split(",")) <= set(extras)
        assert own or re.fullmatch(r"[a-z0-9-]+(\[[a-z,]+\])?>=[0-9.]+(; .+)?", requirement), requirement
