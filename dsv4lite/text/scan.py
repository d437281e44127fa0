"""Search in text that arrives in pieces.

Both stop strings and chat markup need it: find the first of several strings although a piece may end inside one, and pass on text
as soon as it cannot be part of one.
"""

from __future__ import annotations

from collections.abc import Sequence


class Scanner:
    """A buffer of streamed text, read up to the first of some marker strings.

    The marker that ends first wins; among markers that end at the same character, the longest. So the result depends on the text
    alone, not on how it was cut into pieces.
    """

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> None:
        """Append a piece of the stream."""
        self._held += text

    def read_until(self, markers: Sequence[str]) -> tuple[str, str | None]:
        """Remove and return the text before the first marker, and that marker.

        Without a complete marker in the buffer, return all text that cannot belong to one, and ``None``; the longest suffix that
        may be the beginning of a marker stays in the buffer.
        """
        start, found = _first(self._held, markers)
        if found is not None:
            text = self._held[:start]
            self._held = self._held[start + len(found) :]
            return text, found
        cut = len(self._held) - _begun(self._held, markers)
        text = self._held[:cut]
        self._held = self._held[cut:]
        return text, None

    def rest(self) -> str:
        """Remove and return everything, for the end of the stream."""
        text, self._held = self._held, ""
        return text


def _first(text: str, markers: Sequence[str]) -> tuple[int, str | None]:
    """Return start and marker of the occurrence with the smallest (end, start), or (-1, None)."""
    best_start, best_end, best = -1, len(text), None
    for marker in markers:
        start = text.find(marker, 0, best_end)
        if start < 0:
            continue
        end = start + len(marker)
        if best is None or (end, start) < (best_end, best_start):
            best_start, best_end, best = start, end, marker
    return best_start, best


def _begun(text: str, markers: Sequence[str]) -> int:
    """Return the length of the longest suffix of ``text`` that is the beginning, but not the whole, of a marker."""
    longest = 0
    for marker in markers:
        start = text.find(marker[0], max(0, len(text) - len(marker) + 1))
        while start >= 0 and len(text) - start > longest:
            if marker.startswith(text[start:]):
                longest = len(text) - start
                break
            start = text.find(marker[0], start + 1)
    return longest
