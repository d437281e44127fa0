"""DeepSeek-V4 in the report's order: hyper-connections, compressed sparse attention, mixture of experts, multi-token prediction.

Shape suffixes: T tokens, P tokens of this rank's shard, S sequences, N streams, D model, H heads, C head channels, R low rank,
G output groups, E experts or entries, K experts per token or selected entries, I expert width, V vocabulary.
Names are those of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dsv4lite.kernels.attention import AttentionInputs, paged_attention
from dsv4lite.kernels.compress import OVERLAP_RATIO, CompressInputs, compress_step
from dsv4lite.kernels.dispatch import by_most
from dsv4lite.kernels.hc import HcWeights, hc_head
from dsv4lite.kernels.indexer import IndexInputs, choose_paged
from dsv4lite.kernels.latent_norm_store import LatentInputs, latent_norms
from dsv4lite.kernels.norm import rms_norm
from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.qk_norm_rope import HeadInputs, head_norms
from dsv4lite.kernels.rope import rope_frequencies
from dsv4lite.kernels.rows import RowStore
from dsv4lite.models.choices import experts_of, selection_of
from dsv4lite.models.decoder import Decoder
from dsv4lite.models.deepseek_v4.batch import SPLITS, Batch, Rotary
from dsv4lite.models.deepseek_v4.config import V4Config
from dsv4lite.models.deepseek_v4.state import state_spec
from dsv4lite.models.deepseek_v4.streams import Streams
from dsv4lite.models.deepseek_v4.tensors import V4_TENSORS
from dsv4lite.models.moe import MoE, Tokens
from dsv4lite.models.partial_sums import ALL_TOKENS, TokenShard, all_reduce_parts
from dsv4lite.models.shard import ModelShard, stages
from dsv4lite.parallel.experts import DispatcherFactory
from dsv4lite.parallel.mesh import Mesh
from dsv4lite.state.spec import StateSpec
from dsv4lite.state.store import LayerCache
from dsv4lite.weights.quant import (
    Matrix,
    NamedSlots,
    Numerics,
    Rounded,
    Slot,
    TensorSlot,
    grouped_then_linear,
    linear,
    linear_pair,
    parameter,
    rounded_linear,
)

if TYPE_CHECKING:
    from dsv4lite.models.deepseek_v4.dspark import DSparkDrafter


class Compressor(nn.Module):
    """Pools each group of ``ratio`` tokens into one KV row (2.3.1 of the report; specification 3.5)."""

    def __init__(self, config: V4Config, numerics: Numerics, ratio: int, width: int, *, hadamard: bool = False) -> None:
        super().__init__()
        self.ratio, self.eps, self.hadamard = ratio, config.norm_eps, hadamard
        self.columns = width * (2 if ratio == OVERLAP_RATIO else 1)
        self.ape = parameter(ratio, self.columns, numerics=numerics)
        self.norm = parameter(width, numerics=numerics)

    def forward(self, projected: Tensor, state: Tensor, store: RowStore, batch: Batch) -> None:
        """Advance the compressor state; normalise, rotate and store the entries of the groups that this step completes.

        On a GPU the kernel runs at the same time as the previous launch, which must share nothing with it.
        """
        tokens = (batch.paging, self.ratio, *batch.group_rope_T[self.ratio])
        compress_step(CompressInputs(projected, self.ape, self.norm, state, store, *tokens, self.eps, self.hadamard, overlaps=True))

    def slots(self, prefix: str, inputs: Matrix, begin: int) -> NamedSlots:
        """Name the tensors; the two projections are consecutive rows of the layer's fused input matrix, from row ``begin``."""
        yield prefix + "ape", TensorSlot(self.ape)
        yield prefix + "norm.weight", TensorSlot(self.norm)
        yield prefix + "wkv.weight", inputs.rows(begin, begin + self.columns)
        yield prefix + "wgate.weight", inputs.rows(begin + self.columns, begin + 2 * self.columns)


