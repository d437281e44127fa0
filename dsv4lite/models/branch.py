"""A second stream beside the current one, for work that nobody waits for until it is needed."""

from __future__ import annotations

from types import TracebackType

import torch


class Branch:
    """Runs its block beside what follows, until ``join``; without a stream, in order.

        with branch:
            shared = expert(x)          beside
        routed = experts(x)
        branch.join()                   from here on ``shared`` may be used

    For recorded steps only. A tensor that both streams use must stay referenced until ``join``: its memory is otherwise free
    for the stream that made it; each block starts after everything launched before it, so memory freed later is safe.
    """

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self._stream = stream
        self._inside: torch.cuda.StreamContext | None = None

    def __enter__(self) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            self._inside = torch.cuda.stream(self._stream)
            self._inside.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._inside is not None:
            self._inside.__exit__(kind, error, trace)
            self._inside = None

    def join(self) -> None:
        """Let the current stream wait for the block."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
