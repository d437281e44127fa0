"""A small DeepSeek-V4 for training, and its checkpoint in the release format.

Written for whole batches: every product dense, no cache. The parameters carry the names of the checkpoint, but the
experts of a layer are stacked into one tensor. Two switches follow the model through its forward pass: ``quant`` for all
roundings of the release (FP8 and FP4 weights, FP8 activations and KV, FP4 index vectors) with straight-through gradients,
and ``sparse`` for the indexer's selection.

Shapes: B sequences, T tokens, D hidden, H heads, C head dim, N residual streams, E experts, W compressed entries.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsv4lite.bare import import_torch

import_torch()  # without a warning where numpy is missing

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from dsv4lite.weights.checkpoint import write_tensors

# ---------------------------------------------------------------------------------------------------- configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The architecture, under the keys of the release's config.json."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 6
    compress_ratios: tuple[int, ...] = (0, 0, 4, 128, 4, 128, 0)  # the last entry is the MTP block's
    num_attention_heads: int = 8
    num_key_value_heads: int = 1
    head_dim: int = 128
    qk_rope_head_dim: int = 64
    q_lora_rank: int = 128
    o_groups: int = 2
    o_lora_rank: int = 128
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    n_shared_experts: int = 1
    moe_intermediate_size: int = 256
    num_hash_layers: int = 2
    num_nextn_predict_layers: int = 1
    scoring_func: str = "sqrtsoftplus"
    topk_method: str = "noaux_tc"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    hidden_act: str = "silu"
    sliding_window: int = 128
    index_n_heads: int = 16
    index_head_dim: int = 128
    index_topk: int = 64
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    max_position_embeddings: int = 16384
    attention_bias: bool = False
    attention_dropout: float = 0.0
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    bos_token_id: int = 0
    eos_token_id: int = 1
    torch_dtype: str = "bfloat16"
    expert_dtype: str = "fp4"


SMOKE = Config(
    vocab_size=512, hidden_size=128, num_hidden_layers=3, compress_ratios=(0, 4, 128, 0), num_attention_heads=2, n_routed_experts=4,
    moe_intermediate_size=128, num_hash_layers=1, index_n_heads=12, index_topk=16,
)  # fmt: skip
YARN = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}
QUANTIZATION = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0", "weight_block_size": [128, 128],
}  # fmt: skip


def config_json(config: Config) -> dict[str, Any]:
    """Return the contents of config.json."""
    names = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"}
    return {**names, **asdict(config), "rope_scaling": YARN, "quantization_config": QUANTIZATION}


# ----------------------------------------------------------------------------------------------------- quantization


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A small float format: ``min_amax`` is the least amax that a scale is made from."""

    mantissa_bits: int
    min_exponent: int
    largest: float
    min_amax: float


E4M3 = Format(mantissa_bits=3, min_exponent=-6, largest=448.0, min_amax=1e-4)
E2M1 = Format(mantissa_bits=1, min_exponent=0, largest=6.0, min_amax=6 * 2.0**-126)
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
EXPONENT = 0x7F800000  # the exponent bits of a float32


def power_of_two_at_least(x: Tensor) -> Tensor:
    """2 ** ceil(log2(x)) of positive normal float32, from the bits: a mantissa that is not zero carries."""
    return ((x.view(torch.int32) + 0x7FFFFF) & EXPONENT).view(torch.float32)


def round_to(x: Tensor, form: Format) -> Tensor:
    """Round float32 ``x`` to the nearest value of a format, ties to the even code.

    Done by arithmetic: a cast to the format and back could be dropped when kernels are fused.
    """
    x = x.clamp(-form.largest, form.largest)
    binade = (x.abs().clamp_min(2.0**form.min_exponent).view(torch.int32) & EXPONENT).view(torch.float32)
    step = binade * 2.0**-form.mantissa_bits
    return torch.round(x / step) * step


