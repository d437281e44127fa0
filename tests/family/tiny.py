"""A second family, for tests: a plain transformer, with nothing of what only V4 has.

RMSNorm, rotary multi-head attention, SwiGLU, one residual stream. The cache is one row per token and layer, its keys and values,
kept with the sequence: no window, no slots, no experts, no drafter. The last layer has no keys and values, and reads those of the
layer before.

Shape suffixes: T tokens, L cached tokens, H heads, C head channels, D model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dsv4lite.errors import ConfigError
from dsv4lite.kernels.norm import rms_norm
from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.rope import rope, rope_angles, rope_frequencies
from dsv4lite.kernels.rows import RowStore, UnquantizedRow
from dsv4lite.models.batch import Batch
from dsv4lite.models.config import ModelConfig, PassBytes
from dsv4lite.models.family import Family
from dsv4lite.models.partial_sums import embedding, gather_columns
from dsv4lite.models.shard import ModelShard
from dsv4lite.paging import PAGE_TOKENS
from dsv4lite.parallel.mesh import Mesh
from dsv4lite.parallel.shard import Replicate, Split
from dsv4lite.state.spec import SharedStore, StateSpec, StoreSpec
from dsv4lite.state.store import LayerCache
from dsv4lite.weights.names import NameTables
from dsv4lite.weights.quant import Matrix, Numerics, Slot, TensorSlot, linear, parameter
from dsv4lite.weights.tensors import Tensors, TensorSpec
from tests.e2e.engines import write_tokenizer
from tests.tiny import write_checkpoint

EPS = 1e-6
CONFIG: Mapping[str, Any] = {
    "model_type": "tiny",
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyConfig(ModelConfig):
    heads: int
    inner: int
    theta: float

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.heads


def read_config(raw: Mapping[str, Any]) -> TinyConfig:
    try:
        return TinyConfig(
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            num_hidden_layers=raw["num_hidden_layers"],
            heads=raw["num_attention_heads"],
            inner=raw["intermediate_size"],
            theta=raw["rope_theta"],
            max_positions=raw["max_position_embeddings"],
            eos_token_id=raw["eos_token_id"],
        )
    except KeyError as error:
        raise ConfigError(f"config.json lacks {error}") from error


def tensor_specs(config: TinyConfig) -> dict[str, TensorSpec]:
    d, inner = config.hidden_size, config.inner
    plain, matrix = partial(TensorSpec, kind="bf16"), partial(TensorSpec, kind="dense")
    specs = {name: plain((config.vocab_size, d)) for name in ("embed.weight", "head.weight")} | {"norm.weight": plain((d,))}
    for i in range(config.num_hidden_layers):
        specs |= {f"layers.{i}.{name}.weight": plain((d,)) for name in ("attn_norm", "ffn_norm")}
        last = i == config.num_hidden_layers - 1
        specs |= {f"layers.{i}.attn.{name}.weight": matrix((d, d)) for name in ("wq", "wo", *(() if last else ("wk", "wv")))}
        specs |= {f"layers.{i}.ffn.{name}.weight": matrix((inner, d)) for name in ("w1", "w3")}
        specs |= {f"layers.{i}.ffn.w2.weight": matrix((d, inner))}
    return specs


def divides(config: TinyConfig) -> tuple[tuple[str, int, str], ...]:
    sizes = {"num_attention_heads": config.heads, "intermediate_size": config.inner, "vocab_size": config.vocab_size}
    return tuple((name, size, "tp") for name, size in sizes.items())


TENSORS = Tensors(
    specs=tensor_specs,
    sharding={
        **dict.fromkeys(("embed", "head"), Split(0)),
        **dict.fromkeys(("norm", "layers.*.attn_norm", "layers.*.ffn_norm"), Replicate()),
        **dict.fromkeys([f"layers.*.attn.{name}" for name in ("wq", "wk", "wv")], Split(0)),
        **dict.fromkeys(("layers.*.ffn.w1", "layers.*.ffn.w3"), Split(0)),
        **dict.fromkeys(("layers.*.attn.wo", "layers.*.ffn.w2"), Split(1)),
    },
    divides=divides,
)


def state_spec(config: TinyConfig, numerics: Numerics, shard: ModelShard, *, drafter: bool) -> StateSpec:
    row = StoreSpec("kv", UnquantizedRow(2 * shard.part(config.heads) * config.head_dim, numerics.dtype))
    last = len(shard.layers) - 1
    return StateSpec(layers=(*((row,) for _ in range(last)), (SharedStore("kv", last - 1),)))


def workspace(config: TinyConfig, numerics: Numerics, shard: ModelShard, *, tokens: int, longest: int) -> PassBytes:
    item, heads = numerics.dtype.itemsize, shard.part(config.heads)
    inner, attention = 2 * shard.part(config.inner), 4 * heads * config.head_dim
    gathered = 2 * longest * heads * (config.head_dim + 1)  # keys and values, scores and probabilities
    hidden = item * config.hidden_size
    return PassBytes(hidden=hidden, held=2 * hidden, widest=tokens * item * (2 * config.hidden_size + inner + attention + gathered))


def row_reads(config: TinyConfig, numerics: Numerics) -> int:
    return 2 * config.hidden_size * numerics.dtype.itemsize


@dataclass(slots=True, kw_only=True)
class TinyBatch(Batch):
    rope_T: tuple[Tensor, Tensor]
    rows_TL: Tensor  # where the rows of each token's sequence lie
    seen_TL: Tensor


class Layer(nn.Module):
    def __init__(self, config: TinyConfig, numerics: Numerics, shard: ModelShard, layer: int) -> None:
        super().__init__()
        d, heads, inner = config.hidden_size, shard.part(config.heads), shard.part(config.inner)
        self.shard, self.heads, self.width = shard, heads, heads * config.head_dim
        self.attn_norm, self.ffn_norm = parameter(d, numerics=numerics), parameter(d, numerics=numerics)
        last = layer == config.num_hidden_layers - 1
        self.parts = ("wq",) if last else ("wq", "wk", "wv")
        self.inputs = Matrix(len(self.parts) * self.width, d, numerics=numerics)
        self.wo, self.w13 = Matrix(d, self.width, numerics=numerics), Matrix(2 * inner, d, numerics=numerics)
        self.w2, self.inner = Matrix(d, inner, numerics=numerics), inner

    def forward(self, x_TD: Tensor, batch: TinyBatch, cache: LayerCache) -> Tensor:
        tp = self.shard.mesh.tp
        x_TD = x_TD + tp.all_reduce(linear(self.attend(rms_norm(x_TD, self.attn_norm, EPS), batch, cache.stores["kv"]), self.wo))
        gate, up = linear(rms_norm(x_TD, self.ffn_norm, EPS), self.w13).split(self.inner, 1)
        return x_TD + tp.all_reduce(linear(nn.functional.silu(gate) * up, self.w2))

    def attend(self, x_TD: Tensor, batch: TinyBatch, store: RowStore) -> Tensor:
        q, *kv = (part.unflatten(1, (self.heads, -1)) for part in linear(x_TD, self.inputs).split(self.width, 1))
        real_T = batch.paging.positions_T >= 0
        if kv:
            own_T = batch.rows_TL.gather(1, batch.paging.positions_T.clamp_min(0).long()[:, None])[:, 0]
            rows = torch.cat([rope(kv[0], *batch.rope_T), kv[1]], 1).flatten(1)
            store.write(own_T[real_T], rows[real_T])
        k_TLHC, v_TLHC = store.read(batch.rows_TL, x_TD.dtype).unflatten(2, (2 * self.heads, -1)).split(self.heads, 2)
        scores_THL = torch.einsum("thc,tlhc->thl", rope(q, *batch.rope_T), k_TLHC) * q.shape[-1] ** -0.5
        scores_THL = scores_THL.masked_fill(~batch.seen_TL[:, None], float("-inf"))
        return torch.einsum("thl,tlhc->thc", scores_THL.softmax(-1), v_TLHC).flatten(1)

    def slots(self) -> Iterator[tuple[str, Slot]]:
        yield "attn_norm.weight", TensorSlot(self.attn_norm)
        yield "ffn_norm.weight", TensorSlot(self.ffn_norm)
        for i, name in enumerate(self.parts):
            yield f"attn.{name}.weight", self.inputs.rows(i * self.width, (i + 1) * self.width)
        yield "attn.wo.weight", self.wo.whole()
        yield "ffn.w1.weight", self.w13.rows(0, self.inner)
        yield "ffn.w3.weight", self.w13.rows(self.inner, 2 * self.inner)
        yield "ffn.w2.weight", self.w2.whole()


class Tiny(nn.Module):
    """See ``models.family.Model``; what only experts, drafters and pipelines ask for is left out."""

    short_lengths = ()
    capturable = passes_taps = False

    def __init__(
        self,
        config: TinyConfig,
        numerics: Numerics,
        mesh: Mesh | None = None,
        *,
        dispatcher: Any = "auto",
        redundant_experts: int | None = None,
        with_mtp: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.numerics = config, numerics
        shard = self.shard = ModelShard.of(config, TENSORS, mesh or Mesh(), dispatcher, redundant_experts)
        self.embed = parameter(len(shard.vocab), config.hidden_size, numerics=numerics, dtype=numerics.dtype)
        self.layers = nn.ModuleList(Layer(config, numerics, shard, i) for i in shard.layers)
        self.norm = parameter(config.hidden_size, numerics=numerics)
        self.head = Matrix(len(shard.vocab), config.hidden_size, numerics=numerics)
        self.hidden_shape = (config.hidden_size,)
        self.frequencies = rope_frequencies(config.head_dim, config.theta).to(numerics.device)

    @property
    def state_spec(self) -> StateSpec:
        return state_spec(self.config, self.numerics, self.shard, drafter=False)

    def batch(self, token_ids_T: Tensor, paging: Paging, *, max_tokens: int) -> TinyBatch:
        positions_T, sequence_T = paging.positions_T.long(), paging.sequence_T.long()
        every_L = torch.arange(max_tokens, device=positions_T.device)
        page_TL = paging.grow_SP.long()[sequence_T[:, None], every_L // PAGE_TOKENS]
        return TinyBatch(
            token_ids_T=token_ids_T,
            paging=paging,
            max_tokens=max_tokens,
            rope_T=rope_angles(positions_T, self.frequencies),
            rows_TL=page_TL * PAGE_TOKENS + every_L % PAGE_TOKENS,
            seen_TL=every_L <= positions_T[:, None],
        )

    def forward(self, batch: TinyBatch, caches: Sequence[LayerCache], hidden: Tensor | None = None) -> Tensor:
        x_TD = embedding(self.shard.mesh.tp, self.embed, self.shard.vocab, batch.token_ids_T)
        for layer, cache in zip(self.layers, caches, strict=True):
            x_TD = layer(x_TD, batch, cache)
        return x_TD

    def logits(self, hidden: Tensor, *, out: Tensor | None = None) -> Tensor:
        x_TD = rms_norm(hidden, self.norm, EPS)
        return gather_columns(self.shard.mesh.tp, lambda place: linear(x_TD, self.head, torch.float32, out=place), out)

    @contextmanager
    def skip_repeated_layers(self) -> Iterator[None]:
        yield

    def slots(self) -> dict[str, Slot]:
        named: dict[str, Slot] = {"embed.weight": TensorSlot(self.embed), "head.weight": self.head.whole()}
        named["norm.weight"] = TensorSlot(self.norm)
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            named |= {f"layers.{i}.{name}": slot for name, slot in layer.slots()}
        return named


def names(raw: Mapping[str, Any]) -> NameTables:
    return NameTables(top={"lm_head": "head"}, block={"self_attn": "attn"})


TINY = Family(
    name="tiny",
    read_config=read_config,
    tensors=TENSORS,
    names=names,
    state=state_spec,
    build=Tiny,
    workspace=workspace,
    row_reads=row_reads,
)


def make_weights(seed: int) -> dict[str, Tensor]:
    """Return random float32 weights by official names; attention and experts matter enough for tokens to depend on all of them."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, spec in tensor_specs(read_config(CONFIG)).items():
        scale = 1.0 if len(spec.shape) == 1 or name.startswith("embed") else 2.0 * spec.shape[1] ** -0.5
        weights[name] = torch.randn(spec.shape, generator=generator) * scale + (len(spec.shape) == 1)
    return weights


def write_model(folder: Path, weights: Mapping[str, Tensor]) -> Path:
    """Write a checkpoint, with names of the family's table, and a tokenizer."""
    external = {name.replace("attn.", "self_attn.").replace("head.", "lm_head."): tensor for name, tensor in weights.items()}
    write_checkpoint(folder, CONFIG, external.items())
    return write_tokenizer(folder, CONFIG["vocab_size"])
