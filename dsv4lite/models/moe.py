"""The mixture of experts: a router, a shared expert and many routed experts (specification 3.8).

Shape suffixes: T tokens, D model, E experts, K experts per token, I expert width.  Names are those of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dsv4lite.kernels.dispatch import by_most
from dsv4lite.kernels.experts import ExpertInputs, ExpertSum, Tiles, can_tile, experts_forward, experts_outputs, sum_experts
from dsv4lite.kernels.experts.decode_small import Held, MoeInputs, moe_decode_small, most_decode_small
from dsv4lite.kernels.peer_memory import TokenRows
from dsv4lite.kernels.quantize import quantize_fp8
from dsv4lite.kernels.routing import Copies, Router, route, take_copies
from dsv4lite.kernels.swiglu import swiglu_halves, swiglu_quantize
from dsv4lite.models.config import ModelConfig
from dsv4lite.models.partial_sums import (
    ALL_TOKENS,
    TokenShard,
    all_gather_rows,
    all_reduce_experts,
    all_reduce_parts,
    most_peer_tokens,
    reduce_scatter_experts,
    rounded_sum,
)
from dsv4lite.models.shard import ModelShard
from dsv4lite.parallel.eplb import Placement, balance
from dsv4lite.parallel.experts import AllGather, Local, Rows
from dsv4lite.parallel.mesh import Axis
from dsv4lite.weights.quant import (
    ACTIVATION_GROUP,
    CopiedSlot,
    IdSlot,
    Matrix,
    MatrixSlot,
    NamedSlots,
    Numerics,
    Rounded,
    Slot,
    TensorSlot,
    TiledStack,
    TileSlot,
    linear,
    linear_pair,
    parameter,
    rounded_linear,
)


class Tokens(NamedTuple):
    """Inputs of a layer's experts in one step.

    Attributes:
        x_TD: Normed hidden states.
        token_ids_T: Indices of the table of hash layers.
        routed_TK: Receives the experts that each of this rank's tokens is routed to.
        rounded: ``x`` in FP8, if it has been computed.
        positions_T: Negative for padding, which gets no routed experts.
        most_tokens: Largest number of tokens on any rank that shares the experts; ``None`` if it is not known.
        given_TK: Experts to take instead of the router's; the router chooses where a number is negative.
        own: Which of the tokens are this rank's.
        shard: The tokens whose outputs the layer returns.
    """

    x_TD: Tensor
    token_ids_T: Tensor
    routed_TK: Tensor | None = None
    rounded: Rounded | None = None
    positions_T: Tensor | None = None
    most_tokens: int | None = None
    given_TK: Tensor | None = None
    own: slice = slice(None)
    shard: TokenShard = ALL_TOKENS

    def record(self, chosen_TK: Tensor) -> None:
        """Write the chosen experts to ``routed_TK``, unless that is ``None``."""
        if self.routed_TK is not None:
            self.routed_TK.copy_(chosen_TK[self.own])


class Experts(nn.Module):
    """A rank's routed experts, clamped SwiGLUs, each whole or a part of its width; w1 (gate) and w3 (up) share a matrix.

    Quantized ones keep the checkpoint's numbers, as FP4 or FP8 tiles or as four-bit groups; others are unquantized.
    """

    def __init__(self, config: ModelConfig, numerics: Numerics, count: int, width: int) -> None:
        super().__init__()
        hidden, self.limit, self.width, self.count = config.hidden_size, config.swiglu_limit, width, count
        four_bit = numerics.resident_experts == "four_bit"
        self.tiled = numerics.resident_experts in ("fp4", "fp8") and can_tile(hidden, width)
        unquantized = partial(Matrix, rounds_input=True, four_bit=four_bit)
        stack: Callable[..., Matrix | TiledStack] = TiledStack if self.tiled else unquantized
        self.w13 = stack(count, 2 * width, hidden, numerics=numerics)
        self.w2 = stack(count, hidden, width, numerics=numerics)

    def rounded(self, x_TD: Tensor, rounded: Rounded | None) -> Rounded | None:
        """Return ``x`` in FP8 if these experts read FP8; otherwise return ``rounded``."""
        return rounded or quantize_fp8(x_TD, ACTIVATION_GROUP) if self.tiled else rounded

    def rows(self, tokens: Tokens) -> Rows:
        """Return the rows that these experts multiply: FP8 codes and scales, or ``x`` itself."""
        return tokens.rounded if self.tiled and tokens.rounded is not None else (tokens.x_TD,)

    def inputs(self, rows: Rows, slots_TK: Tensor, weight_TK: Tensor) -> ExpertInputs:
        """Return the arguments of the expert ops."""
        w13, w2, scales = self.w13, self.w2, rows[1] if self.tiled else None
        weights = (w13.stored, w2.stored, self.limit, w13.row_tile, w13.rounds_input)
        return ExpertInputs(rows[0], scales, slots_TK, weight_TK, *weights)

    def forward(self, rows: Rows, slots_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, float32 [T, D], in the order of k; slots past the last add nothing."""
        return experts_forward(self.inputs(rows, slots_TK, weight_TK))

    def places(self, slot: int) -> dict[str, MatrixSlot | TileSlot]:
        """Return the places of the three matrices of the expert in a slot."""
        return {
            "w1": self.w13.rows(0, self.width, expert=slot),
            "w3": self.w13.rows(self.width, 2 * self.width, expert=slot),
            "w2": self.w2.rows(0, self.w2.shape[1], expert=slot),
        }


