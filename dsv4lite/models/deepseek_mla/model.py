"""DeepSeek's MLA models in the reports' order: latent attention, token selection, mixture of experts, multi-token prediction.

V2-Lite, V2, V3, R1, V3.1, Kimi K2, V3.2 and GLM-5 (``config.py``). Reads beside ``deepseek_v4/model.py``.

Shape suffixes: T tokens, D model, H heads, C head channels, R low rank, L latent, E experts, K experts per token or selected
tokens, I expert width, V vocabulary.  Names are those of the official code.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from dsv4lite.kernels.index_keys import IndexKeyInputs, index_queries, store_index_keys
from dsv4lite.kernels.indexer import IndexInputs, choose_paged
from dsv4lite.kernels.latent_attention import CAPTURED_TOKENS, LatentAttentionInputs, captured_rows, latent_attention, splits_of
from dsv4lite.kernels.latent_rows import LatentRowInputs, store_latent_rows
from dsv4lite.kernels.norm import rms_norm
from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.rope import rope_angles, rope_frequencies
from dsv4lite.models.choices import experts_of, selection_of
from dsv4lite.models.decoder import Decoder
from dsv4lite.models.deepseek_mla.batch import Batch
from dsv4lite.models.deepseek_mla.config import MlaConfig
from dsv4lite.models.deepseek_mla.state import state_spec
from dsv4lite.models.deepseek_mla.tensors import MLA_TENSORS
from dsv4lite.models.keys import Yarn
from dsv4lite.models.moe import MoE, SharedExpert, Tokens
from dsv4lite.models.partial_sums import all_reduce_parts
from dsv4lite.models.shard import ModelShard
from dsv4lite.paging import PAGE_TOKENS
from dsv4lite.parallel.experts import DispatcherFactory
from dsv4lite.parallel.mesh import Mesh
from dsv4lite.state.spec import StateSpec
from dsv4lite.state.store import LayerCache
from dsv4lite.weights.quant import Matrix, NamedSlots, Numerics, TensorSlot, linear, parameter

_LATENT_EPS = 1e-6  # of the latents' norms: official code and transformers ignore ``rms_norm_eps`` there
_FEW_TOKENS = 128  # of a step in which the up-projected form saves nothing
_CAPTURED_PAIRS = 70_000_000  # of a captured step in the absorbed form, all heads together: 512 tokens after 8,000 with 16 heads


class Indexer(nn.Module):
    """Selects the tokens that each token attends to (DSA; MLA specification 3.10); replicated on every rank."""

    def __init__(self, config: MlaConfig, numerics: Numerics, layer: int) -> None:
        super().__init__()
        c = self.config = config
        self.layer = layer
        self.any_order = not numerics.deterministic
        dense = partial(Matrix, numerics=numerics, rounds_input=True, fp8=True)
        self.wq_b = dense(c.index_heads * c.index_dim, c.q_lora_rank)
        self.wk = dense(c.index_dim, c.hidden_size)
        self.k_norm, self.k_norm_bias = parameter(c.index_dim, numerics=numerics), parameter(c.index_dim, numerics=numerics)
        self.weights_proj = Matrix(c.index_heads, c.hidden_size, numerics=numerics)
        self._scale = float((c.index_dim * c.index_heads) ** -0.5)

    def forward(self, x_TD: Tensor, qr_TR: Tensor, batch: Batch, cache: LayerCache) -> Tensor | None:
        """Return the positions that each token attends to, int32 [T, K]; ``None`` if no sequence is longer than K tokens."""
        c, keys = self.config, cache.stores["keys"]
        if batch.max_tokens <= c.most_unselected:
            return None
        query_THC = linear(qr_TR, self.wq_b).unflatten(1, (c.index_heads, c.index_dim))
        iq_THC = index_queries(query_THC, *batch.rope_T, keys, interleaved=c.index_interleaved)
        weights_TH = linear(x_TD, self.weights_proj, torch.float32)
        limits = (c.index_topk, batch.max_tokens, self._scale, self.any_order)
        selected_TK = choose_paged(IndexInputs(iq_THC, weights_TH, keys, batch.paging, *limits, float32=True))
        return selection_of(selected_TK, self.layer, batch.given, batch.chosen)

    def store_keys(self, x_TD: Tensor, batch: Batch, cache: LayerCache) -> None:
        """Store the index keys of a step's tokens."""
        norm, where = (self.k_norm, self.k_norm_bias, *batch.rope_T), (cache.stores["keys"], batch.paging)
        store_index_keys(IndexKeyInputs(linear(x_TD, self.wk), *norm, self.config.index_interleaved, *where))

    def slots(self, prefix: str) -> NamedSlots:
        for name in ("wq_b", "wk", "weights_proj"):
            yield f"{prefix}{name}.weight", getattr(self, name).whole()
        yield prefix + "k_norm.weight", TensorSlot(self.k_norm)
        yield prefix + "k_norm.bias", TensorSlot(self.k_norm_bias)


