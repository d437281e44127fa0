"""The part of a model's config that every family has, and the bytes of a pass that a family reports to the memory plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

DrafterKind = Literal["mtp", "dspark"]
Scoring = Literal["sqrtsoftplus", "softmax", "sigmoid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes that every family has; each family's config adds its own.

    Attributes:
        max_positions: Most tokens of a sequence.
        window: Tokens that sliding-window attention sees, the token itself included; 0 if no layer has a window.
        num_experts: Routed experts of a layer; 0 for a dense model.
        experts_per_token: Routed experts of each token.
        expert_width: Hidden channels of a routed expert.
        num_shared_experts: Experts that every token passes; stored as one expert of their total width.
        scoring: How the router's logits become scores (``kernels/routing``).
        biased: The router adds a bias to each expert's score, for the selection only.
        expert_groups, top_groups: Number of groups of experts, and of the groups that a token chooses its experts from.
        renormalize: The weights of a token's experts are divided by their sum.
        route_scale: Factor of the routed experts' weights.
        swiglu_limit: Bound to which the inputs of SwiGLU are clamped.
        quantized: The checkpoint's matrices are quantized, and activations are rounded as the release does.
        expert_format: How a quantized release stores routed experts.
        byte_scales: Scales of its FP8 matrices are e8m0 bytes; otherwise they are float32.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    max_positions: int
    window: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    num_shared_experts: int = 1
    scoring: Scoring = "sqrtsoftplus"
    biased: bool = True
    expert_groups: int = 1
    top_groups: int = 1
    renormalize: bool = True
    route_scale: float = 1.0
    swiglu_limit: float = 10.0
    quantized: bool = False
    expert_format: Literal["fp4", "fp8"] = "fp4"
    byte_scales: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    @property
    def most_unselected(self) -> int:
        """Length up to which a sequence needs no selection: each of its tokens attends to all that it sees."""
        return self.max_positions

    @property
    def selection(self) -> tuple[int, int, int]:
        """Number of hidden layers that select entries, entries that each selects per token, and tokens per entry."""
        return 0, 0, 1

    def has_experts(self, layer: int) -> bool:
        """Return whether a hidden layer has routed experts."""
        return self.num_experts > 0

    @property
    def drafter(self) -> DrafterKind | None:
        """The kind of drafter that the config describes."""
        return None

    @property
    def draft_block(self) -> int:
        """Most draft tokens of one pass of a block drafter."""
        return 0


class PassBytes(NamedTuple):
    """Bytes that one forward pass allocates on a rank.

    Attributes:
        hidden: Residual of one token.
        held: Bytes per token that live during the whole pass.
        widest: Peak of the pass, over all numbers of tokens up to the limit.
        experts: Bytes per token while routed experts run.
    """

    hidden: int
    held: int
    widest: int
    experts: int = 0
