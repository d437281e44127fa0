"""What the engine reads of a model's config, in every family, and what a family counts for the memory plan."""

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
        experts_per_token: That a token goes to.
        expert_width: Hidden channels of a routed expert.
        num_shared_experts: Experts of every token, which are one of their common width.
        scoring: How the router's logits become scores (``kernels/routing``).
        biased: The router has a bias for each expert, which counts for the selection only.
        expert_groups, top_groups: Groups of experts, and those of a token's groups that it chooses from.
        renormalize: The weights of a token's experts are divided by their sum.
        route_scale: Factor of the routed experts' weights.
        swiglu_limit: Bound of the inputs of SwiGLU.
        quantized: The checkpoint's matrices are quantized, and so its arithmetic.
        expert_format: How a quantized release stores routed experts.
        byte_scales: Scales of its FP8 matrices are e8m0 bytes, else float32.
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
        """Return the most tokens of a sequence whose every token attends to all that it sees."""
        return self.max_positions

    @property
    def selection(self) -> tuple[int, int, int]:
        """How many hidden layers select what longer sequences attend to, how many entries each of them, and tokens of an entry."""
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
    """Bytes of one rank's pass.

    Attributes:
        hidden: The residual of one token.
        held: Of one token, during the whole pass.
        widest: All that lives at the widest point, of any number of tokens up to the most.
        experts: Of one token, while routed experts work.
    """

    hidden: int
    held: int
    widest: int
    experts: int = 0