class SharedExpert(nn.Module):
    """The clamped SwiGLU that every token passes, or one rank's part of its width; w1 (gate) lies above w3 (up)."""

    def __init__(self, config: ModelConfig, numerics: Numerics, width: int) -> None:
        super().__init__()
        self.limit, self.width = config.swiglu_limit, width
        dense = partial(Matrix, numerics=numerics, rounds_input=True, fp8=True)
        self.w13 = dense(2 * width, config.hidden_size, boundaries=[width])
        self.w2 = dense(config.hidden_size, width)

    def forward(self, h_TI: Tensor, dtype: torch.dtype) -> Tensor:
        """Return [T, D] in ``dtype``, given ``x @ w13.T`` [T, 2 I]."""
        if self.w2.scale is not None:
            return rounded_linear(*swiglu_quantize(h_TI, self.limit), self.w2, dtype)
        return linear(swiglu_halves(h_TI, self.limit), self.w2, dtype)

    def slots(self, prefix: str) -> NamedSlots:
        yield prefix + "w1.weight", self.w13.rows(0, self.width)
        yield prefix + "w3.weight", self.w13.rows(self.width, 2 * self.width)
        yield prefix + "w2.weight", self.w2.whole()


class ExpertMap(nn.Module):
    """The slots of each expert, where experts may have several copies, and how often each expert was chosen.

    Attributes:
        slots_EC: int64 slots of each expert's copies.
        copies_E: int64 number of copies.
        load_E: int64 tokens routed to each expert since the last rebalancing; the last number counts padding.
    """

    def __init__(self, num_experts: int, most_copies: int, device: torch.device) -> None:
        super().__init__()
        for name, shape in (("slots_EC", (most_copies,)), ("copies_E", ()), ("load_E", ())):
            numbers = torch.zeros(num_experts + 1, *shape, dtype=torch.int64, device=device)
            self.register_buffer(name, numbers, persistent=False)
        self.slots_EC: Tensor
        self.copies_E: Tensor
        self.load_E: Tensor

    def set(self, placement: Placement) -> None:
        """Take over a placement in place, so that captured graphs follow it from the next step on."""
        none = len(placement.experts)
        rows = [[*slots, *[none] * (self.slots_EC.shape[1] - len(slots))] for slots in (*placement.copies, ())]
        counts = [*map(len, placement.copies), 1]
        self.slots_EC.copy_(torch.tensor(rows, dtype=torch.int64, device="cpu"))
        self.copies_E.copy_(torch.tensor(counts, dtype=torch.int64, device="cpu"))

    def copies(self, *, counted: bool = True) -> Copies:
        """Return the map as ops take it; with ``counted`` they add the experts they choose to ``load_E``."""
        return Copies(self.slots_EC, self.copies_E, self.load_E if counted else None)


