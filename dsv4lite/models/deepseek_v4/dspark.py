"""DSpark, the block drafter of refreshed V4 releases (specification of DSpark 3 to 7).

For every token of the main model, the streams after a few target layers become one feature vector, of which each stage stores a kv
row. A draft is one pass over a block of rows: the newest token, then noise tokens. Every row attends to the window before the block
and to the whole block, and row k predicts the token after it. Then, from left to right, the Markov head adds to each row's logits a
bias that depends on the previous token, and the confidence head estimates whether the draft will be accepted.

Kv rows are addressed by position, so rows of rejected draft tokens are overwritten before they are read. The block's own rows are
not stored.

Shape suffixes: S sequences, G rows of a block, T = S G tokens, otherwise those of ``model.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dsv4lite.kernels.hc import hc_head
from dsv4lite.kernels.norm import rms_norm
from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.rope import rope_angles
from dsv4lite.models.deepseek_v4.batch import Batch
from dsv4lite.models.deepseek_v4.config import DSparkConfig, V4Config
from dsv4lite.models.deepseek_v4.model import Block, Hc
from dsv4lite.models.deepseek_v4.streams import Streams
from dsv4lite.models.shard import ModelShard
from dsv4lite.paging import WINDOW_PAGE_TOKENS
from dsv4lite.state.store import LayerCache
from dsv4lite.weights.quant import Matrix, NamedSlots, Numerics, TensorSlot, linear, parameter

Pick = Callable[[Tensor, int], Tensor]
"""Chooses draft token k = 0, 1, … of each sequence, int64 [S], from its logits float32 [S, V]."""


class Drafts(NamedTuple):
    """The draft tokens of a block.

    Attributes:
        token_ids_SG: int64.
        logits_SGV: float32 logits from which they were chosen.
        confidence_SG: float32 in (0, 1), the estimated probability that a token is accepted, given that all earlier ones are.
    """

    token_ids_SG: Tensor
    logits_SGV: Tensor
    confidence_SG: Tensor


class DraftBlock(NamedTuple):
    """Positions and pages of the blocks of some sequences, computed on the device.

    Attributes:
        own: Each row at its own position, without pages, so that no row is stored.
        whole: Each row at the position of its block's last row, from which a window that is longer by a block sees what all rows
            of the block attend to.
        angles: cos and sin of the rows, float32 [T, rope / 2].
    """

    own: Paging
    whole: Paging
    angles: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, next_S: Tensor, window_SP: Tensor, window_first_S: Tensor, rows: int, frequencies: Tensor) -> DraftBlock:
        """Place a block of ``rows`` rows at the end of each sequence.

        Args:
            next_S: int64, position of the newest token, whose rows are not stored yet; negative for padding.
            window_SP: int32, sliding-window pages of 64 positions each.
            window_first_S: int32, index of the first page's 64 positions; the pages must reach ``window`` positions back.
            rows: Rows of a block.
            frequencies: float32 [rope / 2], rotary frequencies of layers without compression.
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
            state_copy_S=nothing_S,
            grow_SP=nothing_S[:, None],
            window_SP=torch.full((count, 2), -1, dtype=torch.int32, device=device),
            window_first_S=first_S // WINDOW_PAGE_TOKENS,
            width=rows,
        )
        last_T = position_SG[:, -1].repeat_interleave(rows)
        whole = replace(own, positions_T=last_T, window_SP=window_SP, window_first_S=window_first_S)
        return cls(own, whole, rope_angles(own.positions_T.long(), frequencies))


