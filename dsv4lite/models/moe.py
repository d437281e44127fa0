"""The mixture of experts: a router, one shared expert and many routed ones (specification 3.8).

Shape suffixes: T tokens, D model, E experts, K experts per token, I expert width.  Names are those of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dsv4lite.kernels.experts import ExpertInputs, ExpertSum, Tiles, can_tile, experts_forward, experts_outputs
from dsv4lite.kernels.experts.decode_small import Held, MoeInputs, moe_decode_small, suits_decode_small
from dsv4lite.kernels.peer_memory import TokenRows
from dsv4lite.kernels.quantize import quantize_fp8
from dsv4lite.kernels.routing import Copies, Router, route, take_copies
from dsv4lite.kernels.swiglu import swiglu_halves, swiglu_quantize
from dsv4lite.models.config import ModelConfig
from dsv4lite.models.partial_sums import exchanges_near, gather_rows, total, total_of_experts, total_of_own
from dsv4lite.models.share import Share
from dsv4lite.parallel.eplb import Placement, balance
from dsv4lite.parallel.experts import AllGather, Dispatcher, Local, Rows
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
    """

    x_TD: Tensor
    token_ids_T: Tensor
    routed_TK: Tensor | None = None
    rounded: Rounded | None = None
    positions_T: Tensor | None = None
    most_tokens: int | None = None