class MoE(nn.Module):
    """Hash- or score-routed experts plus one shared expert (specification 3.8).

    Attributes:
        dispatch: Sends rows to the ranks of their experts; ``None`` if this rank holds all experts whole.
        gathers: Steps of few tokens are all-gathered over the ranks of ep, padded to ``most_tokens``.
        regimes: How experts are computed, each with the most tokens that it is for.
        held: Which experts this rank holds.
    """

    def __init__(self, config: ModelConfig, numerics: Numerics, shard: ModelShard, *, hashed: bool) -> None:
        super().__init__()
        c = self.config = config
        self.shard, self.dtype, ep = shard, numerics.dtype, shard.mesh.ep
        self.any_order = not numerics.deterministic
        self.gate = Matrix(c.num_experts, c.hidden_size, numerics=numerics)
        self.placement = shard.first_placement(c)
        self.map: ExpertMap | None = None
        if shard.redundant_experts is not None:
            self.map = ExpertMap(c.num_experts, 1 + shard.redundant_experts, numerics.device)
            if numerics.device.type != "meta":
                self.map.set(self.placement)
        self.experts = Experts(c, numerics, self.placement.slots_per_rank, shard.expert_part(c.expert_width))
        self.shared = SharedExpert(c, numerics, shard.part(c.num_shared_experts * c.expert_width))
        self.bias = None if hashed or not c.biased else parameter(c.num_experts, numerics=numerics)
        table = torch.empty(c.vocab_size, c.experts_per_token, dtype=torch.int64, device=numerics.device) if hashed else None
        self.register_buffer("tid2eid", table)
        self.tid2eid: Tensor | None
        dispatch = self.dispatch = shard.make_dispatcher(self.placement.slots_per_rank, numerics)
        # Experts in tiles have fused ops and all-gathers of their own. A dispatcher of the host's gets every call.
        resident = self.experts.tiled and self.shared.w2.scale is not None
        self.gathers = resident and type(dispatch) is AllGather and shard.mesh.peers.size == 1
        small = most_decode_small(c.experts_per_token) if resident and c.scoring == "sqrtsoftplus" else 0
        large: Regime = partial(MoE._on_one_rank, run=MoE._any_size) if dispatch is None else MoE._dispatched
        if type(dispatch) is Local and shard.mesh.layout.copies == 1:
            large = partial(MoE._all_reduced, run=MoE._any_size)
        regimes: list[tuple[int | None, Regime]] = [(0, large)]
        if self.gathers:
            regimes += [(small // ep.size, partial(MoE._all_gathered, run=MoE._decode_small))]
            regimes += [(most_peer_tokens(ep, c.hidden_size), partial(MoE._all_gathered, run=MoE._any_size))]
        elif dispatch is None or type(dispatch) is Local:
            regimes += [(small, partial(MoE._on_one_rank if dispatch is None else MoE._all_reduced, run=MoE._decode_small))]
        self.regimes = (*regimes, (None, large))
        self.held = Held(
            shared_partial=shard.partial_dtype(numerics.dtype) != numerics.dtype,
            first=None if ep.size == 1 else ep.rank * self.placement.slots_per_rank,
            copies=None if self.map is None else self.map.copies(counted=not self.gathers or ep.rank == 0),
        )

    def forward(self, tokens: Tokens) -> Tensor:
        """Return [T, D], or the rows of ``tokens.shard``, in the dtype of the input."""
        tokens = tokens._replace(rounded=self.experts.rounded(tokens.x_TD, tokens.rounded))
        count = tokens.most_tokens if self.gathers else len(tokens.x_TD)
        return by_most(self.regimes, count)(self, tokens)

    def _on_one_rank(self, tokens: Tokens, run: Callable[[MoE, Tokens], ExpertSum]) -> Tensor:
        """Run the experts, all of which are on this rank, and add up their outputs."""
        return sum_experts(run(self, tokens))

    def _all_reduced(self, tokens: Tokens, run: Callable[[MoE, Tokens], ExpertSum]) -> Tensor:
        """Run this rank's experts, and add up the outputs of the ranks that work on the same tokens."""
        return all_reduce_experts(self.shard.mesh.peers, run(self, tokens), tokens.x_TD.dtype, tokens.shard)

    def _all_gathered(self, tokens: Tokens, run: Callable[[MoE, Tokens], ExpertSum]) -> Tensor:
        """Run this rank's experts on all ranks' tokens, ``most_tokens`` of each."""
        x_TD, ids_T, _, rounded, positions_T, most, *_ = tokens
        ep = self.shard.mesh.ep
        assert rounded is not None and most is not None
        if positions_T is None:
            positions_T = torch.zeros_like(ids_T)
        every = all_gather_rows(ep, TokenRows(x_TD, *rounded, ids_T, positions_T), most)
        own = slice(ep.rank * most, ep.rank * most + len(x_TD))
        codes = (every.codes, every.scales)
        of_all = Tokens(every.x_TD, every.token_ids_T, tokens.routed_TK, codes, every.positions_T, own=own)
        return reduce_scatter_experts(ep, run(self, of_all), len(x_TD), x_TD.dtype)

    def _decode_small(self, tokens: Tokens) -> ExpertSum:
        """Run this rank's experts, in tiles, on few tokens, by the fused op."""
        shared, w13, w2, rounded = self.shared.w2, self.experts.w13.stored, self.experts.w2.stored, tokens.rounded
        assert rounded is not None and shared.scale is not None and isinstance(w13, Tiles) and isinstance(w2, Tiles)
        h_TI, logits_TE = self._projected(tokens)
        router = self._router(tokens, logits_TE)
        down = (shared.weight, shared.scale)
        given = MoeInputs(logits_TE, router, *rounded, h_TI, *down, w13, w2, self.config.swiglu_limit, self.held, shared.row_tile)
        parts = moe_decode_small(given)
        if tokens.routed_TK is not None:  # slot numbers are expert ids only on a rank that holds all experts
            tokens.record(parts.slots_TK if self.dispatch is None else route(logits_TE, router)[0])
        return parts

    def _any_size(self, tokens: Tokens) -> ExpertSum:
        """Run this rank's experts on any number of tokens."""
        h_TI, logits_TE = self._projected(tokens)
        shared_TD = None if h_TI is None else self.shared(h_TI, self.shard.partial_dtype(tokens.x_TD.dtype))
        del h_TI
        chosen_TK, weight_TK = self._routed(tokens, logits_TE)
        slots_TK = self.held.own_slots(chosen_TK, self.experts.count)
        given = self.experts.inputs(self.experts.rows(tokens), slots_TK, weight_TK)
        return ExpertSum(slots_TK, experts_outputs(given), shared_TD, self.experts.count)

    def _dispatched(self, tokens: Tokens) -> Tensor:
        """Send rows to their experts on other ranks; the shared expert's two products run during the two transfers."""
        x_TD, rounded, dispatch = tokens.x_TD, tokens.rounded, self.dispatch
        assert dispatch is not None
        chosen_TK, weight_TK = self._routed(tokens, linear(x_TD, self.gate, torch.float32))
        slots_TK = chosen_TK if self.map is None else take_copies(chosen_TK, self.map.copies())
        run_experts = dispatch.start(self.experts.rows(tokens), slots_TK, weight_TK, tokens.most_tokens)
        own = self.shard.shared_tokens(len(x_TD), any_order=self.any_order)
        h_TI = shared_TD = None
        if own.stop > own.start:
            codes = None if rounded is None else (rounded[0][own], rounded[1][own])
            h_TI = linear(x_TD[own], self.shared.w13, rounded=codes)
        wait_for_sums = run_experts(self.experts.forward)
        if h_TI is not None:
            shared_TD = self.shared(h_TI, self.shard.partial_dtype(x_TD.dtype))
        sums_TD = wait_for_sums()
        if shared_TD is not None and len(shared_TD) < len(x_TD):
            sums_TD[own] += shared_TD
            shared_TD = None
        peers = self.shard.mesh.peers
        if shared_TD is not None and peers.size > 1 and self.shard.mesh.layout.copies == 1 and not self.any_order:
            # Which peer has a token's sums depends on its place in the step: with that peer's part of the shared expert they would
            # be rounded in another order at another place.
            sums_TD, shared_TD = (all_reduce_parts(peers, part, torch.float32, shard=tokens.shard) for part in (sums_TD, shared_TD))
            return rounded_sum(sums_TD, shared_TD, x_TD.dtype)
        return all_reduce_parts(peers, sums_TD, x_TD.dtype, shared_TD, tokens.shard)

    def _projected(self, tokens: Tokens) -> tuple[Tensor | None, Tensor]:
        """Return the shared expert's gate and up [T, 2 I], if this rank computes it, and the router's logits [T, E]."""
        if not self.shard.is_first_copy:  # the first copy computes the shared expert
            return None, linear(tokens.x_TD, self.gate, torch.float32)
        return linear_pair(tokens.x_TD, self.shared.w13, self.gate, rounded=tokens.rounded)

    def _routed(self, tokens: Tokens, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's experts and their weights [T, K]; record the experts."""
        chosen_TK, weight_TK = route(logits_TE, self._router(tokens, logits_TE))
        tokens.record(chosen_TK)
        return chosen_TK, weight_TK

    def _router(self, tokens: Tokens, logits_TE: Tensor) -> Router:
        """Return the router. Given experts become a table with one row per token, which is read like that of a hash layer."""
        c, given_TK = self.config, tokens.given_TK
        rules = (c.scoring, c.expert_groups, c.top_groups, c.renormalize)
        ids_T, positions_T = tokens.token_ids_T, tokens.positions_T
        router = Router(c.experts_per_token, c.route_scale, self.bias, self.tid2eid, ids_T, positions_T, *rules)
        if given_TK is None:
            return router
        chosen_TK = torch.where(given_TK < 0, route(logits_TE, router)[0], given_TK.long()).clamp_max(c.num_experts - 1)
        return router._replace(table_VK=chosen_TK, token_ids_T=torch.arange(len(chosen_TK), device=chosen_TK.device))

    def take_part(self, most_tokens: int | None) -> None:
        """Run this rank's experts on other ranks' tokens; the rank itself contributes one padding token."""
        device = self.gate.weight.device
        x_TD = torch.zeros(1, self.config.hidden_size, dtype=self.dtype, device=device)
        ids_T = torch.zeros(1, dtype=torch.int64, device=device)
        positions_T = torch.full((1,), -1, dtype=torch.int32, device=device)
        self(Tokens(x_TD, ids_T, positions_T=positions_T, most_tokens=most_tokens))

    def slots(self, prefix: str) -> NamedSlots:
        yield prefix + "gate.weight", self.gate.whole()
        if self.bias is not None:
            yield prefix + "gate.bias", TensorSlot(self.bias)
        if self.tid2eid is not None:
            name = prefix + "gate.tid2eid"
            yield name, IdSlot(self.tid2eid, name=name, limit=self.config.num_experts)
        yield from self._expert_slots(prefix, range(self.placement.slots_per_rank))
        yield from self.shared.slots(prefix + "shared_experts.")

    def place(self, placement: Placement, prefix: str) -> NamedSlots:
        """Adopt a placement; yield the places on this rank that get another expert, by the official names of its matrices.

        No step may run until the caller has filled all of them. Experts that stay on a rank keep their slots.
        """
        assert self.map is not None, "experts move only if redundant_experts is set"
        before, self.placement = self.placement, placement.keeping_slots(self.placement)
        self.map.set(self.placement)
        rank = self.shard.mesh.ep.rank
        pairs = zip(before.held_by(rank), self.placement.held_by(rank), strict=True)
        yield from self._expert_slots(prefix, [slot for slot, (old, new) in enumerate(pairs) if old != new])

    def _expert_slots(self, prefix: str, slots: Iterable[int]) -> NamedSlots:
        held = self.placement.held_by(self.shard.mesh.ep.rank)
        places: dict[str, list[MatrixSlot | TileSlot]] = {}
        for slot in slots:
            for name, place in self.experts.places(slot).items():
                places.setdefault(f"{prefix}experts.{held[slot]}.{name}.weight", []).append(place)
        for name, found in places.items():
            yield name, found[0] if len(found) == 1 else CopiedSlot(tuple(found))


Regime = Callable[[MoE, Tokens], Tensor]
"""Computes a layer's output from the layer and a step's tokens."""


def rebalance_experts(ep: Axis, layers: Mapping[str, MoE]) -> tuple[dict[str, Slot], list[tuple[float, float]]]:
    """Choose anew which ranks hold which experts, by the counts since the last rebalancing, and reset the counts.

    A collective: every rank of the stage calls it between the same two steps.

    Args:
        ep: The ranks that share the experts.
        layers: Each layer with experts, by the prefix of its official names.

    Returns:
        The places on this rank that get another expert, by the official names of its tensors; no step may run until all are
        filled. For every layer, the busiest rank's load divided by the average load, before and after.
    """
    waiting: dict[str, Slot] = {}
    imbalances: list[tuple[float, float]] = []
    for prefix, ffn in layers.items():
        assert ffn.map is not None
        loads = ep.all_reduce(ffn.map.load_E.clone())[:-1].tolist()
        ffn.map.load_E.zero_()
        wanted = balance(loads, slots=len(ffn.placement.experts), ranks=ep.size)
        imbalances.append((ffn.placement.imbalance(loads), wanted.imbalance(loads)))
        waiting.update(ffn.place(wanted, prefix))
    return waiting, imbalances