class Attention(nn.Module):
    """Multi-head latent attention to all previous tokens, or to those that the indexer selects (MLA specification 3.3 to 3.7)."""

    def __init__(self, config: MlaConfig, numerics: Numerics, shard: ModelShard, layer: int) -> None:
        super().__init__()
        c = self.config = config
        self.numerics, self.shard = numerics, shard
        heads = self.heads = shard.part(c.num_attention_heads)
        dense, rank = partial(Matrix, numerics=numerics, rounds_input=True, fp8=True), c.q_lora_rank
        queries = heads * (c.nope_dim + c.rope_dim)
        # Row blocks: queries, or the query latent; then the latent of keys and values.
        self.query_rows = rank or queries
        self.wq_wkv_a = dense(self.query_rows + c.row_width, c.hidden_size, boundaries=[self.query_rows])
        self.q_norm = parameter(rank, numerics=numerics) if rank else None
        self.wq_b = dense(queries, rank) if rank else None
        self.kv_norm = parameter(c.kv_lora_rank, numerics=numerics)
        # W_UK and W_UV. Both forms of attention read them unquantized, so they are dequantized at load.
        self.wkv_b = Matrix(heads, c.nope_dim + c.value_dim, c.kv_lora_rank, numerics=numerics)
        self.wo = dense(c.hidden_size, heads * c.value_dim)
        self.indexer = Indexer(c, numerics, layer) if c.selects else None

    def forward(self, x_TD: Tensor, batch: Batch, cache: LayerCache) -> Tensor:
        """Return the sub-layer's output [T, D]."""
        c = self.config
        query_TK, qr_TR = self.store_kv(x_TD, batch, cache)
        if qr_TR is not None and self.wq_b is not None:
            query_TK = linear(qr_TR, self.wq_b)
        selected_TK = None if self.indexer is None or qr_TR is None else self.indexer(x_TD, qr_TR, batch, cache)
        rows = (cache.stores["latent"], batch.paging, self.wkv_b.weight, c.rope_dim, c.attention_scale)
        q_THC, (cos, sin) = query_TK.unflatten(1, (self.heads, -1)), batch.rope_T
        inputs = LatentAttentionInputs(q_THC, *rows, selected_TK, not self.numerics.deterministic, cos=cos, sin=sin)
        o_THC = latent_attention(inputs)
        output = linear(o_THC.flatten(1), self.wo, self.shard.partial_dtype(x_TD.dtype))
        return all_reduce_parts(self.shard.mesh.tp, output, x_TD.dtype)

    def store_kv(self, x_TD: Tensor, batch: Batch, cache: LayerCache) -> tuple[Tensor, Tensor | None]:
        """Store the latent rows and index keys of a step's tokens.

        Returns:
            Queries [T, H C] before their rotation, and ``None``. With a query latent: that latent [T, R], and the same normalised.
        """
        if self.indexer is not None:
            self.indexer.store_keys(x_TD, batch, cache)
        projected_TK = linear(x_TD, self.wq_wkv_a)
        latent_TK = projected_TK[:, self.query_rows :] if self.wq_b is None else projected_TK
        norms = (self.q_norm, self.kv_norm, *batch.rope_T, _LATENT_EPS)
        where = (cache.stores["latent"], batch.paging)
        return projected_TK[:, : self.query_rows], store_latent_rows(LatentRowInputs(latent_TK, *norms, *where))

    def slots(self, prefix: str) -> NamedSlots:
        yield prefix + ("wq" if self.wq_b is None else "wq_a") + ".weight", self.wq_wkv_a.rows(0, self.query_rows)
        if self.q_norm is not None and self.wq_b is not None:
            yield prefix + "q_norm.weight", TensorSlot(self.q_norm)
            yield prefix + "wq_b.weight", self.wq_b.whole()
        yield prefix + "wkv_a.weight", self.wq_wkv_a.rows(self.query_rows, self.query_rows + self.config.row_width)
        yield prefix + "kv_norm.weight", TensorSlot(self.kv_norm)
        yield prefix + "wkv_b.weight", self.wkv_b.whole()
        yield prefix + "wo.weight", self.wo.whole()
        if self.indexer is not None:
            yield from self.indexer.slots(prefix + "indexer.")


