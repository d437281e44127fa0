"""The mixture of experts: a router, one shared expert and many routed ones (specification 3.8).

Shape suffixes: T tokens, D model, E experts, K experts per token, I expert width.  Names are those of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dsv4lite.kernels.dispatch import by_most
from dsv4lite.kernels.experts import ExpertInputs, ExpertSum, Tiles, can_tile, experts_forward, experts_outputs
from dsv4lite.kernels.experts.decode_small import Held, MoeInputs, moe_decode_small, most_decode_small
from dsv4lite.kernels.hc import Output
from dsv4lite.kernels.peer_memory import TokenRows
from dsv4lite.kernels.quantize import quantize_fp8
from dsv4lite.kernels.routing import Copies, Router, route, take_copies
from dsv4lite.kernels.swiglu import swiglu_halves, swiglu_quantize
from dsv4lite.models.config import ModelConfig
from dsv4lite.models.partial_sums import gather_rows, most_near, total, total_of_experts, total_of_own
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
    pair,
    parameter,
    rounded_linear,
)


class Tokens(NamedTuple):
    """What a layer's experts get of a step.

    Attributes:
        x_TD: Inputs.
        token_ids_T: For the hash.
        routed_TK: Receives the experts chosen.
        rounded: ``x`` in FP8, if it exists already.
        positions_T: Negative for padding, which gets no routed experts.
        most_tokens: Tokens of the rank with the most, of those that share the experts; ``None`` if it is not known.
        given_TK: Experts that have to be chosen; a negative one leaves the choice of that token's to the router.
        own: Which of the tokens are this rank's; ``routed_TK`` has these.
    """

    x_TD: Tensor
    token_ids_T: Tensor
    routed_TK: Tensor | None = None
    rounded: Rounded | None = None
    positions_T: Tensor | None = None
    most_tokens: int | None = None
    given_TK: Tensor | None = None
    own: slice = slice(None)

    def keep(self, chosen_TK: Tensor) -> None:
        """Write the experts chosen to ``routed_TK``, if that is wanted."""
        if self.routed_TK is not None:
            self.routed_TK.copy_(chosen_TK[self.own])


class Experts(nn.Module):
    """Routed clamped SwiGLU experts, or one rank's part of their width; w1 (gate) and w3 (up) share a matrix.

    They stay as the checkpoint stores them, in tiles or with four bits, or are unquantized.
    """

    def __init__(self, config: ModelConfig, numerics: Numerics, count: int, width: int) -> None:
        super().__init__()
        hidden, self.limit, self.width, self.count = config.hidden_size, config.swiglu_limit, width, count
        self.partial = width < config.expert_width
        four_bit = numerics.resident_experts == "four_bit"
        self.tiled = numerics.resident_experts in ("fp4", "fp8") and can_tile(hidden, width)
        unquantized = partial(Matrix, rounds_input=True, four_bit=four_bit)
        stack: Callable[..., Matrix | TiledStack] = TiledStack if self.tiled else unquantized
        self.w13 = stack(count, 2 * width, hidden, numerics=numerics)
        self.w2 = stack(count, hidden, width, numerics=numerics)

    def rounded(self, x_TD: Tensor, rounded: Rounded | None) -> Rounded | None:
        """Return ``x`` in FP8 if these experts read that, else what is known of it."""
        return rounded or quantize_fp8(x_TD, ACTIVATION_GROUP) if self.tiled else rounded

    def rows(self, tokens: Tokens) -> Rows:
        """Return what these experts read of tokens."""
        return tokens.rounded if self.tiled and tokens.rounded is not None else (tokens.x_TD,)

    def given(self, rows: Rows, slots_TK: Tensor, weight_TK: Tensor) -> ExpertInputs:
        """Return what the ops compute from."""
        w13, w2, scales = self.w13, self.w2, rows[1] if self.tiled else None
        weights = (w13.stored, w2.stored, self.limit, self.partial, w13.row_tile, w13.rounds_input)
        return ExpertInputs(rows[0], scales, slots_TK, weight_TK, *weights)

    def forward(self, rows: Rows, slots_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """Sum the chosen experts in float32 [T, D], in the order of k; a slot that does not exist adds nothing."""
        return experts_forward(self.given(rows, slots_TK, weight_TK))

    def places(self, slot: int) -> dict[str, MatrixSlot | TileSlot]:
        """Return where the matrices of the expert in a slot go."""
        return {
            "w1": self.w13.rows(0, self.width, expert=slot),
            "w3": self.w13.rows(self.width, 2 * self.width, expert=slot),
            "w2": self.w2.rows(0, self.w2.shape[1], expert=slot),
        }


class SharedExpert(nn.Module):
    """The clamped SwiGLU expert of every token, or one rank's part of its width; w1 (gate) lies above w3 (up)."""

    def __init__(self, config: ModelConfig, numerics: Numerics, width: int) -> None:
        super().__init__()
        self.limit, self.width = config.swiglu_limit, width
        dense = partial(Matrix, numerics=numerics, rounds_input=True, fp8=True)
        self.w13 = dense(2 * width, config.hidden_size, boundaries=[width])
        self.w2 = dense(config.hidden_size, width)

    def forward(self, h_TI: Tensor, dtype: torch.dtype) -> Tensor:
        """Return [T, D] in a dtype, from the product with ``w13`` [T, 2 I]."""
        if self.w2.scale is not None:
            return rounded_linear(*swiglu_quantize(h_TI, self.limit), self.w2, dtype)
        return linear(swiglu_halves(h_TI, self.limit), self.w2, dtype)

    def slots(self, prefix: str) -> NamedSlots:
        yield prefix + "w1.weight", self.w13.rows(0, self.width)
        yield prefix + "w3.weight", self.w13.rows(self.width, 2 * self.width)
        yield prefix + "w2.weight", self.w2.whole()


