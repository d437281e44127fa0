"""Choices of routed experts and index entries: recorded by steps for outputs, and replayed by steps that score given tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lite.checks import require
from dsv4lite.models.choices import Choices
from dsv4lite.models.config import ModelConfig
from dsv4lite.request import Replay


class Chosen(NamedTuple):
    """Choices of one step for the tokens of a sequence, on the host.

    Attributes:
        routed: Position of the first token, and experts int16 [tokens, layers, K]; ``None`` for a model without routed experts.
        selected: The same for selected entries, int32 [tokens, layers, k], without the tokens that attend to all entries.
    """

    routed: tuple[int, Tensor] | None
    selected: tuple[int, Tensor] | None


def empty_choices(config: ModelConfig, tokens: int, longest: int, device: torch.device, selected: torch.device) -> Choices:
    """Allocate choices for tokens of sequences of at most ``longest`` tokens: experts on ``device``, entries on ``selected``."""
    layers, k, _ = config.selection
    routed, selects = None, layers > 0 and longest > config.most_unselected
    if config.num_experts:
        routed = torch.empty(tokens, config.num_hidden_layers, config.experts_per_token, dtype=torch.int16, device=device)
    return Choices(routed, torch.empty(tokens, layers, k, dtype=torch.int32, device=selected) if selects else None)


def sequence_choices(choices: Choices, row: int, start: int, end: int, config: ModelConfig) -> Chosen:
    """Return the choices for positions ``[start, end)`` of a sequence, whose first row in the step is ``row``."""
    routed, selected = choices
    first = max(start, config.most_unselected)
    return Chosen(
        None if routed is None else (start, routed[row : row + end - start].cpu()),
        None if selected is None or first >= end else (first, selected[row + first - start : row + end - start].cpu()),
    )


def replayed_choices(
    spans: Sequence[tuple[int, int, Replay | None]], config: ModelConfig, tokens: int, device: torch.device
) -> Choices:
    """Return the choices that a step must repeat, -1 where the model chooses; spans are ``(start, end, replay)`` of sequences."""
    host, row, longest = torch.device("cpu"), 0, max(end for _, end, _ in spans)
    found = Choices(*(None if x is None else x.fill_(-1) for x in empty_choices(config, tokens, longest, host, host)))
    for start, end, replay in spans:
        if replay is not None and replay.routed_experts is not None and found.routed_TLK is not None:
            found.routed_TLK[row : row + end - start] = replay.routed_experts[start:end]
        if replay is not None and replay.index_entries is not None and found.selected_TLK is not None:
            first = min(max(start, replay.index_from), end)
            entries = replay.index_entries[first - replay.index_from : end - replay.index_from]
            found.selected_TLK[row + first - start : row + end - start] = entries
        row += end - start
    return found._replace(routed_TLK=None if found.routed_TLK is None else found.routed_TLK.to(device))


def check_replay(replay: Replay, config: ModelConfig, prompt: int, completion: int) -> None:
    """Raise ``InvalidRequestError`` unless a replay fits this model and the numbers of prompt and completion tokens."""
    tokens, first, (layers, k, per_entry) = prompt + completion - 1, config.most_unselected, config.selection
    experts, entries, counts, ids = replay.routed_experts, replay.index_entries, replay.kept_counts, replay.kept_ids
    require(entries is None or replay.index_from == first, "replay.index_from", replay.index_from, f"must be {first}")

    def check(name: str, x: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        found = (tuple(x.shape), x.dtype) if isinstance(x, Tensor) else type(x)
        good = x is None or (found == (shape, dtype) and x.device.type == "cpu")
        require(good, f"replay.{name}", found, f"must be {shape} of {dtype} on the CPU, for {prompt} and {completion} tokens")

    check("routed_experts", experts, torch.int16, (tokens, config.num_hidden_layers, config.experts_per_token))
    check("index_entries", entries, torch.int32, (tokens - first, layers, k))
    check("kept_counts", counts, torch.int32, (completion,))
    require(counts is None or bool((counts > 0).all()), "replay.kept_counts", counts, "must be positive")
    check("kept_ids", ids, torch.int32, (0 if counts is None else int(counts.sum()),))
    require((counts is None) == (ids is None), "replay.kept_ids", None, "must come with kept_counts")
    if experts is not None:  # all -1 in a dense layer; kernels require distinct experts
        dense = (experts == -1).all(-1)
        good = bool(((experts >= 0) & (experts < config.num_experts)).all(-1).logical_or(dense).all())
        good = good and bool((experts.sort(-1).values.diff(dim=-1) > 0).all(-1).logical_or(dense).all())
        require(good, "replay.routed_experts", None, f"must be different ids below {config.num_experts}")
    if entries is not None:
        seen = torch.arange(first + 1, tokens + 1, device="cpu")[:, None, None] // per_entry
        good = bool(((entries >= 0) & (entries < seen)).all() and (entries.diff(dim=-1) > 0).all())
        require(good, "replay.index_entries", None, "must be ascending, and of entries that the token sees")
    good = ids is None or bool(((ids >= 0) & (ids < config.vocab_size)).all())
    require(good, "replay.kept_ids", None, f"must be token ids below {config.vocab_size}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChoiceRecord:
    """The choices of one sequence, collected from its steps.

    Attributes:
        parts: Choices of its steps, in order.
        shared: Another sequence that may have run the prompt for this one, and the number of prompt tokens that it shares.
    """

    parts: list[Chosen] = field(default_factory=list)
    shared: tuple[ChoiceRecord, int] | None = None

    def routed_experts(self) -> Tensor | None:
        """Return the experts of all tokens, int16 [tokens, layers, K]."""
        return self._joined("routed", 0)

    def index_entries(self, first: int) -> Tensor | None:
        """Return the entries that tokens from position ``first`` on attend to, int32 [tokens - first, layers, k]."""
        return self._joined("selected", first)

    def _joined(self, name: str, first: int) -> Tensor | None:
        """Join the parts; for a position that ran twice (after a preemption or a rejected draft), the last run counts."""
        own = [getattr(part, name) for part in self.parts if getattr(part, name) is not None]
        if not own:
            return None
        every: list[tuple[int, Tensor]] = own
        if self.shared is not None:
            leader, tokens = self.shared
            before = [getattr(part, name) for part in leader.parts if getattr(part, name) is not None]
            every = [(start, part[: tokens - start]) for start, part in before if start < tokens] + own
        length = max(start + len(part) for start, part in own)
        with torch.inference_mode(False):  # trainers use it in operations that are differentiated
            joined = torch.empty(length - first, *every[0][1].shape[1:], dtype=every[0][1].dtype, device="cpu")
        for start, part in every:
            joined[start - first : start - first + len(part)] = part[: max(0, length - start)]
        return joined