def quantize(groups: Tensor, dims: int | tuple[int, int], form: Format) -> tuple[Tensor, Tensor]:
    """Return (codes as float32, power-of-two scales) of tensors that share a scale along ``dims``."""
    amax = groups.abs().amax(dims, keepdim=True).clamp_min(form.min_amax)
    scale = power_of_two_at_least(amax * (1 / form.largest))
    return round_to(groups / scale, form), scale


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """The value of ``rounded`` to the bit, the gradient of ``x``."""
    return rounded.to(x.dtype).detach() + (x - x.detach())


def fake_quantize(x: Tensor, group: int, form: Format) -> Tensor:
    """Quantize and dequantize along the last dimension, in groups."""
    codes, scale = quantize(x.detach().float().unflatten(-1, (-1, group)), -1, form)
    return straight_through(x, (codes * scale).flatten(-2))


def quantize_matrix(weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Codes [..., rows, columns] and scales: FP8 one per 128 x 128 block, FP4 one per row and 32 columns."""
    if kind == "fp8":
        codes, scale = quantize(weight.unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128)), (-3, -1), E4M3)
        return codes.flatten(-4, -3).flatten(-2), scale.squeeze((-3, -1))
    codes, scale = quantize(weight.unflatten(-1, (-1, 32)), -1, E2M1)
    return codes.flatten(-2), scale.squeeze(-1)


def dequantize_matrix(codes: Tensor, scale: Tensor, kind: str) -> Tensor:
    """Undo :func:`quantize_matrix`, exactly."""
    if kind == "fp8":
        return codes * scale.repeat_interleave(128, -2).repeat_interleave(128, -1)
    return codes * scale.repeat_interleave(32, -1)


# ------------------------------------------------------------------------------------------------------------ model


class Linear(nn.Module):
    """A matrix [rows, columns] (or a stack of them), stored as ``kind`` and trained in float32."""

    def __init__(self, rows: int, columns: int, kind: str = "fp8", *, stack: tuple[int, ...] = (), gain: float = 1.0) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.randn(*stack, rows, columns) * gain * columns**-0.5)

    def matrix(self, quant: bool, dtype: torch.dtype) -> Tensor:
        weight = self.weight
        if quant and self.kind != "bf16":
            weight = straight_through(weight, dequantize_matrix(*quantize_matrix(weight.detach(), self.kind), self.kind))
        return weight.to(dtype)

    def forward(self, x: Tensor, quant: bool) -> Tensor:
        quant = quant and self.kind != "bf16"
        return (fake_quantize(x, 128, E4M3) if quant else x) @ self.matrix(quant, x.dtype).mT

    def wide(self, x: Tensor) -> Tensor:
        """The product in float32, from operands in the dtype of ``x``."""
        return x.float() @ self.weight.to(x.dtype).float().mT


class Norm(nn.Module):
    """RMSNorm with a plain weight, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return (unit_rms(x, self.eps) * self.weight.to(x.dtype).float()).to(x.dtype)


def unit_rms(x: Tensor, eps: float) -> Tensor:
    return x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)