class Dense(nn.Module):
    """The SwiGLU of a dense layer, one without experts."""

    def __init__(self, config: MlaConfig, numerics: Numerics, shard: ModelShard) -> None:
        super().__init__()
        self.shard = shard
        self.mlp = SharedExpert(config, numerics, shard.part(config.dense_width))

    def forward(self, tokens: Tokens) -> Tensor:
        """Return [T, D]; the recorded experts of its tokens are -1."""
        if tokens.routed_TK is not None:
            tokens.routed_TK.fill_(-1)
        dtype = tokens.x_TD.dtype
        output = self.mlp(linear(tokens.x_TD, self.mlp.w13), self.shard.partial_dtype(dtype))
        return all_reduce_parts(self.shard.mesh.tp, output, dtype)

    def slots(self, prefix: str) -> NamedSlots:
        yield from self.mlp.slots(prefix)


class Block(nn.Module):
    """Attention, then experts or a dense SwiGLU; each is added to the residual (MLA specification 3.1)."""

    def __init__(self, config: MlaConfig, numerics: Numerics, shard: ModelShard, layer: int) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.attn_norm = parameter(config.hidden_size, numerics=numerics)
        self.ffn_norm = parameter(config.hidden_size, numerics=numerics)
        self.attn = Attention(config, numerics, shard, layer)
        experts = config.has_experts(layer)
        self.ffn = MoE(config, numerics, shard, hashed=False) if experts else Dense(config, numerics, shard)

    def forward(
        self,
        x_TD: Tensor,
        batch: Batch,
        cache: LayerCache,
        routed_TK: Tensor | None = None,
        given_TK: Tensor | None = None,
    ) -> Tensor:
        x_TD = x_TD + self.attn(rms_norm(x_TD, self.attn_norm, self.eps), batch, cache)
        h_TD = rms_norm(x_TD, self.ffn_norm, self.eps)
        tokens = Tokens(h_TD, batch.token_ids_T, routed_TK, None, batch.paging.positions_T, batch.most_tokens, given_TK)
        output_TD: Tensor = self.ffn(tokens)
        return x_TD + output_TD

    def slots(self, prefix: str) -> NamedSlots:
        yield prefix + "attn_norm.weight", TensorSlot(self.attn_norm)
        yield prefix + "ffn_norm.weight", TensorSlot(self.ffn_norm)
        yield from self.attn.slots(prefix + "attn.")
        yield from self.ffn.slots(prefix + "ffn.")


class Mtp(nn.Module):
    """Multi-token prediction: a block that reads the normalised final hidden state and the next token (3.9)."""

    def __init__(self, config: MlaConfig, numerics: Numerics, shard: ModelShard, layer: int) -> None:
        super().__init__()
        d = config.hidden_size
        self.eps = config.norm_eps
        self.enorm, self.hnorm, self.norm = (parameter(d, numerics=numerics) for _ in range(3))
        self.eh_proj = Matrix(d, 2 * d, numerics=numerics)
        self.block = Block(config, numerics, shard, layer)

    def mix(self, hidden_TD: Tensor, embedded_TD: Tensor) -> Tensor:
        """Return the block's input [T, D] from the normalised hidden state and the embedding of the next token."""
        parts = [rms_norm(embedded_TD, self.enorm, self.eps), rms_norm(hidden_TD, self.hnorm, self.eps)]
        return linear(torch.cat(parts, 1), self.eh_proj)

    def slots(self, prefix: str) -> NamedSlots:
        yield from self.block.slots(prefix)
        for name in ("enorm", "hnorm", "norm"):
            yield f"{prefix}{name}.weight", TensorSlot(getattr(self, name))
        yield prefix + "eh_proj.weight", self.eh_proj.whole()


