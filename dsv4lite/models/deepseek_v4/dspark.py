"""DSpark, the block drafter of refreshed V4 releases (specification of DSpark 3 to 7).

For every token of the main model the streams behind three late layers become one feature vector, and of it each stage keeps a kv
row. A draft is one pass over a block: the newest token and noise in place of those to come. Every row of the block attends to the
window before it and to all of the block; row k foretells the token after it. A bias that each token gives to the next one is then
added from left to right, and another head estimates whether the drafts will hold.

Kv rows are addressed by position: the rows of rejected drafts are overwritten before they are read. The block's own rows are not
stored.

Shape suffixes: S sequences, G rows of a block, T = S G tokens, otherwise those of ``deepseek_v4.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dsv4lite.kernels.attention import paged_attention
from dsv4lite.kernels.hc import hc_head
from dsv4lite.kernels.latent_norm_store import latent_norms
from dsv4lite.kernels.norm import rms_norm
from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.qk_norm_rope import HeadInputs, head_norms
from dsv4lite.kernels.rope import rope_angles
from dsv4lite.models.deepseek_v4.batch import Batch
from dsv4lite.models.deepseek_v4.config import DSparkConfig, V4Config
from dsv4lite.models.deepseek_v4.model import Attention, Block, Hc
from dsv4lite.models.deepseek_v4.streams import Streams
from dsv4lite.models.share import Share
from dsv4lite.paging import WINDOW_PAGE_TOKENS
from dsv4lite.state.store import LayerCache
from dsv4lite.weights.quant import Matrix, NamedSlots, Numerics, Rounded, TensorSlot, linear, parameter, rounded_linear

Pick = Callable[[Tensor, int], Tensor]
"""Chooses drafts, int64 [S], from the logits float32 [S, V] of place k = 0, 1, … of the block."""


def _best(logits_SV: Tensor, place: int) -> Tensor:
    return logits_SV.argmax(-1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drafts:
    """What a block foretells.

    Attributes:
        token_ids_SG: int64.
        logits_SGV: float32, of which they were chosen.
        confidence_SG: float32 in (0, 1), the chance that a draft holds if those before it do.
    """

    token_ids_SG: Tensor
    logits_SGV: Tensor
    confidence_SG: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftBlock:
    """Where the blocks of some sequences stand; all of it is worked out on the device.

    Attributes:
        own: The rows at their positions, without pages: they are stored nowhere.
        whole: The rows all at the last one's position: attention from there, as many rows farther, is that of a block.
        angles: cos and sin of the rows, float32 [T, rope / 2].
    """

    own: Paging
    whole: Paging
    angles: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, next_S: Tensor, window_SP: Tensor, window_first_S: Tensor, rows: int, frequencies: Tensor) -> DraftBlock:
        """Place a block of ``rows`` behind each sequence.

        Args:
            next_S: int64, position of the newest token, which did not run yet; negative for padding.
            window_SP: int32, pages of 64 positions each.
            window_first_S: int32, which 64 positions the first one holds; the row ``window`` places back must be in a page.
            rows: Of a block.
            frequencies: float32 [rope / 2], of layers without compression.
        """
        count, device = len(next_S), next_S.device
        first_S = next_S.int()
        ahead_SG = first_S[:, None] + torch.arange(rows, dtype=torch.int32, device=device)
        position_SG = torch.where(first_S[:, None] < 0, -1, ahead_SG)
        every_S = torch.arange(count, dtype=torch.int32, device=device)
        nothing_S = torch.zeros_like(first_S)
        own = Paging(
            positions_T=position_SG.flatten(),
            sequence_T=every_S.repeat_interleave(rows),
            slots_S=nothing_S,
            first_S=first_S,
            rows_S=every_S * rows,
            lens_S=torch.full_like(first_S, rows),
            drafts_S=nothing_S,
            carry_S=nothing_S,
            grow_SP=nothing_S[:, None],
            window_SP=torch.full((count, 2), -1, dtype=torch.int32, device=device),
            window_first_S=first_S // WINDOW_PAGE_TOKENS,
            singles=False,
        )
        whole = Paging(
            positions_T=position_SG[:, -1].repeat_interleave(rows),
            sequence_T=own.sequence_T,
            slots_S=nothing_S,
            first_S=first_S,
            rows_S=own.rows_S,
            lens_S=own.lens_S,
            drafts_S=nothing_S,
            carry_S=nothing_S,
            grow_SP=own.grow_SP,
            window_SP=window_SP,
            window_first_S=window_first_S,
            singles=False,
        )
        return cls(own=own, whole=whole, angles=rope_angles(own.positions_T.long(), frequencies))


class DSparkDrafter(nn.Module):
    """Three sliding-window blocks and two small heads; embedding and output head are the main model's.

    Ranks of tp share the blocks as they share layers, and each has all of the small heads.
    """

    def __init__(self, config: V4Config, dspark: DSparkConfig, numerics: Numerics, share: Share) -> None:
        super().__init__()
        d, rank = config.hidden_size, dspark.markov_rank
        self.config, self.numerics, self.block = config, numerics, dspark.block
        self.targets, self.noise_token_id = dspark.targets, dspark.noise_token_id
        self.main_proj = Matrix(d, d * len(dspark.targets), numerics=numerics, rounds_input=True, fp8=True)
        self.main_norm, self.norm = parameter(d, numerics=numerics), parameter(d, numerics=numerics)
        self.stages = nn.ModuleList(Block(config, numerics, share, config.num_hidden_layers + i) for i in range(dspark.stages))
        self.hc_head = Hc(config, numerics, head=True)
        self.markov_w1 = parameter(config.vocab_size, rank, numerics=numerics, dtype=numerics.dtype)
        self.markov_w2 = Matrix(config.vocab_size, rank, numerics=numerics)
        self.confidence = parameter(1, d + rank, numerics=numerics)

    def feed(self, taps_TK: Tensor, batch: Batch, caches: Sequence[LayerCache]) -> None:
        """Store the kv rows of a step's tokens.

        Args:
            taps_TK: Averaged streams behind the target layers, side by side.
            batch: The step.
            caches: One for each stage.
        """
        x_TD = rms_norm(linear(taps_TK, self.main_proj), self.main_norm, self.config.norm_eps)
        for stage, cache in zip(self.stages, caches, strict=True):
            assert isinstance(stage, Block)
            stage.attn.feed(x_TD, None, batch, cache)

    def forward(
        self,
        anchors_S: Tensor,
        where: DraftBlock,
        caches: Sequence[LayerCache],
        embed: Callable[[Tensor], Tensor],
        project: Callable[[Tensor], Tensor],
        pick: Pick = _best,
        most_sequences: int | None = None,
    ) -> Drafts:
        """Draft behind each sequence's newest token.

        Args:
            anchors_S: int64, that token.
            where: Its place; the rows before it are in ``caches``.
            caches: One for each stage.
            embed, project: The main model's ``embedded`` and ``project``.
            pick: Chooses a draft from its logits; by default the best one.
            most_sequences: Where several replicas share experts, those of the one with the most; ``None`` if it is not known.
        """
        most_tokens = None if most_sequences is None else most_sequences * self.block
        h_SGD = self._backbone(anchors_S, where, caches, embed, most_tokens)
        sequences, rows = h_SGD.shape[:2]
        normed_TD = rms_norm(h_SGD.flatten(0, 1), self.norm, self.config.norm_eps)
        logits_SGV = project(normed_TD).view(sequences, rows, -1)
        drafts, before, previous_S = [], [], anchors_S
        for place in range(rows):
            before.append(self.markov_w1[previous_S])
            logits_SGV[:, place] += linear(before[-1], self.markov_w2, torch.float32)
            previous_S = pick(logits_SGV[:, place], place)
            drafts.append(previous_S)
        features = torch.cat([h_SGD, torch.stack(before, 1)], -1).float()
        confidence_SG = torch.sigmoid((features * self.confidence[0]).sum(-1))
        return Drafts(token_ids_SG=torch.stack(drafts, 1), logits_SGV=logits_SGV, confidence_SG=confidence_SG)

    def take_part(self, most_sequences: int) -> None:
        """Let this rank's experts work on other ranks' blocks, with none of its own."""
        for stage in self.stages:
            assert isinstance(stage, Block)
            stage.ffn.take_part(most_sequences * self.block)

    def _backbone(
        self,
        anchors_S: Tensor,
        where: DraftBlock,
        caches: Sequence[LayerCache],
        embed: Callable[[Tensor], Tensor],
        most_tokens: int | None,
    ) -> Tensor:
        """Return what the last stage makes of the blocks, before the norm, [S, G, D]."""
        c = self.config
        ids_SG = anchors_S[:, None].repeat(1, self.block)
        ids_SG[:, 1:] = self.noise_token_id
        ids_T = ids_SG.flatten()
        value_TND = embed(ids_T)[:, None].repeat(1, c.streams, 1)
        streams = Streams(value_TND, c, self.numerics)
        for stage, cache in zip(self.stages, caches, strict=True):
            assert isinstance(stage, Block)
            x_TD, x_rounded = streams.enter(stage.hc_attn.weights, stage.attn_norm)
            streams.leave(self._attend(stage.attn, x_TD, x_rounded, where, cache))
            x_TD, x_rounded = streams.enter(stage.hc_ffn.weights, stage.ffn_norm)
            streams.leave(stage.ffn(x_TD, ids_T, None, x_rounded, where.own.positions_T, most_tokens))
        h_TD = hc_head(streams.final(), self.hc_head.weights, eps=c.hc_eps, norm_eps=c.norm_eps, row_tile=self.numerics.row_tile)
        return h_TD.view(len(anchors_S), self.block, -1)

    def _attend(self, attn: Attention, x_TD: Tensor, rounded: Rounded | None, where: DraftBlock, cache: LayerCache) -> Tensor:
        """Return a stage's attention [T, D]: all rows of a block see the window before it and each other."""
        c, angles = self.config, where.angles
        norms = (attn.q_norm, attn.kv_norm, *angles, c.norm_eps)
        latent = linear(x_TD, attn.wq_a_wkv, rounded=rounded)
        qr_TR, qr_scales, fresh = latent_norms(latent, *norms, cache.stores["window"], where.own, self.block)
        query = rounded_linear(qr_TR, qr_scales, attn.wq_b, x_TD.dtype)
        q_THC, _, norm_eps = head_norms(HeadInputs(query, attn.heads, c.head_dim, 0, 0, *angles, c.norm_eps))
        o_THC = paged_attention(
            q_THC,
            fresh,
            cache.stores["window"],
            None,
            where.whole,
            attn.attn_sink,
            c.head_dim**-0.5,
            *angles,
            ratio=0,
            window_size=c.window + self.block,
            norm_eps=norm_eps,
            any_order=not self.numerics.deterministic,
        )
        return attn.project_out(o_THC)

    def slots(self, prefix: str) -> NamedSlots:
        """Name the tensors, stage by stage; the heads are with the last one."""
        yield prefix + "0.main_proj.weight", self.main_proj.whole()
        yield prefix + "0.main_norm.weight", TensorSlot(self.main_norm)
        for i, stage in enumerate(self.stages):
            assert isinstance(stage, Block)
            yield from stage.slots(f"{prefix}{i}.")
        last = f"{prefix}{len(self.stages) - 1}."
        yield last + "norm.weight", TensorSlot(self.norm)
        yield from self.hc_head.slots(last + "hc_head")
        yield last + "markov_head.markov_w1.weight", TensorSlot(self.markov_w1)
        yield last + "markov_head.markov_w2.weight", self.markov_w2.whole()
        yield last + "confidence_head.proj.weight", TensorSlot(self.confidence)
