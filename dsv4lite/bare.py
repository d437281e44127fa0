"""Imports for an environment without numpy."""

from __future__ import annotations

import sys
import warnings
from importlib.util import find_spec


def import_torch() -> None:
    """Import torch, without its warning where numpy is missing: nothing here needs numpy.

    The process's warning filters are the same afterwards. A program that has imported torch before has seen the warning.
    """
    if "torch" in sys.modules:
        return
    if find_spec("numpy") is not None:
        import torch
    else:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
            import torch  # noqa: F401