def rope_table(config: Config, compressed: bool, length: int) -> Tensor:
    """cos and sin of position x frequency, float32 [2, T, rope_dim / 2]; compressed layers blend frequencies as YaRN does."""
    base, dim = (config.compress_rope_theta if compressed else config.rope_theta), config.qk_rope_head_dim
    freqs = base ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if compressed:
        low, high = (
            dim * math.log(YARN["original_max_position_embeddings"] / (2 * math.pi * YARN[beta])) / (2 * math.log(base))
            for beta in ("beta_fast", "beta_slow")
        )
        low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
        ramp = ((torch.arange(dim // 2) - low) / (high - low)).clamp(0, 1)
        freqs = freqs / YARN["factor"] * ramp + freqs * (1 - ramp)
    angles = torch.arange(length).float()[:, None] * freqs
    return torch.stack([angles.cos(), angles.sin()])


def rope(x: Tensor, table: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last channels of x [B, T, ..., C] in interleaved pairs."""
    width = 2 * table.shape[-1]
    cos, sin = table.view(2, -1, *[1] * (x.dim() - 3), width // 2)
    sin = -sin if inverse else sin
    even, odd = x[..., -width:].float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
    return torch.cat([x[..., :-width], turned.to(x.dtype)], -1)


def round_kv(kv: Tensor, rope_dim: int) -> Tensor:
    """FP8 for the position-free channels, in groups of 64; the rotated ones stay."""
    return torch.cat([fake_quantize(kv[..., :-rope_dim], 64, E4M3), kv[..., -rope_dim:]], -1)


def hadamard(x: Tensor) -> Tensor:
    """Orthonormal Walsh-Hadamard transform of the last dimension, natural order."""
    signs = torch.ones(1, 1, device=x.device)
    while len(signs) < x.shape[-1]:
        signs = torch.cat([torch.cat([signs, signs], 1), torch.cat([signs, -signs], 1)])
    return (x.float() @ signs * x.shape[-1] ** -0.5).to(x.dtype)


class Compressor(nn.Module):
    """Pools groups of ``ratio`` tokens, per channel; with ratio 4 an entry also pools the group before its own."""

    def __init__(self, config: Config, ratio: int, width: int) -> None:
        super().__init__()
        self.ratio, self.overlap, self.width = ratio, ratio == 4, width
        channels = width * (2 if self.overlap else 1)
        self.ape = nn.Parameter(torch.zeros(ratio, channels))
        self.wkv, self.wgate = (Linear(channels, config.hidden_size, "bf16") for _ in range(2))
        self.norm = Norm(width, config.rms_norm_eps)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """x [B, T, D] -> rotated entries [B, T / ratio, width]; T is a multiple of the ratio."""
        values = self.wkv.wide(x).unflatten(1, (-1, self.ratio))
        scores = self.wgate.wide(x).unflatten(1, (-1, self.ratio)) + self.ape
        if self.overlap:
            values, scores = (
                torch.cat([F.pad(y[:, :-1, :, : self.width], (0, 0, 0, 0, 1, 0), value=empty), y[..., self.width :]], 2)
                for y, empty in ((values, 0.0), (scores, -torch.inf))
            )
        return rope(self.norm((scores.softmax(2) * values).sum(2).to(x.dtype)), table[:, :: self.ratio])


class Indexer(nn.Module):
    """Scores every compressed entry for every query of a C4 layer."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.width = config.index_n_heads, config.index_head_dim
        self.wq_b = Linear(self.heads * self.width, config.q_lora_rank)
        self.weights_proj = Linear(self.heads, config.hidden_size, "bf16")
        self.compressor = Compressor(config, 4, self.width)

    def forward(self, x: Tensor, qr: Tensor, table: Tensor, quant: bool) -> Tensor:
        """Return float32 [B, T, W]."""
        query = hadamard(rope(self.wq_b(qr, quant).unflatten(-1, (self.heads, self.width)), table))
        keys = hadamard(self.compressor(x, table))
        if quant:
            query, keys = fake_quantize(query, 32, E2M1), fake_quantize(keys, 32, E2M1)
        weights = self.weights_proj(x, quant).float() * (self.width * self.heads) ** -0.5
        dots = (query.flatten(1, 2) @ keys.mT).unflatten(1, (-1, self.heads)).float().relu()
        return (dots * weights[..., None]).sum(2)


LOWEST = -1e30  # finite, so that a row without a single visible entry has a softmax


class Attention(nn.Module):
    """Sliding window plus compressed entries, one key-value vector for all heads, under one softmax with a sink."""

    def __init__(self, config: Config, ratio: int) -> None:
        super().__init__()
        self.config, self.ratio = config, ratio
        hidden, heads, width = config.hidden_size, config.num_attention_heads, config.head_dim
        rank, out_rank = config.q_lora_rank, config.o_groups * config.o_lora_rank
        self.wq_a, self.q_norm = Linear(rank, hidden), Norm(rank, config.rms_norm_eps)
        self.wq_b = Linear(heads * width, rank)
        self.wkv, self.kv_norm = Linear(width, hidden), Norm(width, config.rms_norm_eps)
        self.attn_sink = nn.Parameter(torch.zeros(heads))
        self.wo_a = Linear(out_rank, heads * width // config.o_groups)
        self.wo_b = Linear(hidden, out_rank, gain=0.5)
        if ratio:
            self.compressor = Compressor(config, ratio, width)
        if ratio == 4:
            self.indexer = Indexer(config)

    def forward(self, x: Tensor, table: Tensor, quant: bool, sparse: bool) -> tuple[Tensor, Tensor]:
        """Return the output [B, T, D] and the indexer's loss (zero without an indexer)."""
        config, length = self.config, x.shape[1]
        qr = self.q_norm(self.wq_a(x, quant))
        query = self.wq_b(qr, quant).unflatten(-1, (config.num_attention_heads, -1))
        query = rope(unit_rms(query, config.rms_norm_eps).to(x.dtype), table)
        kv = rope(self.kv_norm(self.wkv(x, quant)), table)
        kv = round_kv(kv, config.qk_rope_head_dim) if quant else kv

        # The window: blocks of its size see themselves and the block before.
        size, heads, width = config.sliding_window, config.num_attention_heads, config.head_dim
        blocks = kv.unflatten(1, (-1, size))
        keys = torch.cat([F.pad(blocks[:, :-1], (0, 0, 0, 0, 1, 0)), blocks], 2)  # [B, T / size, 2 size, C]
        near = (query.unflatten(1, (-1, size)).flatten(2, 3) @ keys.mT).unflatten(2, (size, heads)).flatten(1, 2)
        position = torch.arange(length, device=x.device)
        key_position = (position // size * size - size)[:, None] + torch.arange(2 * size, device=x.device)
        in_window = (key_position >= 0) & (key_position <= position[:, None]) & (key_position > position[:, None] - size)
        near = (near.float() * width**-0.5).masked_fill(~in_window[:, None], -torch.inf)  # [B, T, H, 2 size]

        peak = torch.maximum(near.amax(-1, keepdim=True), self.attn_sink[:, None])
        if self.ratio:
            entries = self.compressor(x, table)
            entries = round_kv(entries, config.qk_rope_head_dim) if quant else entries
            visible = torch.arange(entries.shape[1], device=x.device) < ((position + 1) // self.ratio)[:, None]
            chosen = visible[None]
            if self.ratio == 4:
                scores = self.indexer(x.detach(), qr.detach(), table, quant).masked_fill(~visible, LOWEST)
                if sparse and config.index_topk < entries.shape[1]:
                    best = scores.detach().topk(config.index_topk).indices
                    chosen = visible & torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
            far = (query.flatten(1, 2) @ entries.mT).unflatten(1, (-1, heads))
            far = (far.float() * width**-0.5).masked_fill(~chosen[:, :, None], -torch.inf)  # [B, T, H, W]
            peak = torch.maximum(peak, far.amax(-1, keepdim=True))
        peak = peak.detach()
        near = (near - peak).exp()
        total = near.sum(-1, keepdim=True) + (self.attn_sink[:, None] - peak).exp()
        index_loss = torch.zeros((), device=x.device)
        if self.ratio:
            far = (far - peak).exp()
            total = total + far.sum(-1, keepdim=True)
        if self.ratio == 4:  # the indexer learns what the heads together attend, among the entries they could see
            target = (far / total).detach().sum(2)
            target = target / target.sum(-1, keepdim=True).clamp_min(1e-9)
            predicted = scores.masked_fill(~chosen, LOWEST).log_softmax(-1)
            index_loss = (target * (target.clamp_min(1e-9).log() - predicted)).sum(-1).mean()

        near = (near / total).to(x.dtype).unflatten(1, (-1, size)).flatten(2, 3)
        out = (near @ keys).unflatten(2, (size, heads)).flatten(1, 2)
        if self.ratio:
            out = out + ((far / total).to(x.dtype).flatten(1, 2) @ entries).unflatten(1, (-1, heads))
        groups = rope(out, table, inverse=True).flatten(2).unflatten(-1, (config.o_groups, -1))
        wo_a = self.wo_a.matrix(quant, x.dtype).unflatten(0, (config.o_groups, -1))
        return self.wo_b(torch.einsum("btgc,grc->btgr", groups, wo_a).flatten(2), quant), index_loss


class Gate(nn.Module):
    """The router's tensors: scores from ``weight``; experts by token id, or by score plus ``bias``."""

    def __init__(self, config: Config, hashed: bool) -> None:
        super().__init__()
        vocab, experts, chosen = config.vocab_size, config.n_routed_experts, config.num_experts_per_tok
        self.weight = nn.Parameter(torch.randn(experts, config.hidden_size) * config.hidden_size**-0.5)
        if hashed:  # shuffled rounds over all experts, the second choice a random distance after the first
            first = torch.randperm(vocab) % experts
            distance = torch.randint(1, (experts - 1) // (chosen - 1) + 1, (vocab, 1))
            self.register_buffer("tid2eid", (first[:, None] + torch.arange(chosen) * distance) % experts)
        else:
            self.register_buffer("bias", torch.zeros(experts))


class Experts(nn.Module):
    """SwiGLU matrices: gate ``w1``, down ``w2``, up ``w3``."""

    def __init__(self, config: Config, kind: str, stack: tuple[int, ...] = ()) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        self.w1, self.w3 = (Linear(inner, hidden, kind, stack=stack) for _ in range(2))
        self.w2 = Linear(hidden, inner, kind, stack=stack, gain=0.5)


class MoE(nn.Module):
    """All experts on all tokens, as one wide SwiGLU whose inner channels are weighted: at this size the fastest way."""

    def __init__(self, config: Config, hashed: bool) -> None:
        super().__init__()
        self.config, self.hashed = config, hashed
        self.gate = Gate(config, hashed)
        self.experts = Experts(config, "fp4", (config.n_routed_experts,))
        self.shared_experts = Experts(config, "fp8")

    def forward(self, x: Tensor, ids: Tensor, quant: bool) -> tuple[Tensor, Tensor]:
        """Return the output [B, T, D] and the share of tokens that each expert got [E]."""
        config = self.config
        scores = F.softplus(x.float() @ self.gate.weight.to(x.dtype).float().mT).sqrt()
        chosen = self.gate.tid2eid[ids] if self.hashed else (scores + self.gate.bias).topk(config.num_experts_per_tok).indices
        weights = scores.gather(-1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) * config.routed_scaling_factor
        weights = torch.zeros_like(scores).scatter(-1, chosen, weights)
        load = (weights.detach() > 0).float().mean((0, 1))

        routed, shared, width = self.experts, self.shared_experts, config.moe_intermediate_size
        gate, up = (
            torch.cat([getattr(routed, w).matrix(quant, x.dtype).flatten(0, 1), getattr(shared, w).matrix(quant, x.dtype)])
            for w in ("w1", "w3")
        )
        down = torch.cat([routed.w2.matrix(quant, x.dtype).transpose(0, 1).flatten(1), shared.w2.matrix(quant, x.dtype)], 1)
        x = fake_quantize(x, 128, E4M3) if quant else x
        limit = config.swiglu_limit
        inner = F.silu((x @ gate.mT).float().clamp(max=limit)) * (x @ up.mT).float().clamp(-limit, limit)
        inner = inner.unflatten(-1, (-1, width)) * F.pad(weights, (0, 1), value=1.0)[..., None]
        inner = inner.flatten(-2).to(x.dtype)
        return (fake_quantize(inner, 128, E4M3) if quant else inner) @ down.mT, load


def sinkhorn_step(comb: Tensor, eps: float) -> Tensor:
    comb = comb / (comb.sum(-1, keepdim=True) + eps)
    return comb / (comb.sum(-2, keepdim=True) + eps)


@torch.library.custom_op("train_tiny::sinkhorn_steps", mutates_args=())
def sinkhorn_steps(comb: torch.Tensor, steps: int, eps: float) -> torch.Tensor:
    """Several steps, opaque to the compiler: unrolled in every sub-layer they would take minutes to compile."""
    comb = comb.clone()
    for _ in range(steps):
        comb = sinkhorn_step(comb, eps)
    return comb


@sinkhorn_steps.register_fake
def _(comb: torch.Tensor, steps: int, eps: float) -> torch.Tensor:
    return torch.empty_like(comb)


SINKHORN_STEPS_WITH_GRADIENT = 4


def sinkhorn(mix: Tensor, iters: int, eps: float) -> Tensor:
    """Doubly stochastic matrices [B, T, N, N] from logits.

    The limit does not change when rows or columns of the start are rescaled, so the scaling that the first steps find
    is taken as given and only the last steps carry a gradient.
    """
    start = mix.softmax(-1) + eps
    start = start / (start.sum(-2, keepdim=True) + eps)
    found = sinkhorn_steps(start.detach(), iters - 1 - SINKHORN_STEPS_WITH_GRADIENT, eps)
    comb = start * (found / start).detach()
    for _ in range(SINKHORN_STEPS_WITH_GRADIENT):
        comb = sinkhorn_step(comb, eps)
    return comb


class Mixer(nn.Module):
    """Base of modules that own hyper-connection parameters, flat in the module: ``NAME_fn``, ``NAME_base``, ``NAME_scale``."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config

    def add_mixing(self, name: str, base: Tensor, scales: int) -> None:
        config = self.config
        self.register_parameter(f"{name}_fn", nn.Parameter(torch.randn(len(base), config.hc_mult * config.hidden_size) * 0.02))
        self.register_parameter(f"{name}_base", nn.Parameter(base))
        self.register_parameter(f"{name}_scale", nn.Parameter(torch.full((scales,), 0.1)))

    def project(self, streams: Tensor, name: str) -> Tensor:
        flat = streams.flatten(-2).float()
        scale = torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return flat @ getattr(self, f"{name}_fn").mT * scale

    def coefficients(self, streams: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return pre [B, T, N], post [B, T, N] and the mixing matrix [B, T, N, N]."""
        n, eps = self.config.hc_mult, self.config.hc_eps
        scale, base = getattr(self, f"{name}_scale"), getattr(self, f"{name}_base")
        pre, post, comb = self.project(streams, name).split([n, n, n * n], -1)
        pre = torch.sigmoid(pre * scale[0] + base[:n]) + eps
        post = 2 * torch.sigmoid(post * scale[1] + base[n : 2 * n])
        comb = (comb * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
        return pre, post, sinkhorn(comb, self.config.hc_sinkhorn_iters, eps)

    def collapse_head(self, streams: Tensor) -> Tensor:
        pre = torch.sigmoid(self.project(streams, "hc_head") * self.hc_head_scale + self.hc_head_base) + self.config.hc_eps
        return collapse(streams, pre)


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    return (pre[..., None] * streams.float()).sum(-2).to(streams.dtype)


def expand(out: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    mixed = (comb[..., None] * streams.float()[..., :, None, :]).sum(-3)
    return (post[..., None] * out.float()[..., None, :] + mixed).to(streams.dtype)


class Block(Mixer):
    """Attention and MoE, each reading and writing the residual streams [B, T, N, D]."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__(config)
        self.attn = Attention(config, config.compress_ratios[layer])
        self.ffn = MoE(config, hashed=layer < config.num_hash_layers)
        for i, name in enumerate(("attn", "ffn")):
            setattr(self, f"{name}_norm", Norm(config.hidden_size, config.rms_norm_eps))
            # At first every sub-layer reads mostly one stream, writes to all, and leaves the streams apart.
            pre = torch.full((config.hc_mult,), -2.0)
            pre[(2 * layer + i) % config.hc_mult] = 2.0
            self.add_mixing(f"hc_{name}", torch.cat([pre, torch.zeros(config.hc_mult), 4 * torch.eye(config.hc_mult).flatten()]), 3)

    def forward(self, streams: Tensor, ids: Tensor, table: Tensor, quant: bool, sparse: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return the streams, the indexer's loss and the experts' load."""
        pre, post, comb = self.coefficients(streams, "hc_attn")
        out, index_loss = self.attn(self.attn_norm(collapse(streams, pre)), table, quant, sparse)
        streams = expand(out, streams, post, comb)
        pre, post, comb = self.coefficients(streams, "hc_ffn")
        out, load = self.ffn(self.ffn_norm(collapse(streams, pre)), ids, quant)
        return expand(out, streams, post, comb), index_loss, load


class MTP(Block):
    """The block that predicts one token further, from the streams and the next token's embedding."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, config.num_hidden_layers)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.e_proj, self.h_proj = Linear(hidden, hidden), Linear(hidden, hidden)
        self.enorm, self.hnorm, self.norm = Norm(hidden, eps), Norm(hidden, eps), Norm(hidden, eps)
        self.add_mixing("hc_head", torch.zeros(config.hc_mult), 1)

    def enter(self, streams: Tensor, embedded: Tensor, quant: bool) -> Tensor:
        return self.e_proj(self.enorm(embedded), quant)[..., None, :] + self.h_proj(self.hnorm(streams), quant)


class Model(Mixer):
    """DeepSeek-V4 for training. ``quant`` switches all roundings of the release, ``sparse`` the indexer's selection."""

    def __init__(self, config: Config, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(config)
        self.dtype = dtype
        self.embed, self.head = (Linear(config.vocab_size, config.hidden_size, "bf16") for _ in range(2))
        nn.init.normal_(self.embed.weight, std=0.5)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.add_mixing("hc_head", torch.zeros(config.hc_mult), 1)
        self.mtp = nn.ModuleList([MTP(config)])
        self.tables: dict[tuple[bool, int], Tensor] = {}

    def rope_table(self, compressed: bool, length: int) -> Tensor:
        key = (compressed, length)
        if key not in self.tables:
            self.tables[key] = rope_table(self.config, compressed, length).to(self.embed.weight.device)
        return self.tables[key]

    def embedding(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.embed.weight).to(self.dtype)

    def forward(self, ids: Tensor, quant: bool, sparse: bool) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """ids [B, T], T a multiple of the window -> final streams [B, T, N, D], indexer loss, loads of the scored layers."""
        length, loads = ids.shape[1], {}
        streams = self.embedding(ids)[:, :, None].expand(-1, -1, self.config.hc_mult, -1).contiguous()
        index_loss = torch.zeros((), device=ids.device)
        for i, block in enumerate(self.layers):
            streams, loss, loads[f"layers.{i}"] = block(streams, ids, self.rope_table(block.attn.ratio > 0, length), quant, sparse)
            index_loss = index_loss + loss
        return streams, index_loss, loads

    def draft(self, streams: Tensor, next_ids: Tensor, quant: bool) -> tuple[Tensor, Tensor]:
        """Streams at t and the ids at t + 1 -> the MTP block's streams, which predict t + 2 and can be fed back; its load."""
        block = self.mtp[0]
        streams = block.enter(streams, self.embedding(next_ids), quant)
        streams, _, load = block(streams, next_ids, self.rope_table(False, next_ids.shape[1]), quant, False)
        return streams, load

    def logits(self, streams: Tensor, owner: Mixer) -> Tensor:
        """float32 [B, T, V]; ``owner`` holds the collapse and the norm: the model itself or its MTP block."""
        return self.head.wide(owner.norm(owner.collapse_head(streams)))

    def loss(self, streams: Tensor, owner: Mixer, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(streams, owner).flatten(0, 1), targets.flatten())


# ------------------------------------------------------------------------------------------------------- checkpoint

FLOAT32 = ("_fn", "_base", "_scale", "attn_sink", "ape", "gate.bias")


def checkpoint_tensors(model: Model) -> dict[str, Tensor]:
    """Return the tensors of the release format, under its names."""
    kinds = {f"{name}.weight": m.kind for name, m in model.named_modules() if isinstance(m, Linear)}
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        kind = kinds.get(name, "bf16")
        stacked = ".experts." in name
        for i, part in enumerate(tensor if stacked else [tensor]):
            key = name.replace(".experts.", f".experts.{i}.") if stacked else name
            if kind != "bf16":
                codes, scale = quantize_matrix(part, kind)
                packed = codes.to(torch.float8_e4m3fn) if kind == "fp8" else pack_fp4(codes)
                scale_bytes = (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8)
                tensors |= {key: packed, key.removesuffix("weight") + "scale": scale_bytes.view(torch.float8_e8m0fnu)}
            else:
                tensors[key] = part.bfloat16() if part.is_floating_point() and not key.endswith(FLOAT32) else part
    return {key: tensor.cpu().contiguous() for key, tensor in tensors.items()}


def pack_fp4(codes: Tensor) -> Tensor:
    """Two values a byte, the even column in the low nibble; int8 as in the release."""
    magnitude = torch.searchsorted(torch.tensor(E2M1_VALUES, device=codes.device), codes.abs().contiguous())
    nibbles = (magnitude + 8 * (codes < 0)).to(torch.uint8).unflatten(-1, (-1, 2))
    return (nibbles[..., 0] | nibbles[..., 1] << 4).view(torch.int8)


def save_checkpoint(model: Model, folder: Path) -> int:
    """Write config, generation config, weights and index; return the size of the weights in bytes."""
    tensors = checkpoint_tensors(model)
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
    generation = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": True, "temperature": 1.0, "top_p": 1.0}
    index = {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(sorted(tensors), "model.safetensors")}
    files = {"config.json": config_json(model.config), "generation_config.json": generation, "model.safetensors.index.json": index}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    return size


def load_checkpoint(model: Model, folder: Path) -> None:
    """Fill the model with the dequantized weights of a checkpoint that :func:`save_checkpoint` wrote."""
    tensors = load_file(folder / "model.safetensors")
    values: dict[str, Tensor] = {}
    for key in (k for k in tensors if not k.endswith(".scale")):
        tensor, scale = tensors[key], tensors.get(key.removesuffix("weight") + "scale")
        if tensor.dtype == torch.int8:
            nibbles = torch.stack([tensor.view(torch.uint8) & 15, tensor.view(torch.uint8) >> 4], -1).flatten(-2).long()
            codes = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)])[nibbles]
            tensor = dequantize_matrix(codes, scale.float(), "fp4")
        elif scale is not None:
            tensor = dequantize_matrix(tensor.float(), scale.float(), "fp8")
        values[key] = tensor
    state = model.state_dict()
    for name, tensor in state.items():
        if ".experts." in name:
            tensor.copy_(torch.stack([values.pop(name.replace(".experts.", f".experts.{i}.")) for i in range(len(tensor))]))
        else:
            tensor.copy_(values.pop(name))
    if values:
        raise ValueError(f"the checkpoint has tensors that the model does not: {sorted(values)}")