class Attention(nn.Module):
    """Multi-query attention to the sliding window and to compressed entries: the selected ones (csa) or all (hca); spec 3.3-3.7."""

    def __init__(self, config: V4Config, numerics: Numerics, shard: ModelShard, layer: int) -> None:
        super().__init__()
        c = self.config = config
        self.numerics, self.shard = numerics, shard
        self.kind, self.ratio = c.kind(layer), c.ratios[layer]
        self.selector = sum(c.kind(before) == "csa" for before in range(layer))  # index among the csa layers
        heads, channels = shard.part(c.num_attention_heads), c.head_dim
        self.heads, self.groups = heads, shard.part(c.o_groups)
        self.attn_sink = parameter(heads, numerics=numerics)
        self.q_norm = parameter(c.q_lora_rank, numerics=numerics)
        self.kv_norm = parameter(channels, numerics=numerics)
        self.index_heads = c.index_heads if self.kind == "csa" else 0
        index_rows = self.index_heads * c.index_dim
        self._index_scale = float((c.index_dim * c.index_heads) ** -0.5)
        dense = partial(Matrix, numerics=numerics, fp8=True)
        self.wq_a_wkv = dense(c.q_lora_rank + channels, c.hidden_size, rounds_input=True, boundaries=[c.q_lora_rank])
        self.wq_b = dense(heads * channels + index_rows, c.q_lora_rank, rounds_input=True, boundaries=[heads * channels])
        self.wo_a = dense(self.groups, c.o_lora_rank, heads * channels // self.groups)
        self.wo_b = dense(c.hidden_size, self.groups * c.o_lora_rank, rounds_input=True)
        if self.ratio:
            self.compressor = Compressor(c, numerics, self.ratio, channels)
            rows = 2 * self.compressor.columns
            if self.kind == "csa":
                self.key_compressor = Compressor(c, numerics, self.ratio, c.index_dim, hadamard=numerics.quantized)
                rows += 2 * self.key_compressor.columns + c.index_heads
            # Row blocks: kv and gate of the compressor, kv and gate of the index keys, head weights. Unquantized, float32 results.
            self.compress_in = Matrix(rows, c.hidden_size, numerics=numerics)

    def forward(self, x_TD: Tensor, rounded: Rounded | None, batch: Batch, cache: LayerCache) -> Tensor:
        """Return the sub-layer's output for the batch's shard [P, D]; ``rounded`` is its input in FP8, if the weights are FP8."""
        return self.project_out(self._attend(x_TD, rounded, batch, cache), batch.shard)

    def _attend(self, x_TD: Tensor, rounded: Rounded | None, batch: Batch, cache: LayerCache) -> Tensor:
        """Return the heads' results [T, H, C], rotated back.

        Queries are the largest tensors of a step (``planning/memory.py``), so each tensor is freed after its last use.
        """
        c, paging, any_order = self.config, batch.paging, not self.numerics.deterministic
        angles = batch.compress_rope_T if self.ratio else batch.rope_T
        projected: Tensor | None = None
        if self.ratio:
            latent, projected = linear_pair(x_TD, self.wq_a_wkv, self.compress_in, rounded=rounded)
        else:
            latent = linear(x_TD, self.wq_a_wkv, rounded=rounded)
        norms = (self.q_norm, self.kv_norm, *angles, c.norm_eps)
        qr_TR, qr_scales, new_kv = latent_norms(LatentInputs(latent, *norms, cache.stores["window"], paging, c.window))
        # If no sequence has more than top-k entries, every token attends to all of them: no index queries, no scores.
        index_heads = self.index_heads if batch.selects else 0
        weights_TH = self._compress(projected, batch, cache, index_heads)
        del latent, projected
        heads = (self.heads, c.head_dim, index_heads, c.index_dim)
        columns = self.heads * c.head_dim + index_heads * c.index_dim
        query = rounded_linear(qr_TR, qr_scales, self.wq_b, x_TD.dtype, rows=columns)
        inputs = HeadInputs(query, *heads, *angles, c.norm_eps, self.numerics.quantized)
        q_THC, iq_THC = head_norms(inputs)
        del query, inputs
        selected_TK: Tensor | None = None
        if iq_THC is not None:
            assert weights_TH is not None
            keys = (cache.stores["keys"], paging, c.index_topk, batch.max_tokens // self.ratio, self._index_scale, any_order)
            selected_TK = choose_paged(IndexInputs(iq_THC, weights_TH, *keys))
            selected_TK = selection_of(selected_TK, self.selector, batch.given, batch.chosen)
        rows = (new_kv, cache.stores["window"], cache.stores.get("entries"), batch.seen)
        scale, window = c.head_dim**-0.5, c.window + batch.ahead
        seen = (*rows, self.attn_sink, scale, *angles, self.ratio, selected_TK, window, any_order)
        return paged_attention(AttentionInputs(q_THC, *seen))

    def store_kv(self, x_TD: Tensor, rounded: Rounded | None, batch: Batch, cache: LayerCache) -> None:
        """Store the kv rows of a step's tokens without attending; only for layers without compressed entries."""
        norms = (self.q_norm, self.kv_norm, *batch.rope_T, self.config.norm_eps)
        latent = linear(x_TD, self.wq_a_wkv, rounded=rounded)
        latent_norms(LatentInputs(latent, *norms, cache.stores["window"], batch.paging, self.config.window))

    def _compress(self, projected: Tensor | None, batch: Batch, cache: LayerCache, index_heads: int) -> Tensor | None:
        """Store the entries and index keys of completed groups; return the indexer's head weights [T, H] if it runs."""
        if projected is None:
            return None
        width = self.compressor.columns
        self.compressor(projected[:, : 2 * width], cache.slots["compressor_state"], cache.stores["entries"], batch)
        if self.kind == "csa":
            part = projected[:, 2 * width : 2 * (width + self.key_compressor.columns)]
            self.key_compressor(part, cache.slots["key_compressor_state"], cache.stores["keys"], batch)
        # A copy lets the other columns be freed.
        return projected[:, -index_heads:].contiguous() if index_heads else None

    def project_out(self, o_THC: Tensor, shard: TokenShard = ALL_TOKENS) -> Tensor:
        """Return the sub-layer's output [P, D] for the tokens of a shard, from the heads' results [T, H, C]."""
        o_TGK = o_THC.reshape(o_THC.shape[0], self.groups, -1)
        part_TD = grouped_then_linear(o_TGK, self.wo_a, self.wo_b, self.shard.partial_dtype(o_THC.dtype))
        return all_reduce_parts(self.shard.mesh.tp, part_TD, o_THC.dtype, shard=shard)

    def slots(self, prefix: str) -> NamedSlots:
        c = self.config
        head_rows, index_rows = self.heads * c.head_dim, c.index_heads * c.index_dim
        yield prefix + "attn_sink", TensorSlot(self.attn_sink)
        yield prefix + "q_norm.weight", TensorSlot(self.q_norm)
        yield prefix + "kv_norm.weight", TensorSlot(self.kv_norm)
        yield prefix + "wq_a.weight", self.wq_a_wkv.rows(0, c.q_lora_rank)
        yield prefix + "wkv.weight", self.wq_a_wkv.rows(c.q_lora_rank, c.q_lora_rank + c.head_dim)
        yield prefix + "wq_b.weight", self.wq_b.rows(0, head_rows)
        yield prefix + "wo_a.weight", self.wo_a.whole()
        yield prefix + "wo_b.weight", self.wo_b.whole()
        if self.ratio:
            yield from self.compressor.slots(prefix + "compressor.", self.compress_in, 0)
        if self.kind == "csa":
            begin = 2 * self.compressor.columns
            yield prefix + "indexer.wq_b.weight", self.wq_b.rows(head_rows, head_rows + index_rows)
            yield from self.key_compressor.slots(prefix + "indexer.compressor.", self.compress_in, begin)
            begin += 2 * self.key_compressor.columns
            yield prefix + "indexer.weights_proj.weight", self.compress_in.rows(begin, begin + c.index_heads)


class Hc(nn.Module):
    """Parameters of one hyper-connection."""

    def __init__(self, config: V4Config, numerics: Numerics, *, head: bool = False) -> None:
        super().__init__()
        n = config.streams
        rows = n if head else n * (n + 2)
        self.fn = parameter(rows, n * config.hidden_size, numerics=numerics)
        self.base = parameter(rows, numerics=numerics)
        self.scale = parameter(1 if head else 3, numerics=numerics)

    @property
    def weights(self) -> HcWeights:
        return HcWeights(self.fn, self.base, self.scale)

    def slots(self, prefix: str) -> NamedSlots:
        yield prefix + "_fn", TensorSlot(self.fn)
        yield prefix + "_base", TensorSlot(self.base)
        yield prefix + "_scale", TensorSlot(self.scale)


class Block(nn.Module):
    """Attention, then experts; each reads its input from the streams and adds its output to them (specification 3.1)."""

    def __init__(self, config: V4Config, numerics: Numerics, shard: ModelShard, layer: int) -> None:
        super().__init__()
        self._streams = partial(Streams, config=config, numerics=numerics)
        self.hc_attn, self.hc_ffn = Hc(config, numerics), Hc(config, numerics)
        self.attn_norm = parameter(config.hidden_size, numerics=numerics)
        self.ffn_norm = parameter(config.hidden_size, numerics=numerics)
        self.attn = Attention(config, numerics, shard, layer)
        self.ffn = MoE(config, numerics, shard, hashed=config.hashed(layer))

    def forward(
        self,
        given: Streams | Tensor,
        batch: Batch,
        cache: LayerCache,
        routed_TK: Tensor | None = None,
        given_TK: Tensor | None = None,
    ) -> Tensor | None:
        """Run the layer on streams, which it changes; of streams that are a tensor [P, N, D], it returns the next ones instead."""
        streams = self._streams(given, shard=batch.shard) if isinstance(given, Tensor) else given
        x_TD, rounded = streams.enter(self.hc_attn.weights, self.attn_norm)
        streams.leave(self.attn(x_TD, rounded, batch, cache))
        x_TD, rounded = streams.enter(self.hc_ffn.weights, self.ffn_norm)
        others = (routed_TK, rounded, batch.paging.positions_T, batch.most_tokens, given_TK)
        streams.leave(self.ffn(Tokens(x_TD, batch.token_ids_T, *others, shard=batch.shard)))
        return streams.written() if isinstance(given, Tensor) else None

    def slots(self, prefix: str) -> NamedSlots:
        yield prefix + "attn_norm.weight", TensorSlot(self.attn_norm)
        yield prefix + "ffn_norm.weight", TensorSlot(self.ffn_norm)
        yield from self.hc_attn.slots(prefix + "hc_attn")
        yield from self.hc_ffn.slots(prefix + "hc_ffn")
        yield from self.attn.slots(prefix + "attn.")
        yield from self.ffn.slots(prefix + "ffn.")


class Mtp(nn.Module):
    """Multi-token prediction: a block that reads the final streams and the next token (specification 3.9)."""

    def __init__(self, config: V4Config, numerics: Numerics, shard: ModelShard, layer: int) -> None:
        super().__init__()
        d = config.hidden_size
        self.eps = config.norm_eps
        self.enorm, self.hnorm, self.norm = (parameter(d, numerics=numerics) for _ in range(3))
        self.e_proj = Matrix(d, d, numerics=numerics, rounds_input=True, fp8=True)
        self.h_proj = Matrix(d, d, numerics=numerics, rounds_input=True, fp8=True)
        self.hc_head = Hc(config, numerics, head=True)
        self.block = Block(config, numerics, shard, layer)

    def mix(self, streams_TND: Tensor, embedded_TD: Tensor) -> Tensor:
        """Return the block's streams [T, N, D] from the previous ones and the embedding of the next token."""
        e_TD = linear(rms_norm(embedded_TD, self.enorm, self.eps), self.e_proj)
        h = linear(rms_norm(streams_TND, self.hnorm, self.eps).flatten(0, 1), self.h_proj)
        return e_TD[:, None] + h.view_as(streams_TND)

    def slots(self, prefix: str) -> NamedSlots:
        yield from self.block.slots(prefix)
        for name in ("enorm", "hnorm", "norm"):
            yield f"{prefix}{name}.weight", TensorSlot(getattr(self, name))
        yield prefix + "e_proj.weight", self.e_proj.whole()
        yield prefix + "h_proj.weight", self.h_proj.whole()
        yield from self.hc_head.slots(prefix + "hc_head")


class DeepseekV4(Decoder):
    """The whole model, or one rank's shard of it; see ``models.family.Model``, and ``ModelSource.build`` for the arguments.

    Parameters are allocated, not initialised: fill them through ``slots()``.

    Attributes:
        targets: Hidden layers whose streams DSpark reads; empty without it.

    Raises:
        ConfigError: The mesh's layout does not divide the model.
    """

    def __init__(
        self,
        config: V4Config,
        numerics: Numerics,
        mesh: Mesh | None = None,
        *,
        dispatcher: str | DispatcherFactory = "auto",
        redundant_experts: int | None = None,
        with_mtp: bool = False,
    ) -> None:
        shard = ModelShard.of(config, V4_TENSORS, mesh or Mesh(), dispatcher, redundant_experts)
        drafts = with_mtp and shard.last and config.num_draft_layers > 0
        super().__init__(config, numerics, shard, drafts=drafts)
        c = self.config = config
        self.targets = () if c.dspark is None or not with_mtp else c.dspark.targets
        self.passes_taps = bool(self.targets) and self.targets[0] < stages(c, V4_TENSORS, shard.mesh.pp.size)[-1].start
        if shard.last:
            self.hc_head = Hc(c, numerics, head=True)
        self.blocks = tuple(Block(c, numerics, shard, i) for i in shard.layers)
        self.layers = nn.ModuleList(self.blocks)
        self.mtps = tuple(Mtp(c, numerics, shard, c.num_hidden_layers + i) for i in range(c.num_mtp_layers if drafts else 0))
        self.mtp = nn.ModuleList(self.mtps)
        self.dspark: DSparkDrafter | None = None
        if drafts and c.dspark is not None:
            from dsv4lite.models.deepseek_v4.dspark import DSparkDrafter  # it imports Block from this file

            self.dspark = DSparkDrafter(c, c.dspark, numerics, shard)
        self.rotary = Rotary.of(
            main=rope_frequencies(c.rope_dim, c.rope_theta),
            compress=rope_frequencies(
                c.rope_dim,
                c.compress_rope_theta,
                factor=c.yarn.factor,
                original=c.yarn.original_positions,
                beta_fast=c.yarn.beta_fast,
                beta_slow=c.yarn.beta_slow,
            ),
            ratios=c.ratios,
            device=numerics.device,
        )

    @property
    def hidden_shape(self) -> tuple[int, ...]:
        """Shape of one token's residual streams, [N, D]."""
        return (self.config.streams, self.config.hidden_size)

    @property
    def short_lengths(self) -> tuple[int, ...]:
        """The longest sequence for which the indexer does not run: all its entries are attended."""
        return (self.config.most_unselected,)

    @property
    def drafting_blocks(self) -> tuple[Block, ...]:
        return super().drafting_blocks if self.dspark is None else tuple(self.dspark.blocks)

    def spec_of(self, *, drafter: bool) -> StateSpec:
        return state_spec(self.config, self.numerics, self.shard, drafter=drafter)

    def batch(self, token_ids_T: Tensor, paging: Paging, *, max_tokens: int) -> Batch:
        splits = 1 if self.numerics.deterministic else by_most(SPLITS, len(token_ids_T))
        paging = replace(paging, splits=splits)
        main, compress, *groups = self.rotary.angles(paging.positions_T)
        return Batch(
            token_ids_T=token_ids_T,
            paging=paging,
            max_tokens=max_tokens,
            rope_T=main,
            compress_rope_T=compress,
            group_rope_T=dict(zip(self.rotary.ratios, groups, strict=True)),
            most_unselected=self.config.most_unselected,
            seen=paging,
            shard=TokenShard.of(self.shard.mesh.peers, len(token_ids_T)),
        )

    def forward(self, batch: Batch, caches: Sequence[LayerCache], streams_TND: Tensor | None = None) -> Tensor:
        """Run a step's tokens through the layers; return the streams [T, N, D] after the last one.

        If ``caches`` include the state of a DSpark drafter, the drafter stores its kv rows of these tokens, too.

        Args:
            batch: The tokens; with ``passes_taps``, ``taps_TK`` holds what previous stages have written.
            caches: State of these layers, then of the drafter's.
            streams_TND: Output of the previous pipeline stage; ``None`` on the first one.
        """
        streams = self._streams(self._initial_streams(batch) if streams_TND is None else batch.shard.own(streams_TND), batch.shard)
        drafter, taps_TK = self.dspark if len(caches) > len(self.layers) else None, batch.taps_TK
        if taps_TK is None and drafter is not None:
            taps_TK = self.empty_taps(len(batch.token_ids_T))
        trains = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.parameters())
        for i, (layer, block) in enumerate(zip(self.shard.layers, self.layers, strict=True)):
            if layer in self.skipped:
                continue
            choices = (experts_of(batch.chosen, layer), experts_of(batch.given, layer))
            if trains:  # with tensors a layer can run again (checkpointing), and its wrappers (FSDP) see them
                streams = self._streams(block(streams.written(), batch, caches[i], *choices), batch.shard)
            else:
                block(streams, batch, caches[i], *choices)
            if taps_TK is not None and layer in self.targets:
                taps_TK.unflatten(1, (len(self.targets), -1))[:, self.targets.index(layer)] = streams.mean()
        if drafter is not None:
            assert taps_TK is not None
            drafter.store_kv(taps_TK, batch, caches[len(self.layers) :])
        return streams.final()

    def kind_of(self, layer: int) -> Hashable:
        return self.config.ratios[layer], self.config.hashed(layer), layer in self.targets

    def empty_taps(self, tokens: int) -> Tensor:
        """Allocate taps [tokens, layers * D]: for each target layer, the mean of the streams after it, side by side."""
        width = len(self.targets) * self.config.hidden_size
        return torch.empty(tokens, width, dtype=self.numerics.dtype, device=self.numerics.device)

    def _initial_streams(self, batch: Batch) -> Tensor:
        """Return the initial streams of the batch's shard [P, N, D]: N copies of the embedding."""
        return batch.shard.own(self.embedded(batch.token_ids_T))[:, None].repeat(1, self.config.streams, 1)

    def _streams(self, value_PND: Tensor, shard: TokenShard = ALL_TOKENS) -> Streams:
        return Streams(value_PND, self.config, self.numerics, shard)

    def logits(self, streams_TND: Tensor, *, out: Tensor | None = None) -> Tensor:
        return self._head(streams_TND, self.hc_head, self.norm, out)

    def mtp_forward(self, streams_TND: Tensor, batch: Batch, cache: LayerCache) -> Tensor:
        """Run the MTP block; return its streams [T, N, D].

        Args:
            streams_TND: Final streams of the main model, or of this block when it drafts further tokens.
            batch: The same positions, with the *next* token at each.
            cache: The block's own window.
        """
        streams, block = self._mtp_streams(streams_TND, batch), self.mtps[0].block
        block(streams, batch, cache)
        return streams.final()

    def mtp_store_kv(self, streams_TND: Tensor, batch: Batch, cache: LayerCache) -> None:
        """Store the MTP block's kv rows of a step's tokens; arguments are those of ``mtp_forward``."""
        streams, block = self._mtp_streams(streams_TND, batch), self.mtps[0].block
        block.attn.store_kv(*streams.enter(block.hc_attn.weights, block.attn_norm), batch, cache)

    def _mtp_streams(self, streams_TND: Tensor, batch: Batch) -> Streams:
        """Return the initial streams of the MTP block."""
        own_PND, own_PD = batch.shard.own(streams_TND), batch.shard.own(self.embedded(batch.token_ids_T))
        return self._streams(self.mtps[0].mix(own_PND, own_PD), batch.shard)

    def mtp_logits(self, streams_TND: Tensor) -> Tensor:
        """Return float32 logits [T, V] of the token after the next, from the MTP block's streams."""
        return self._head(streams_TND, self.mtps[0].hc_head, self.mtps[0].norm)

    def draft_block(
        self,
        anchors_S: Tensor,
        next_S: Tensor,
        window_SP: Tensor,
        window_first_S: Tensor,
        caches: Sequence[LayerCache],
        pick: Callable[[Tensor, int], Tensor],
        most_sequences: int | None,
    ) -> tuple[Tensor, Tensor]:
        """Draft a block with DSpark; see ``models.family.BlockModel``."""
        from dsv4lite.models.deepseek_v4.dspark import DraftBlock

        assert self.dspark is not None
        where = DraftBlock.of(next_S, window_SP, window_first_S, self.dspark.block, self.rotary.main)
        out = self.dspark(anchors_S, where, caches, self.embedded, self.project, pick, most_sequences)
        return out.token_ids_SG, out.confidence_SG

    def draft_take_part(self, most_sequences: int) -> None:
        """As ``take_part``, for the blocks of DSpark."""
        assert self.dspark is not None
        for stage in self.dspark.blocks:
            stage.ffn.take_part(most_sequences * self.dspark.block)

    def _head(self, streams_TND: Tensor, hc: Hc, norm: Tensor, out: Tensor | None = None) -> Tensor:
        c = self.config
        y_TD = hc_head(streams_TND, hc.weights, norm, c.hc_eps, c.norm_eps, self.numerics.row_tile)
        return self.project(y_TD, out)

    def slots(self) -> dict[str, Slot]:
        named = super().slots()
        if self.shard.last:
            named.update(self.hc_head.slots("hc_head"))
        if self.dspark is not None:
            named.update(self.dspark.slots("mtp."))
        return named