class DeepseekMla(Decoder):
    """The whole model, or one rank's shard of it; see ``models.family.Model``, and ``ModelSource.build`` for the arguments.

    Parameters are allocated, not initialised: fill them through ``slots()``.

    Raises:
        ConfigError: The mesh's layout does not divide the model.
    """

    passes_taps = False

    def __init__(
        self,
        config: MlaConfig,
        numerics: Numerics,
        mesh: Mesh | None = None,
        *,
        dispatcher: str | DispatcherFactory = "auto",
        redundant_experts: int | None = None,
        with_mtp: bool = False,
    ) -> None:
        shard = ModelShard.of(config, MLA_TENSORS, mesh or Mesh(), dispatcher, redundant_experts)
        drafts = with_mtp and shard.last and config.num_mtp_layers > 0
        super().__init__(config, numerics, shard, drafts=drafts)
        c = self.config = config
        self.blocks = tuple(Block(c, numerics, shard, i) for i in shard.layers)
        self.layers = nn.ModuleList(self.blocks)
        last, drafting = c.num_hidden_layers + (c.num_mtp_layers if drafts else 0), numerics.of_drafter
        self.mtps = tuple(Mtp(c, drafting, shard, layer) for layer in range(c.num_hidden_layers, last))
        self.mtp = nn.ModuleList(self.mtps)
        yarn = c.yarn or Yarn(factor=1.0, original_positions=c.max_positions)
        self.frequencies = rope_frequencies(
            c.rope_dim,
            c.rope_theta,
            factor=yarn.factor,
            original=yarn.original_positions,
            beta_fast=yarn.beta_fast,
            beta_slow=yarn.beta_slow,
        ).to(numerics.device)

    @property
    def hidden_shape(self) -> tuple[int, ...]:
        """Shape of one token's residual, [D]."""
        return (self.config.hidden_size,)

    @property
    def short_lengths(self) -> tuple[int, ...]:
        """The longest sequence for which the indexer does not run: all its tokens are attended."""
        return (self.config.most_unselected,) if self.config.selects else ()

    def captures(self, tokens: int, pairs: int, pages: int) -> bool:
        """Return whether a step with prompts may be replayed; see ``models.family.Model``.

        A captured step up-projects a fixed number of rows. Prompts that do not fit cost more in the absorbed form than in the
        other one, but up to a number of pairs less than the launches of an eager step.
        """
        c, heads, rows = self.config, self.blocks[0].attn.heads, 0
        if tokens >= CAPTURED_TOKENS:
            rows = captured_rows(tokens, heads, c.nope_dim + c.value_dim, self.numerics.dtype.itemsize)
        cheap = tokens <= _FEW_TOKENS or pairs * heads <= _CAPTURED_PAIRS or pages * PAGE_TOKENS <= rows
        return self.numerics.deterministic or cheap

    def spec_of(self, *, drafter: bool) -> StateSpec:
        return state_spec(self.config, self.numerics, self.shard, drafter=drafter)

    def batch(self, token_ids_T: Tensor, paging: Paging, *, max_tokens: int) -> Batch:
        splits = 1 if self.numerics.deterministic else splits_of(len(token_ids_T), self.shard.part(self.config.num_attention_heads))
        paging = replace(paging, splits=splits)
        cos, sin = rope_angles(paging.positions_T, self.frequencies)
        scale = self.config.rotary_scale
        return Batch(token_ids_T=token_ids_T, paging=paging, max_tokens=max_tokens, rope_T=(cos * scale, sin * scale))

    def forward(self, batch: Batch, caches: Sequence[LayerCache], hidden_TD: Tensor | None = None) -> Tensor:
        """Run a step's tokens through the layers; return the residual [T, D], on the last stage normalised for the head.

        Args:
            batch: The tokens.
            caches: State of these layers; the drafter's state may follow.
            hidden_TD: Output of the previous pipeline stage; ``None`` on the first one.
        """
        x_TD = self.embedded(batch.token_ids_T) if hidden_TD is None else hidden_TD
        for i, (layer, block) in enumerate(zip(self.shard.layers, self.layers, strict=True)):
            if layer in self.skipped:
                continue
            x_TD = block(x_TD, batch, caches[i], experts_of(batch.chosen, layer), experts_of(batch.given, layer))
        return rms_norm(x_TD, self.norm, self.config.norm_eps) if self.shard.last else x_TD

    def kind_of(self, layer: int) -> Hashable:
        return self.config.has_experts(layer)

    def logits(self, hidden_TD: Tensor, *, out: Tensor | None = None) -> Tensor:
        return self.project(hidden_TD, out)

    def mtp_forward(self, hidden_TD: Tensor, batch: Batch, cache: LayerCache) -> Tensor:
        """Run the MTP block; return its hidden state [T, D], normalised for the head.

        Args:
            hidden_TD: Output of ``forward``, or of this block when it drafts further tokens.
            batch: The same positions, with the *next* token at each.
            cache: The block's own rows.
        """
        mtp = self.mtps[0]
        mixed_TD = mtp.mix(hidden_TD, self.embedded(batch.token_ids_T))
        return rms_norm(mtp.block(mixed_TD, batch, cache), mtp.norm, self.config.norm_eps)

    def mtp_store_kv(self, hidden_TD: Tensor, batch: Batch, cache: LayerCache) -> None:
        """Store the MTP block's kv rows of a step's tokens; arguments are those of ``mtp_forward``."""
        mtp = self.mtps[0]
        mixed_TD, block = mtp.mix(hidden_TD, self.embedded(batch.token_ids_T)), mtp.block
        block.attn.store_kv(rms_norm(mixed_TD, block.attn_norm, block.eps), batch, cache)

    def mtp_logits(self, hidden_TD: Tensor) -> Tensor:
        """Return float32 logits [T, V] of the token after the next, from the output of ``mtp_forward``."""
        return self.logits(hidden_TD)
