"""Model families by the ``model_type`` of their config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsv4lite.errors import UnsupportedError, near_match, shown
from dsv4lite.models.deepseek_v4.config import V4Config, parse_config

ARCHITECTURES = {"deepseek_v4": parse_config}


def read_architecture(raw: Mapping[str, Any]) -> V4Config:
    """Read a model's ``config.json``.

    Raises:
        UnsupportedError: The family is not one of ``ARCHITECTURES``.
        ConfigError: The config is wrong.
    """
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in ARCHITECTURES:
        known, given = ", ".join(ARCHITECTURES), shown(family)
        raise UnsupportedError(f"model_type={given} is not supported (known: {known}){near_match(given, ARCHITECTURES)}")
    return ARCHITECTURES[family](raw)
