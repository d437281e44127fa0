"""Compares a trainer's forward pass with a rollout's steps on the same weights: log-probabilities, and each part of the model.

The trainer's side is one pass over the whole sequence, with gradients where the checkpoint lets them through. The rollout's is what
an engine runs: chunks of a prompt, then single tokens, over pages. Each part of the model then runs in steps once more, on the
trainer's inputs, so that its difference does not include that of the parts before it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from dsv4lite.checks import integer, require
from dsv4lite.config import EngineSettings
from dsv4lite.device import own_thread
from dsv4lite.models.family import TrainableModel
from dsv4lite.models.moe import MoE, Tokens
from dsv4lite.paging import WINDOW_PAGE_TOKENS
from dsv4lite.scheduling.pages import pages_for
from dsv4lite.state.paging import make_paging, whole_sequences
from dsv4lite.state.store import StateCache
from dsv4lite.training import load_model

_PART = re.compile(r"layers\.\d+\.(attn|ffn)")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartDifference:
    """How far one kind of the model's parts is between both sides.

    Attributes:
        part: The kind.
        count: Parts of this kind.
        equal: Share of numbers with equal bits.
        largest: Largest difference of two numbers.
        relative: The same, divided by the largest number of the part's results.
    """

    part: str
    count: int
    equal: float
    largest: float
    relative: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityReport:
    """The result of a comparison; prints as a table.

    Attributes:
        model: Folder or id of the checkpoint.
        arithmetic: Dtype, device, and whether it is deterministic.
        tokens: Of the sequence.
        equal: Share of the log-probabilities of given tokens with equal bits.
        largest: Largest difference of two of them.
        parts: By kind, each on the same inputs.
    """

    model: str
    arithmetic: str
    tokens: int
    equal: float
    largest: float
    parts: tuple[PartDifference, ...]

    @property
    def exact(self) -> bool:
        """Whether all log-probabilities have equal bits."""
        return self.equal == 1.0

    def __str__(self) -> str:
        lines = [
            f"{self.model}: {self.tokens} tokens, {self.arithmetic}",
            f"log-probabilities: {self.equal:.2%} have equal bits, largest difference {self.largest:.3g}",
            f"{'part, on equal inputs':<32}{'parts':>6}{'equal bits':>12}{'largest':>12}{'relative':>12}",
        ]
        for p in self.parts:
            lines.append(f"{p.part:<32}{p.count:>6}{p.equal:>12.2%}{p.largest:>12.3g}{p.relative:>12.3g}")
        return "\n".join(lines)


class _Comparison:
    """Results of parts by kind, of both sides; mutable."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, tuple[int, int, float, float]]] = {}

    def add(self, kind: str, name: str, ours: Tensor, theirs: Tensor) -> None:
        """Compare results of one part; several calls for the same ``name`` add up."""
        a, b = ours.detach().float(), theirs.detach().float()
        same, count, largest, size = self._found.setdefault(kind, {}).get(name, (0, 0, 0.0, 0.0))
        same, count = same + int(((a == b) | (a.isnan() & b.isnan())).sum()), count + a.numel()
        self._found[kind][name] = same, count, max(largest, float((a - b).abs().amax())), max(size, float(b.abs().amax()))

    def differences(self) -> tuple[PartDifference, ...]:
        """Return what was found of each kind."""
        return tuple(
            PartDifference(
                part=kind,
                count=len(parts),
                equal=sum(part[0] for part in parts.values()) / sum(part[1] for part in parts.values()),
                largest=max(part[2] for part in parts.values()),
                relative=max(part[2] / part[3] if part[3] else 0.0 for part in parts.values()),
            )
            for kind, parts in sorted(self._found.items())
        )


def compare_sides(model: str, *, tokens: int = 300, **settings: Unpack[EngineSettings]) -> ParityReport:
    """Load a checkpoint, and compare both sides on random tokens.

    Args:
        model: Folder of a checkpoint, or a hub id.
        tokens: Length of the sequence; more than half of it is a prompt in chunks, the rest are single tokens.
        **settings: As of ``training.load_model``.

    Raises:
        InvalidRequestError: There are no two tokens to compare, or more than the model has positions.
    """
    require(not (problem := integer(2)(tokens)), "tokens", tokens, problem)
    built = load_model(model, **settings)
    require(not (problem := integer(2, built.config.max_positions)(tokens)), "tokens", tokens, problem)
    numerics = built.numerics
    token_ids = Random(0).choices(range(built.config.vocab_size), k=tokens)
    with own_thread(numerics.device, deterministic=numerics.deterministic):
        trained: dict[str, tuple[Tensor, Tensor]] = {}
        hooks = _watch(built, lambda name, x, out: trained.update({name: (x, out)}))
        streams = built.one_pass(token_ids)
        theirs = _logprobs(built.logits(streams), token_ids)
        for hook in hooks:
            hook.remove()
        for _, parameter in built.named_parameters():
            parameter.requires_grad_(False)
        ours = _logprobs(_in_steps(built, token_ids, lambda begin, end, out: out), token_ids)
        comparison = _Comparison()
        _compare_parts(built, token_ids, trained, streams.detach(), comparison)
    return ParityReport(
        model=model,
        arithmetic=f"{numerics.dtype}, {numerics.device.type}, deterministic={numerics.deterministic}".removeprefix("torch."),
        tokens=tokens,
        equal=float((ours == theirs).double().mean()),
        largest=float((ours - theirs).abs().amax()),
        parts=comparison.differences(),
    )


