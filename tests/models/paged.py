"""A hand-driven engine for tests: pages and slots in a shuffled physical order, everything unused poisoned."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from dsv4lite.models.deepseek_mla.batch import Batch as MlaBatch
from dsv4lite.models.deepseek_mla.model import DeepseekMla
from dsv4lite.models.deepseek_v4.batch import Batch
from dsv4lite.models.deepseek_v4.model import DeepseekV4
from dsv4lite.paging import PAGE_TOKENS, WINDOW_PAGE_TOKENS
from dsv4lite.scheduling.step_plan import SequencePlan
from dsv4lite.state.paging import make_paging
from dsv4lite.state.spec import StateSizes
from dsv4lite.state.store import StateCache

POISON = 0xFF  # a NaN as e4m3, bfloat16 and float32, and the NaN scale of e8m0


def make_batch(model: DeepseekV4 | DeepseekMla, sequences: Sequence[SequencePlan]) -> Batch | MlaBatch:
    token_ids_T, paging, longest = make_paging(sequences, model.numerics.device)
    return model.batch(token_ids_T, paging, max_tokens=longest)


class Pool:
    """Physical ids, handed out in random order."""

    def __init__(self, count: int, rng: random.Random) -> None:
        self.free = list(range(count))
        self._rng = rng
        rng.shuffle(self.free)

    def take(self) -> int:
        return self.free.pop()

    def give(self, ids: Sequence[int]) -> None:
        self.free.extend(ids)
        self._rng.shuffle(self.free)


class PagedSequence:
    """One sequence's pages."""

    def __init__(self, slot: int) -> None:
        self.slot, self.length = slot, 0
        self.pages: list[int] = []
        self.window_first = 0
        self.window_pages: list[int] = []


class PagedModel:
    """Runs steps of several sequences through a ``StateCache``, keeping only what a token may still read.

    Everything that no sequence owns is NaN at all times: pages before they are taken and after they slid away, slots before they
    are reset. Results are finite only if nothing of it is read, or what is read is masked.
    """

    def __init__(self, model: DeepseekV4 | DeepseekMla, *, tokens: int, sequences: int = 1, seed: int = 0) -> None:
        self.model, config = model, model.config
        rng = random.Random(seed)
        grow = sequences * (-(-tokens // PAGE_TOKENS) + 1)
        window = sequences * (-(-(tokens + config.window) // WINDOW_PAGE_TOKENS) + 2)
        sizes = StateSizes(grow_pages=grow, window_pages=window, slots=sequences + 2, snapshots=2)
        spec = model.state_spec
        self.device = model.numerics.device
        self.cache = StateCache.allocate(spec, sizes, self.device)
        assert self.cache.nbytes == spec.bytes(sizes)
        for _, _, store in self.cache.stores():
            store.memory.fill_(POISON)
        for slot in self.cache.slots().values():
            slot.fill_(float("nan"))
        self._grow, self._window, self._slots = Pool(grow, rng), Pool(window, rng), Pool(sizes.slots, rng)

    def open(self) -> PagedSequence:
        """Start an empty sequence."""
        sequence = PagedSequence(self._slots.take())
        self.cache.reset(torch.tensor([sequence.slot], device=self.device))
        return sequence

    def close(self, sequence: PagedSequence) -> None:
        """Give everything back, as it is: the next owner must not notice."""
        self._grow.give(sequence.pages)
        self._window.give([page for page in sequence.window_pages if page >= 0])
        self._slots.give([sequence.slot])

    def prepare(self, sequence: PagedSequence, token_ids: Sequence[int]) -> SequencePlan:
        """Take the pages that the next tokens need, and free those that no later token reads."""
        start, end = sequence.length, sequence.length + len(token_ids)
        while len(sequence.pages) * PAGE_TOKENS < end:
            sequence.pages.append(self._grow.take())
        first_read = max(0, start - self.model.config.window + 1) // WINDOW_PAGE_TOKENS
        gone = sequence.window_pages[: first_read - sequence.window_first]
        self._poison_window(page for page in gone if page >= 0)
        sequence.window_pages = sequence.window_pages[first_read - sequence.window_first :]
        sequence.window_first = first_read
        first_write = max(start, end - self.model.config.window)
        for page in range(first_read + len(sequence.window_pages), (end - 1) // WINDOW_PAGE_TOKENS + 1):
            # A long chunk skips pages that are not read any more: its early rows are never written.
            sequence.window_pages.append(self._window.take() if (page + 1) * WINDOW_PAGE_TOKENS > first_write else -1)
        return SequencePlan(
            seq_id=sequence.slot,
            slot=sequence.slot,
            start=start,
            token_ids=tuple(token_ids),
            pages=tuple(sequence.pages),
            window_first=sequence.window_first,
            window_pages=tuple(sequence.window_pages),
            sample=True,
        )

    def _poison_window(self, pages: Iterable[int]) -> None:
        ids = list(pages)
        for _, part, store in self.cache.stores():
            if part.lifetime == "window":
                store.memory[ids] = POISON
        self._window.give(ids)

    def batch(self, parts: Sequence[tuple[PagedSequence, Sequence[int]]]) -> Batch | MlaBatch:
        """Prepare the next tokens of some sequences, single ones first."""
        inputs = [self.prepare(*part) for part in parts]
        return make_batch(self.model, inputs)

    def step(self, parts: Sequence[tuple[PagedSequence, Sequence[int]]]) -> list[Tensor]:
        """Run the next tokens of some sequences together; return each one's final streams."""
        order = sorted(range(len(parts)), key=lambda i: len(parts[i][1]) > 1)
        batch = self.batch([parts[i] for i in order])
        with torch.no_grad():
            streams = self.model(batch, self.cache.layers)
        out: list[Tensor] = [streams] * len(parts)
        row = 0
        for i in order:
            sequence, token_ids = parts[i]
            out[i] = streams[row : row + len(token_ids)]
            row += len(token_ids)
            sequence.length += len(token_ids)
        return out

    def take_window(self) -> int:
        """Take a window page."""
        return self._window.take()


def run_in_cuts(model: DeepseekV4 | DeepseekMla, token_ids: Sequence[int], cuts: Sequence[int], *, seed: int = 0) -> Tensor:
    """Run one sequence in chunks that end at ``cuts``; return the final streams of all tokens."""
    paged = PagedModel(model, tokens=len(token_ids), seed=seed)
    sequence = paged.open()
    ends = [0, *cuts, len(token_ids)]
    return torch.cat([paged.step([(sequence, token_ids[a:b])])[0] for a, b in pairwise(ends) if b > a])
