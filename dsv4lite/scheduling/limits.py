"""What a scheduler is given to go by, and what it tells of itself."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4lite.paging import WINDOW_PAGE_TOKENS
from dsv4lite.scheduling.pages import PoolStats


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """The scheduler's settings; see ``EngineConfig`` for those of the same name.

    Attributes:
        window: Tokens that sliding-window attention sees, the token itself included; 0 if no layer has a window.
        max_drafts: Most guesses in one run.
        drafter_rows: Whether a drafter of the model's own keeps rows of the tokens of steps with guesses.
        stages: Of the pipeline that runs the steps: so many are worked on at a time.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    window: int
    prefix_checkpoint_tokens: int = 2048
    enable_prefix_caching: bool = True
    max_drafts: int = 0
    drafter_rows: bool = False
    stages: int = 1

    @property
    def window_pages(self) -> int:
        """Most window pages that one run of tokens reads and writes."""
        return 2 * (1 + -(-self.window // WINDOW_PAGE_TOKENS)) if self.window else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """A snapshot of counts.

    Attributes:
        num_running: Sequences that hold state.
        num_waiting: Sequences that hold none yet, or none any more.
        preemptions: How often a running sequence had to give up its state, so far.
        prompt_tokens: Tokens of sequences that started, so far; a sequence starts again after it was preempted.
        cached_tokens: How many of them came from the prefix cache.
        checkpoints: Prefixes in the cache, unreachable ones of older epochs included.
    """

    num_running: int
    num_waiting: int
    preemptions: int
    prompt_tokens: int
    cached_tokens: int
    checkpoints: int
    grow: PoolStats
    window: PoolStats
    slots: PoolStats
    snapshots: PoolStats