def _logprobs(logits: Tensor, token_ids: Sequence[int]) -> Tensor:
    """Return the log-probabilities of the tokens after the first, float32 [T - 1]."""
    targets = torch.tensor(token_ids[1:], dtype=torch.int64, device=logits.device)
    return torch.log_softmax(logits.detach()[:-1], dim=-1).gather(-1, targets[:, None])[:, 0]


def _parts(model: TrainableModel) -> dict[str, nn.Module]:
    """Return attention and experts of the hidden layers, by name."""
    return {name: module for name, module in model.named_modules() if _PART.fullmatch(name)}


def _kind(module: nn.Module) -> str:
    """Return the kind of a part, in words."""
    if isinstance(module, MoE):
        return "experts" if module.tid2eid is None else "experts, by token id"
    if "mlp" in dict(module.named_children()):
        return "dense"
    kind = getattr(module, "kind", None)
    return "attention" if kind is None else f"attention, {kind}"


def _watch(model: TrainableModel, see: Callable[[str, Tensor, Tensor], None]) -> list[Any]:
    """Call ``see`` with name, input [T, D] and output [T, D] of every part that runs; return the hooks."""

    def hook(name: str) -> Callable[..., None]:
        return lambda module, args, output: see(name, _input(args).detach(), output.detach())

    return [module.register_forward_hook(hook(name)) for name, module in _parts(model).items()]


def _input(args: tuple[Any, ...]) -> Tensor:
    first = args[0]
    found: Tensor = first.x_TD if isinstance(first, Tokens) else first
    return found


@torch.no_grad()
def _in_steps(model: TrainableModel, token_ids: Sequence[int], step: Callable[[int, int, Tensor], Tensor]) -> Tensor:
    """Run a sequence as an engine does; return the logits [T, V].

    Args:
        step: Called with first and last position of each step and its residual; returns the residual that the head gets.
    """
    ((plan,), sizes), device = whole_sequences([token_ids]), model.numerics.device
    cache = StateCache.allocate(model.state_spec, sizes, device)
    cache.reset(torch.zeros(1, dtype=torch.int64, device=device))
    length = len(token_ids)
    chunk, prompt = max(1, length // 5), max(1, 3 * length // 5)
    bounds = [*range(0, prompt, chunk), *range(prompt, length + 1)]
    logits = []
    for begin, end in itertools.pairwise(bounds):
        window = plan.window_pages[: -(-end // WINDOW_PAGE_TOKENS)]
        part = plan._replace(
            start=begin, token_ids=tuple(token_ids[begin:end]), pages=plan.pages[: pages_for(end)], window_pages=window
        )
        ids_T, paging, longest = make_paging([part], device)
        residual = model(model.batch(ids_T, paging, max_tokens=longest), cache.layers)
        logits.append(model.logits(step(begin, end, residual)))
    return torch.cat(logits)


def _compare_parts(
    model: TrainableModel, token_ids: Sequence[int], trained: dict[str, tuple[Tensor, Tensor]], residual: Tensor, found: _Comparison
) -> None:
    """Run the steps once more. Every part gets the trainer's inputs, and the trainer's result replaces its own."""
    place = [0]  # of the next row, for each part in turn: all run the same rows
    hooks = []

    def before(name: str) -> Callable[..., Any]:
        def replace_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x = _input(args)
            wanted = trained[name][0][place[0] : place[0] + len(x)]
            found.add("residual", f"before {name}", x, wanted)
            if isinstance(args[0], Tokens):
                return (args[0]._replace(x_TD=wanted, rounded=None), *args[1:])
            return (wanted, *(None if type(arg) is tuple else arg for arg in args[1:]))  # without the input in FP8

        return replace_input

    def after(name: str, kind: str) -> Callable[..., Any]:
        def replace_output(module: nn.Module, args: tuple[Any, ...], ours: Tensor) -> Tensor:
            wanted = trained[name][1][place[0] : place[0] + len(ours)]
            found.add(kind, name, ours, wanted)
            return wanted

        return replace_output

    def step(begin: int, end: int, ours: Tensor) -> Tensor:
        place[0] = end
        found.add("residual", "final", ours, residual[begin:end])
        return residual[begin:end]

    for name, module in _parts(model).items():
        hooks.append(module.register_forward_pre_hook(before(name)))
        hooks.append(module.register_forward_hook(after(name, _kind(module))))
    logits = _in_steps(model, token_ids, step)
    for hook in hooks:
        hook.remove()
    found.add("head", "head", logits, model.logits(residual))
