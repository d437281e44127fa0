"""Sizes of the pages of sequence state, in tokens."""

from __future__ import annotations

PAGE_TOKENS = 256
"""Tokens of one grow page; prefixes are cached at multiples of it. A page holds whole rows: ``tokens_per_row`` divides it."""
WINDOW_PAGE_TOKENS = 64
"""Tokens of one sliding-window page; divides ``PAGE_TOKENS``, so that a cached prefix ends at the end of a window page."""


def window_pages(window: int, tokens: int = 1) -> int:
    """Return the most window pages that ``tokens`` consecutive tokens of a sequence read and write.

    Args:
        window: Tokens that sliding-window attention sees, the token itself included; 0 if no layer has a window.
        tokens: Of the step.
    """
    return (window + tokens - 3) // WINDOW_PAGE_TOKENS + 2 if window else 0
