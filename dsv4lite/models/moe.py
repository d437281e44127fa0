"""The mixture of experts: a router, one shared expert and many routed ones (specification 3.8).

Shape suffixes: T tokens, D model, E experts, K experts per token, I expert width.  Names are those of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from dsv4lite.kernels.experts import ExpertInputs, ExpertSum, can_tile, experts_forward, experts_outputs
from dsv4lite.kernels.experts.decode_small import Held, MoeInputs, moe_decode_small, suits_decode_small
from dsv4lite.kernels.peer_memory import TokenRows
from dsv4lite.kernels.quantize import quantize_fp8
from dsv4lite.kernels.routing import Copies, Router, route, take_copies
from dsv4lite.kernels.swiglu import swiglu_halves, swiglu_quantize
from dsv4lite.models.config import MoEConfig
from dsv4lite.models.partial_sums import exchanges_near, gather_rows, total, total_of_experts, total_of_own
from dsv4lite.models.share import Share
from dsv4lite.parallel.eplb import Placement
from dsv4lite.parallel.experts import AllGather, Dispatcher, Local, Rows
from dsv4lite.weights.quant import (
    ACTIVATION_GROUP,
    CopiedSlot,
    IdSlot,
    Matrix,
    MatrixSlot,
    NamedSlots,
    Numerics,
    Rounded,
    TensorSlot,
    TiledStack,
    TileSlot,
    linear,
    pair,
    parameter,
    rounded_linear,
)


class WideExperts(nn.Module):
    """Routed clamped SwiGLU experts as plain numbers; w1 (gate) and w3 (up) lie row block under row block."""

    def __init__(self, config: MoEConfig, numerics: Numerics, count: int, width: int) -> None:
        super().__init__()
        self.limit, self.width, self.count = config.swiglu_limit, width, count
        self.partial = width < config.expert_width
        self.w13 = Matrix(count, 2 * width, config.hidden_size, numerics=numerics, rounds_input=True)
        self.w2 = Matrix(count, config.hidden_size, width, numerics=numerics, rounds_input=True)

    def forward(self, rows: Rows, slots_TK: Tensor, weight_TK: Tensor, shared_TD: Tensor | None = None) -> Tensor:
        """Sum the chosen experts in float32, in the order of k; with ``shared_TD``, add that and round to its dtype, [T, D].

        A slot that does not exist adds nothing.
        """
        given = ExpertInputs(
            rows[0],
            None,
            slots_TK,
            weight_TK,
            self.w13.weight,
            self.w2.weight,
            self.limit,
            self.partial,
            row_tile=self.w13.row_tile,
            round_inputs=self.w13.rounds_input,
        )
        return experts_forward(given, shared_TD)

    def places(self, slot: int) -> dict[str, MatrixSlot | TileSlot]:
        """Return where the matrices of the expert in a slot go."""
        return {
            "w1": self.w13.rows(0, self.width, expert=slot),
            "w3": self.w13.rows(self.width, 2 * self.width, expert=slot),
            "w2": self.w2.rows(0, self.w2.weight.shape[1], expert=slot),
        }


class TiledExperts(nn.Module):
    """Routed clamped SwiGLU experts that stay as the checkpoint stores them, in tiles."""

    def __init__(self, config: MoEConfig, numerics: Numerics, count: int, width: int) -> None:
        super().__init__()
        hidden, fp4 = config.hidden_size, numerics.resident_experts == "fp4"
        self.limit, self.count, self.partial = config.swiglu_limit, count, width < config.expert_width
        self.w13 = TiledStack(count, 2 * width, hidden, fp4=fp4, device=numerics.device)
        self.w2 = TiledStack(count, hidden, width, fp4=fp4, device=numerics.device)

    def forward(self, rows: Rows, slots_TK: Tensor, weight_TK: Tensor, shared_TD: Tensor | None = None) -> Tensor:
        """Do the same as ``WideExperts``, with inputs in FP8."""
        return experts_forward(self._given((rows[0], rows[1]), slots_TK, weight_TK), shared_TD)

    def outputs(self, rounded: Rounded, slots_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """Return what ``forward`` sums, [T, K, D]: anything where there is no such slot."""
        return experts_outputs(self._given(rounded, slots_TK, weight_TK))

    def _given(self, rounded: Rounded, slots_TK: Tensor, weight_TK: Tensor) -> ExpertInputs:
        return ExpertInputs(*rounded, slots_TK, weight_TK, self.w13.tiles, self.w2.tiles, self.limit, self.partial)

    def places(self, slot: int) -> dict[str, MatrixSlot | TileSlot]:
        """Return where the matrices of the expert in a slot go."""
        return {"w1": self.w13.slot(slot, 0), "w3": self.w13.slot(slot, 1), "w2": self.w2.slot(slot)}


class SharedExpert(nn.Module):
    """The clamped SwiGLU expert of every token, or one rank's part of its width; w1 (gate) lies above w3 (up)."""

    def __init__(self, config: MoEConfig, numerics: Numerics, width: int) -> None:
        super().__init__()
        self.limit, self.width = config.swiglu_limit, width
        dense = partial(Matrix, numerics=numerics, rounds_input=True, fp8=True)
        self.w13 = dense(2 * width, config.hidden_size, borders=[width])
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
        for name, shape in (
            ("slots_EC", (num_experts + 1, most_copies)),
            ("copies_E", (num_experts + 1,)),
            ("load_E", (num_experts + 1,)),
        ):
            self.register_buffer(name, torch.zeros(shape, dtype=torch.int64, device=device), persistent=False)
        self.slots_EC: Tensor
        self.copies_E: Tensor
        self.load_E: Tensor

    def set(self, placement: Placement) -> None:
        """Follow a placement from the next step on; recorded graphs do, too."""
        none = len(placement.experts)
        rows = [[*slots, *[none] * (self.slots_EC.shape[1] - len(slots))] for slots in (*placement.copies, ())]
        counts = [*map(len, placement.copies), 1]
        self.slots_EC.copy_(torch.tensor(rows, dtype=torch.int64, device="cpu"))
        self.copies_E.copy_(torch.tensor(counts, dtype=torch.int64, device="cpu"))

    def copies(self, *, counted: bool = True) -> Copies:
        """Return the same for kernels, which count the experts they choose or do not."""
        return Copies(self.slots_EC, self.copies_E, self.load_E if counted else None)

    def forward(self, chosen_TK: Tensor) -> Tensor:
        """Count the chosen experts, and return their slots."""
        return take_copies(chosen_TK, self.copies())