class DSparkDrafter(nn.Module):
    """Sliding-window blocks (stages) and two small heads; embedding and output head are the main model's.

    tp shards the blocks like hidden layers; the small heads are replicated.
    """

    def __init__(self, config: V4Config, dspark: DSparkConfig, numerics: Numerics, shard: ModelShard) -> None:
        super().__init__()
        d, rank = config.hidden_size, dspark.markov_rank
        self.config, self.numerics, self.block = config, numerics, dspark.block
        self.targets, self.noise_token_id = dspark.targets, dspark.noise_token_id
        self.main_proj = Matrix(d, d * len(dspark.targets), numerics=numerics, rounds_input=True, fp8=True)
        self.main_norm, self.norm = parameter(d, numerics=numerics), parameter(d, numerics=numerics)
        self.blocks = tuple(Block(config, numerics, shard, config.num_hidden_layers + i) for i in range(dspark.stages))
        self.stages = nn.ModuleList(self.blocks)
        self.hc_head = Hc(config, numerics, head=True)
        self.markov_w1 = parameter(config.vocab_size, rank, numerics=numerics, dtype=numerics.dtype)
        self.markov_w2 = Matrix(config.vocab_size, rank, numerics=numerics)
        self.confidence = parameter(1, d + rank, numerics=numerics)

    def store_kv(self, taps_TK: Tensor, batch: Batch, caches: Sequence[LayerCache]) -> None:
        """Store the kv rows of a step's tokens, given the mean streams after each target layer, side by side."""
        x_TD = rms_norm(linear(taps_TK, self.main_proj), self.main_norm, self.config.norm_eps)
        for stage, cache in zip(self.blocks, caches, strict=True):
            stage.attn.store_kv(x_TD, None, batch, cache)

    def forward(
        self,
        anchors_S: Tensor,
        where: DraftBlock,
        caches: Sequence[LayerCache],
        embed: Callable[[Tensor], Tensor],
        project: Callable[[Tensor], Tensor],
        pick: Pick = lambda logits_SV, place: logits_SV.argmax(-1),
        most_sequences: int | None = None,
    ) -> Drafts:
        """Draft the tokens after each sequence's newest token.

        Args:
            anchors_S: int64, the newest tokens.
            where: Their positions; the rows before them are in ``caches``.
            caches: One for each stage.
            embed, project: The main model's ``embedded`` and ``project``.
            pick: Chooses each draft token; the default takes the most probable one.
            most_sequences: Largest number of sequences on any replica that shares the experts; ``None`` if it is not known.
        """
        most_tokens = None if most_sequences is None else most_sequences * self.block
        h_SGD = self._backbone(anchors_S, where, caches, embed, most_tokens)
        sequences, rows = h_SGD.shape[:2]
        normed_TD = rms_norm(h_SGD.flatten(0, 1), self.norm, self.config.norm_eps)
        logits_SGV = project(normed_TD).view(sequences, rows, -1)
        drafts, embeddings, previous_S = [], [], anchors_S
        for place in range(rows):
            embeddings.append(self.markov_w1[previous_S])
            logits_SGV[:, place] += linear(embeddings[-1], self.markov_w2, torch.float32)
            previous_S = pick(logits_SGV[:, place], place)
            drafts.append(previous_S)
        features = torch.cat([h_SGD, torch.stack(embeddings, 1)], -1).float()
        confidence_SG = torch.sigmoid((features * self.confidence[0]).sum(-1))
        return Drafts(torch.stack(drafts, 1), logits_SGV, confidence_SG)

    def _backbone(
        self,
        anchors_S: Tensor,
        where: DraftBlock,
        caches: Sequence[LayerCache],
        embed: Callable[[Tensor], Tensor],
        most_tokens: int | None,
    ) -> Tensor:
        """Return the collapsed streams after the last stage, before the final norm, [S, G, D]."""
        c = self.config
        ids_SG = anchors_S[:, None].repeat(1, self.block)
        ids_SG[:, 1:] = self.noise_token_id
        batch = Batch(
            token_ids_T=ids_SG.flatten(),
            paging=where.own,
            max_tokens=c.max_positions,
            rope_T=where.angles,
            compress_rope_T=where.angles,
            group_rope_T={},
            most_unselected=c.max_positions,
            seen=where.whole,
            ahead=self.block,
            most_tokens=most_tokens,
        )
        streams = Streams(embed(batch.token_ids_T)[:, None].repeat(1, c.streams, 1), c, self.numerics)
        for stage, cache in zip(self.blocks, caches, strict=True):
            stage(streams, batch, cache)
        h_TD = hc_head(streams.final(), self.hc_head.weights, None, c.hc_eps, c.norm_eps, self.numerics.row_tile)
        return h_TD.view(len(anchors_S), self.block, -1)

    def slots(self, prefix: str) -> NamedSlots:
        """Name the tensors, stage by stage; the official names count the heads to the last stage."""
        yield prefix + "0.main_proj.weight", self.main_proj.whole()
        yield prefix + "0.main_norm.weight", TensorSlot(self.main_norm)
        for i, stage in enumerate(self.blocks):
            yield from stage.slots(f"{prefix}{i}.")
        last = f"{prefix}{len(self.stages) - 1}."
        yield last + "norm.weight", TensorSlot(self.norm)
        yield from self.hc_head.slots(last + "hc_head")
        yield last + "markov_head.markov_w1.weight", TensorSlot(self.markov_w1)
        yield last + "markov_head.markov_w2.weight", self.markov_w2.whole()
        yield last + "confidence_head.proj.weight", TensorSlot(self.confidence)
