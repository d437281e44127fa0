"""Optional progress bars by tqdm, in terminals and notebooks."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from dsv4lite.config import LoadProgress
from dsv4lite.errors import UnsupportedError


def new_bar(what: str, total: int | None, unit: str) -> Any:
    """Return a bar of tqdm.

    Args:
        what: The text before the bar.
        total: Units in all, if that is known.
        unit: ``bytes`` are shown as kB, MB and so on.

    Raises:
        UnsupportedError: tqdm is not installed.
    """
    try:
        tqdm = import_module("tqdm.auto").tqdm
    except ImportError as error:
        raise UnsupportedError("a progress bar needs the package tqdm: pip install 'dsv4lite[progress]'") from error
    return tqdm(desc=what, total=total, unit="B" if unit == "bytes" else f" {unit}", unit_scale=unit == "bytes", dynamic_ncols=True)


class LoadBars:
    """Shows ``LoadProgress`` as a bar for each phase; mutable."""

    def __init__(self) -> None:
        self._phase = ""
        self._bar: Any = None

    def __call__(self, report: LoadProgress) -> None:
        if report.phase != self._phase or self._bar is None:
            self._close()
            self._phase, self._bar = report.phase, new_bar(report.phase, report.total, report.unit)
        self._bar.update(report.done - self._bar.n)
        if report.done >= report.total:
            self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = None