class MoE(nn.Module):
    """Hash- or score-routed experts plus one shared expert (specification 3.8)."""

    def __init__(self, config: MoEConfig, numerics: Numerics, share: Share, *, hashed: bool) -> None:
        super().__init__()
        c = self.config = config
        self.share, self.dtype = share, numerics.dtype
        self.gate = Matrix(c.num_experts, c.hidden_size, numerics=numerics)
        tiled = numerics.resident_experts != "plain" and can_tile(c.hidden_size, share.expert_part(c.expert_width))
        self.placement = share.first_placement(c)
        self.map: ExpertMap | None = None
        if share.redundant_experts is not None:
            self.map = ExpertMap(c.num_experts, 1 + share.redundant_experts, numerics.device)
            if numerics.device.type != "meta":
                self.map.set(self.placement)
        self.experts: TiledExperts | WideExperts = (TiledExperts if tiled else WideExperts)(
            c, numerics, self.placement.slots_per_rank, share.expert_part(c.expert_width)
        )
        self.shared = SharedExpert(c, numerics, share.part(c.expert_width))
        self.dispatch = share.make_dispatcher(self.placement.slots_per_rank, numerics)
        self.bias = None if hashed else parameter(c.num_experts, numerics=numerics)
        table = torch.empty(c.vocab_size, c.experts_per_token, dtype=torch.int64, device=numerics.device) if hashed else None
        self.register_buffer("tid2eid", table)
        self.tid2eid: Tensor | None

    def forward(
        self,
        x_TD: Tensor,
        token_ids_T: Tensor,
        routed_TK: Tensor | None = None,
        rounded: Rounded | None = None,
        positions_T: Tensor | None = None,
        most_tokens: int | None = None,
    ) -> Tensor | ExpertSum:
        """Return [T, D], or, of few tokens on a single rank, what it is the sum of.

        Args:
            x_TD: Inputs.
            token_ids_T: For the hash.
            routed_TK: Receives the experts chosen.
            rounded: ``x`` in FP8, where it exists already.
            positions_T: Negative for padding, which gets no routed experts.
            most_tokens: As many as the rank has that has the most, of those that share the experts; ``None`` if it is not known.
        """
        rows: Rows = (x_TD,)
        if not isinstance(self.experts, WideExperts):
            rows = rounded = rounded or quantize_fp8(x_TD, ACTIVATION_GROUP)
            brief = self._briefly(x_TD, rounded, token_ids_T, positions_T, routed_TK, most_tokens)
            if brief is not None:
                return brief
        if self.dispatch is not None:
            return self._dispatched(self.dispatch, x_TD, rows, rounded, token_ids_T, positions_T, routed_TK, most_tokens)
        h_TI, gate = pair(x_TD, self.shared.w13, self.gate, rounded=rounded)
        logits_TE = gate()
        shared_TD = self.shared(h_TI, x_TD.dtype)
        del h_TI
        chosen_TK, weight_TK = route(logits_TE, self._router(token_ids_T, positions_T))
        if routed_TK is not None:
            routed_TK.copy_(chosen_TK)
        return self.experts.forward(rows, chosen_TK, weight_TK, shared_TD)

    def _dispatched(
        self,
        dispatch: Dispatcher,
        x_TD: Tensor,
        rows: Rows,
        rounded: Rounded | None,
        token_ids_T: Tensor,
        positions_T: Tensor | None,
        routed_TK: Tensor | None,
        most_tokens: int | None,
    ) -> Tensor:
        """Do what ``forward`` does with other ranks: the shared expert's products run while rows travel there, and back."""
        chosen_TK, weight_TK = route(linear(x_TD, self.gate, torch.float32), self._router(token_ids_T, positions_T))
        if routed_TK is not None:
            routed_TK.copy_(chosen_TK)
        run_experts = dispatch.start(rows, chosen_TK if self.map is None else self.map(chosen_TK), weight_TK, most_tokens)
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

    def _first(self, x_TD: Tensor, rounded: Rounded | None) -> tuple[Tensor | None, Tensor]:
        """Return the shared expert's gate and up [T, 2 I], unless another copy of this rank adds it, and the router's logits."""
        if self.share.leads:
            h_TI, gate = pair(x_TD, self.shared.w13, self.gate, rounded=rounded)
            return h_TI, gate()
        return None, linear(x_TD, self.gate, torch.float32)

    def _router(self, token_ids_T: Tensor, positions_T: Tensor | None) -> Router:
        c = self.config
        return Router(c.experts_per_token, c.route_scale, self.bias, self.tid2eid, token_ids_T, positions_T)

    def _briefly(
        self,
        x_TD: Tensor,
        rounded: Rounded,
        token_ids_T: Tensor,
        positions_T: Tensor | None,
        routed_TK: Tensor | None,
        most_tokens: int | None,
    ) -> Tensor | ExpertSum | None:
        """Do what ``forward`` does in fewer launches; ``None`` if there are too many tokens for it, which all ranks find alike."""
        dispatch, ep, tokens, top_k = self.dispatch, self.share.mesh.ep, len(x_TD), self.config.experts_per_token
        if self.shared.w2.scale is None:
            return None
        # A dispatcher of the host's own gets every call.
        if dispatch is None or type(dispatch) is Local:
            if not suits_decode_small(tokens, top_k):
                return None
            parts = self._parts(x_TD, rounded, token_ids_T, positions_T, routed_TK, slice(None))
            return parts if dispatch is None else total_of_experts(self.share.peers, parts, x_TD.dtype)
        if type(dispatch) is not AllGather or self.share.peers.size > 1 or most_tokens is None:
            return None
        if not (suits_decode_small(ep.size * most_tokens, top_k) or exchanges_near(ep, most_tokens, x_TD.shape[1])):
            return None
        if positions_T is None:
            positions_T = torch.zeros_like(token_ids_T)
        every = gather_rows(ep, TokenRows(x_TD, *rounded, token_ids_T, positions_T), most_tokens)
        own = slice(ep.rank * most_tokens, ep.rank * most_tokens + tokens)
        both = (every.codes, every.scales)
        parts = self._parts(every.x_TD, both, every.token_ids_T, every.positions_T, routed_TK, own)
        return total_of_own(ep, parts, tokens, x_TD.dtype)

    def _parts(
        self,
        x_TD: Tensor,
        rounded: Rounded,
        token_ids_T: Tensor,
        positions_T: Tensor | None,
        routed_TK: Tensor | None,
        own: slice,
    ) -> ExpertSum:
        """Run this rank's experts; arguments are those of ``forward``, but ``routed_TK`` is for ``own`` tokens."""
        c, shared, experts = self.config, self.shared, self.experts
        assert isinstance(experts, TiledExperts) and shared.w2.scale is not None
        router = self._router(token_ids_T, positions_T)
        held = Held(
            partial=experts.partial,
            shared_partial=self.share.partial_dtype(x_TD.dtype) != x_TD.dtype,
            first=self.share.mesh.ep.rank * self.placement.slots_per_rank,
            copies=None if self.map is None else self.map.copies(counted=own == slice(None) or self.share.mesh.ep.rank == 0),
        )
        tiles = (experts.w13.tiles, experts.w2.tiles)
        h_TI, logits_TE = self._first(x_TD, rounded)
        if suits_decode_small(len(x_TD), c.experts_per_token):
            down = (shared.w2.weight, shared.w2.scale)
            parts = moe_decode_small(
                MoeInputs(logits_TE, router, *rounded, h_TI, *down, *tiles, c.swiglu_limit, held, shared.w2.row_tile)
            )
            chosen_TK = parts.slots_TK
            if routed_TK is not None and self.dispatch is not None:  # slots of this rank are no experts
                chosen_TK, _ = route(logits_TE, router)
        else:
            shared_TD = None if h_TI is None else shared(h_TI, self.share.partial_dtype(x_TD.dtype))
            chosen_TK, weight_TK = route(logits_TE, router)
            slots_TK = held.own_slots(chosen_TK, experts.count)
            parts = ExpertSum(slots_TK, experts.outputs(rounded, slots_TK, weight_TK), shared_TD, experts.count)
        if routed_TK is not None:
            routed_TK.copy_(chosen_TK[own])
        return parts

    def take_part(self, most_tokens: int | None) -> None:
        """Run this rank's experts on other ranks' tokens; its own token is a single one of padding."""
        device = self.gate.weight.device
        nowhere_T = torch.full((1,), -1, dtype=torch.int32, device=device)
        nothing_TD = torch.zeros(1, self.config.hidden_size, dtype=self.dtype, device=device)
        self(nothing_TD, torch.zeros_like(nowhere_T, dtype=torch.int64), positions_T=nowhere_T, most_tokens=most_tokens)

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