class Experts(nn.Module):
    """Routed clamped SwiGLU experts, or one rank's part of their width; w1 (gate) and w3 (up) share a matrix.

    They stay as the checkpoint stores them, in tiles, or are unquantized.
    """

    def __init__(self, config: ModelConfig, numerics: Numerics, count: int, width: int) -> None:
        super().__init__()
        hidden, self.limit, self.width, self.count = config.hidden_size, config.swiglu_limit, width, count
        self.partial = width < config.expert_width
        self.tiled = numerics.resident_experts != "unquantized" and can_tile(hidden, width)
        stack: Callable[..., Matrix | TiledStack] = TiledStack if self.tiled else partial(Matrix, rounds_input=True)
        self.w13 = stack(count, 2 * width, hidden, numerics=numerics)
        self.w2 = stack(count, hidden, width, numerics=numerics)

    def given(self, rows: Rows, slots_TK: Tensor, weight_TK: Tensor) -> ExpertInputs:
        """Return what the ops compute from: ``rows`` are inputs, in tiles' case in FP8."""
        w13, w2, scales = self.w13, self.w2, rows[1] if self.tiled else None
        weights = (w13.stored, w2.stored, self.limit, self.partial, w13.row_tile, w13.rounds_input)
        return ExpertInputs(rows[0], scales, slots_TK, weight_TK, *weights)

    def forward(self, rows: Rows, slots_TK: Tensor, weight_TK: Tensor, shared_TD: Tensor | None = None) -> Tensor:
        """Sum the chosen experts in float32, in the order of k; with ``shared_TD``, add that and round to its dtype, [T, D].

        A slot that does not exist adds nothing.
        """
        return experts_forward(self.given(rows, slots_TK, weight_TK), shared_TD)

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
    """Hash- or score-routed experts plus one shared expert (specification 3.8)."""

    def __init__(self, config: ModelConfig, numerics: Numerics, share: Share, *, hashed: bool) -> None:
        super().__init__()
        c = self.config = config
        self.share, self.dtype = share, numerics.dtype
        self.gate = Matrix(c.num_experts, c.hidden_size, numerics=numerics)
        self.placement = share.first_placement(c)
        self.map: ExpertMap | None = None
        if share.redundant_experts is not None:
            self.map = ExpertMap(c.num_experts, 1 + share.redundant_experts, numerics.device)
            if numerics.device.type != "meta":
                self.map.set(self.placement)
        self.experts = Experts(c, numerics, self.placement.slots_per_rank, share.expert_part(c.expert_width))
        self.shared = SharedExpert(c, numerics, share.part(c.num_shared_experts * c.expert_width))
        dispatch = self.dispatch = share.make_dispatcher(self.placement.slots_per_rank, numerics)
        # Weights that stay quantized have ops of few launches and transfers of their own. A host's dispatcher gets every call.
        resident = self.experts.tiled and self.shared.w2.scale is not None
        self.stays = resident and (dispatch is None or type(dispatch) is Local)
        self.gathers = resident and type(dispatch) is AllGather and share.peers.size == 1
        self.bias = None if hashed or not c.biased else parameter(c.num_experts, numerics=numerics)
        table = torch.empty(c.vocab_size, c.experts_per_token, dtype=torch.int64, device=numerics.device) if hashed else None
        self.register_buffer("tid2eid", table)
        self.tid2eid: Tensor | None

    def forward(self, tokens: Tokens) -> Tensor | ExpertSum:
        """Return [T, D], or, of few tokens on a single rank, what it is the sum of."""
        x_TD, most, ep = tokens.x_TD, tokens.most_tokens, self.share.mesh.ep
        rows: Rows = (x_TD,)
        if self.experts.tiled:
            rows = rounded = tokens.rounded or quantize_fp8(x_TD, ACTIVATION_GROUP)
            tokens = tokens._replace(rounded=rounded)
        if self.stays and self._small(len(x_TD)):
            parts = self._parts(tokens, slice(None))
            return parts if self.dispatch is None else total_of_experts(self.share.peers, parts, x_TD.dtype)
        near = self.gathers and most is not None and exchanges_near(ep, most, x_TD.shape[1]) is not None
        if self.gathers and most is not None and (near or self._small(ep.size * most)):
            return self._gathered(tokens, most)
        if self.dispatch is not None:
            return self._dispatched(self.dispatch, rows, tokens)
        h_TI, gate = pair(x_TD, self.shared.w13, self.gate, rounded=tokens.rounded)
        logits_TE = gate()
        shared_TD = self.shared(h_TI, x_TD.dtype)
        del h_TI
        chosen_TK, weight_TK = route(logits_TE, self._router(tokens))
        if tokens.routed_TK is not None:
            tokens.routed_TK.copy_(chosen_TK)
        return self.experts.forward(rows, chosen_TK, weight_TK, shared_TD)

    def _small(self, tokens: int) -> bool:
        return self.config.scoring == "sqrtsoftplus" and suits_decode_small(tokens, self.config.experts_per_token)

    def _router(self, tokens: Tokens) -> Router:
        c = self.config
        rules = (c.scoring, c.expert_groups, c.top_groups, c.renormalize)
        return Router(c.experts_per_token, c.route_scale, self.bias, self.tid2eid, tokens.token_ids_T, tokens.positions_T, *rules)

    def _dispatched(self, dispatch: Dispatcher, rows: Rows, tokens: Tokens) -> Tensor:
        """Do what ``forward`` does with other ranks: the shared expert's products run while rows travel there, and back."""
        x_TD, rounded = tokens.x_TD, tokens.rounded
        chosen_TK, weight_TK = route(linear(x_TD, self.gate, torch.float32), self._router(tokens))
        if tokens.routed_TK is not None:
            tokens.routed_TK.copy_(chosen_TK)
        slots_TK = chosen_TK if self.map is None else take_copies(chosen_TK, self.map.copies())
        run_experts = dispatch.start(rows, slots_TK, weight_TK, tokens.most_tokens)
        own = self.share.shared_tokens(len(x_TD))
        h_TI = shared_TD = None
        if own.stop > own.start:
            codes = None if rounded is None else (rounded[0][own], rounded[1][own])
            h_TI = linear(x_TD[own], self.shared.w13, rounded=codes)
        wait_for_sums = run_experts(self.experts.forward)
        if h_TI is not None:
            shared_TD = self.shared(h_TI, self.share.partial_dtype(x_TD.dtype))
        sums_TD = wait_for_sums()
        if shared_TD is not None and len(shared_TD) < len(x_TD):
            sums_TD[own] += shared_TD
            shared_TD = None
        return total(self.share.peers, sums_TD, x_TD.dtype, shared_TD)

    def _gathered(self, tokens: Tokens, most_tokens: int) -> Tensor:
        """Run this rank's experts on all ranks' tokens, ``most_tokens`` of each."""
        x_TD, rounded, positions_T, ep = tokens.x_TD, tokens.rounded, tokens.positions_T, self.share.mesh.ep
        assert rounded is not None
        if positions_T is None:
            positions_T = torch.zeros_like(tokens.token_ids_T)
        every = gather_rows(ep, TokenRows(x_TD, *rounded, tokens.token_ids_T, positions_T), most_tokens)
        of_all = Tokens(every.x_TD, every.token_ids_T, tokens.routed_TK, (every.codes, every.scales), every.positions_T)
        first = ep.rank * most_tokens
        return total_of_own(ep, self._parts(of_all, slice(first, first + len(x_TD))), len(x_TD), x_TD.dtype)

    def _parts(self, tokens: Tokens, own: slice) -> ExpertSum:
        """Run this rank's experts, in tiles; ``routed_TK`` is for ``own`` tokens."""
        c, shared, experts, share = self.config, self.shared, self.experts, self.share
        x_TD, rounded = tokens.x_TD, tokens.rounded
        assert rounded is not None and shared.w2.scale is not None
        dtype = share.partial_dtype(x_TD.dtype)
        held = Held(
            partial=experts.partial,
            shared_partial=dtype != x_TD.dtype,
            first=share.mesh.ep.rank * self.placement.slots_per_rank,
            copies=None if self.map is None else self.map.copies(counted=own == slice(None) or share.mesh.ep.rank == 0),
        )
        router = self._router(tokens)
        h_TI: Tensor | None = None
        if share.leads:
            h_TI, gate = pair(x_TD, shared.w13, self.gate, rounded=rounded)
            logits_TE = gate()
        else:  # another copy of this rank adds the shared expert
            logits_TE = linear(x_TD, self.gate, torch.float32)
        if self._small(len(x_TD)):
            down, w13, w2 = (shared.w2.weight, shared.w2.scale), experts.w13.stored, experts.w2.stored
            assert isinstance(w13, Tiles) and isinstance(w2, Tiles)
            given = MoeInputs(logits_TE, router, *rounded, h_TI, *down, w13, w2, c.swiglu_limit, held, shared.w2.row_tile)
            parts = moe_decode_small(given)
            chosen_TK = parts.slots_TK
            if tokens.routed_TK is not None and self.dispatch is not None:  # slots of this rank are no experts
                chosen_TK, _ = route(logits_TE, router)
        else:
            shared_TD = None if h_TI is None else shared(h_TI, dtype)
            chosen_TK, weight_TK = route(logits_TE, router)
            slots_TK = held.own_slots(chosen_TK, experts.count)
            outputs_TKD = experts_outputs(experts.given(rounded, slots_TK, weight_TK))
            parts = ExpertSum(slots_TK, outputs_TKD, shared_TD, experts.count)
        if tokens.routed_TK is not None:
            tokens.routed_TK.copy_(chosen_TK[own])
        return parts

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
        rank = self.share.mesh.ep.rank
        pairs = zip(before.held_by(rank), self.placement.held_by(rank), strict=True)
        yield from self._expert_slots(prefix, [slot for slot, (old, new) in enumerate(pairs) if old != new])

    def _expert_slots(self, prefix: str, slots: Iterable[int]) -> NamedSlots:
        held = self.placement.held_by(self.share.mesh.ep.rank)
        places: dict[str, list[MatrixSlot | TileSlot]] = {}
        for slot in slots:
            for name, place in self.experts.places(slot).items():
                places.setdefault(f"{prefix}experts.{held[slot]}.{name}.weight", []).append(place)
        for name, found in places.items():
            yield name, found[0] if len(found) == 1 else CopiedSlot(tuple(found))


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