class ExpertMap(nn.Module):
    """Which slot a token's expert is taken from, where experts may have copies; and how often each was chosen.

    Attributes:
        load_E: int64 tokens that chose each expert since it was last cleared; the last number counts padding.
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
        """Follow a placement from the next step on, in captured graphs, too."""
        none = len(placement.experts)
        rows = [[*slots, *[none] * (self.slots_EC.shape[1] - len(slots))] for slots in (*placement.copies, ())]
        counts = [*map(len, placement.copies), 1]
        self.slots_EC.copy_(torch.tensor(rows, dtype=torch.int64, device="cpu"))
        self.copies_E.copy_(torch.tensor(counts, dtype=torch.int64, device="cpu"))

    def copies(self, *, counted: bool = True) -> Copies:
        """Return the same for ops, which count the experts they choose or do not."""
        return Copies(self.slots_EC, self.copies_E, self.load_E if counted else None)


class MoE(nn.Module):
    """Hash- or score-routed experts plus one shared expert (specification 3.8).

    Attributes:
        dispatch: Brings rows to the ranks of their experts; ``None`` if this rank has all of every expert.
        gathers: Few tokens go to all ranks of ep, which know how many each of them has.
        regimes: How experts are computed, by the most tokens that each way is for.
        held: Which experts this rank has.
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
        # Weights that stay quantized have ops of few launches and transfers of their own. A host's dispatcher gets every call.
        resident = self.experts.tiled and self.shared.w2.scale is not None
        self.gathers = resident and type(dispatch) is AllGather and shard.mesh.peers.size == 1
        few = most_decode_small(c.experts_per_token) if resident and c.scoring == "sqrtsoftplus" else 0
        many: Way = MoE._alone if dispatch is None else MoE._dispatched
        if type(dispatch) is Local and shard.mesh.layout.copies == 1:
            many = partial(MoE._together, run=MoE._many)
        regimes: list[tuple[int | None, Way]] = [(0, many)]
        if self.gathers:
            regimes += [(few // ep.size, partial(MoE._gathered, run=MoE._few))]
            regimes += [(most_near(ep, c.hidden_size), partial(MoE._gathered, run=MoE._many))]
        elif dispatch is None or type(dispatch) is Local:
            regimes += [(few, MoE._few if dispatch is None else partial(MoE._together, run=MoE._few))]
        self.regimes = (*regimes, (None, many))
        self.held = Held(
            partial=self.experts.partial,
            shared_partial=shard.partial_dtype(numerics.dtype) != numerics.dtype,
            first=None if ep.size == 1 else ep.rank * self.placement.slots_per_rank,
            copies=None if self.map is None else self.map.copies(counted=not self.gathers or ep.rank == 0),
        )

    def forward(self, tokens: Tokens) -> Output:
        """Return [T, D], or, of few tokens on a single rank, what it is the sum of."""
        tokens = tokens._replace(rounded=self.experts.rounded(tokens.x_TD, tokens.rounded))
        count = tokens.most_tokens if self.gathers else len(tokens.x_TD)
        return by_most(self.regimes, count)(self, tokens)

    def _alone(self, tokens: Tokens) -> Tensor:
        return experts_forward(*self._given(tokens))

    def _together(self, tokens: Tokens, run: Callable[[MoE, Tokens], ExpertSum]) -> Tensor:
        """Add up what ranks with the same tokens have of their experts."""
        return total_of_experts(self.shard.mesh.peers, run(self, tokens), tokens.x_TD.dtype)

    def _gathered(self, tokens: Tokens, run: Callable[[MoE, Tokens], ExpertSum]) -> Tensor:
        """Run this rank's experts on all ranks' tokens, ``most_tokens`` of each."""
        x_TD, ids_T, _, rounded, positions_T, most, *_ = tokens
        ep = self.shard.mesh.ep
        assert rounded is not None and most is not None
        if positions_T is None:
            positions_T = torch.zeros_like(ids_T)
        every = gather_rows(ep, TokenRows(x_TD, *rounded, ids_T, positions_T), most)
        own = slice(ep.rank * most, ep.rank * most + len(x_TD))
        codes = (every.codes, every.scales)
        of_all = Tokens(every.x_TD, every.token_ids_T, tokens.routed_TK, codes, every.positions_T, own=own)
        return total_of_own(ep, run(self, of_all), len(x_TD), x_TD.dtype)

    def _few(self, tokens: Tokens) -> ExpertSum:
        """Run this rank's experts, in tiles, on few tokens."""
        shared, w13, w2, rounded = self.shared.w2, self.experts.w13.stored, self.experts.w2.stored, tokens.rounded
        assert rounded is not None and shared.scale is not None and isinstance(w13, Tiles) and isinstance(w2, Tiles)
        h_TI, logits_TE = self._projected(tokens)
        router = self._router(tokens, logits_TE)
        down = (shared.weight, shared.scale)
        given = MoeInputs(logits_TE, router, *rounded, h_TI, *down, w13, w2, self.config.swiglu_limit, self.held, shared.row_tile)
        parts = moe_decode_small(given)
        if tokens.routed_TK is not None:  # slots of this rank are no experts, unless it has all
            tokens.keep(parts.slots_TK if self.dispatch is None else route(logits_TE, router)[0])
        return parts

    def _many(self, tokens: Tokens) -> ExpertSum:
        """Run this rank's experts on any number of tokens."""
        given, shared_TD = self._given(tokens)
        return ExpertSum(given.slots_TK, experts_outputs(given), shared_TD, self.experts.count)

    def _given(self, tokens: Tokens) -> tuple[ExpertInputs, Tensor | None]:
        """Return what this rank's experts compute from, and the shared expert's result, if this rank adds that."""
        h_TI, logits_TE = self._projected(tokens)
        shared_TD = None if h_TI is None else self.shared(h_TI, self.shard.partial_dtype(tokens.x_TD.dtype))
        del h_TI
        chosen_TK, weight_TK = self._routed(tokens, logits_TE)
        slots_TK = self.held.own_slots(chosen_TK, self.experts.count)
        return self.experts.given(self.experts.rows(tokens), slots_TK, weight_TK), shared_TD

    def _dispatched(self, tokens: Tokens) -> Tensor:
        """Send rows to their experts on other ranks: the shared expert's products run while rows travel there, and back."""
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
        return total(self.shard.mesh.peers, sums_TD, x_TD.dtype, shared_TD)

    def _projected(self, tokens: Tokens) -> tuple[Tensor | None, Tensor]:
        """Return the shared expert's gate and up [T, 2 I], if this rank adds that expert, and the router's logits [T, E]."""
        if not self.shard.leads:  # another copy of this rank adds the shared expert
            return None, linear(tokens.x_TD, self.gate, torch.float32)
        return pair(tokens.x_TD, self.shared.w13, self.gate, rounded=tokens.rounded)

    def _routed(self, tokens: Tokens, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts chosen and their weights [T, K]."""
        chosen_TK, weight_TK = route(logits_TE, self._router(tokens, logits_TE))
        tokens.keep(chosen_TK)
        return chosen_TK, weight_TK

    def _router(self, tokens: Tokens, logits_TE: Tensor) -> Router:
        """Return how experts are chosen: given ones as a hash layer's are, from a table with a row for each token."""
        c, given_TK = self.config, tokens.given_TK
        rules = (c.scoring, c.expert_groups, c.top_groups, c.renormalize)
        ids_T, positions_T = tokens.token_ids_T, tokens.positions_T
        router = Router(c.experts_per_token, c.route_scale, self.bias, self.tid2eid, ids_T, positions_T, *rules)
        if given_TK is None:
            return router
        chosen_TK = torch.where(given_TK < 0, route(logits_TE, router)[0], given_TK.long()).clamp_max(c.num_experts - 1)
        return router._replace(table_VK=chosen_TK, token_ids_T=torch.arange(len(chosen_TK), device=chosen_TK.device))

    def take_part(self, most_tokens: int | None) -> None:
        """Run this rank's experts on other ranks' tokens; its own token is a single one of padding."""
        device = self.gate.weight.device
        nowhere_T = torch.full((1,), -1, dtype=torch.int32, device=device)
        nothing_TD = torch.zeros(1, self.config.hidden_size, dtype=self.dtype, device=device)
        none_T = torch.zeros_like(nowhere_T, dtype=torch.int64)
        self(Tokens(nothing_TD, none_T, positions_T=nowhere_T, most_tokens=most_tokens))

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
        """Move experts to where a placement has them, and name the places that wait for another expert's matrices.

        No step may run before all of them are filled. Experts that stay on a rank keep their slots.
        """
        assert self.map is not None, "experts stay where they are unless redundant_experts is given"
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


Way = Callable[[MoE, Tokens], Output]
"""From a layer and a step's tokens to what the layer adds to the streams."""


def rebalance_experts(ep: Axis, layers: Mapping[str, MoE]) -> tuple[dict[str, Slot], list[tuple[float, float]]]:
    """Choose the ranks of experts anew, by how often each was chosen since the last time, and restart the counts.

    Every rank of the stage calls this at the same time, between steps.

    Args:
        ep: The ranks that share the experts.
        layers: Each layer with experts, by the prefix of its official names.

    Returns:
        The places on this rank that get another expert, by the official names of their new tensors: no step may run until all
        are filled. And for every layer the busiest rank's load over the average, before and after.
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
