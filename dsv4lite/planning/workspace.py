"""What a step allocates beside weights and state: tensors that live at the same time, counted where they are widest.

Bytes per token unless said otherwise; D model, N streams, H heads of C channels, R low rank, I expert width, K experts per token.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from dsv4lite.kernels.compress import OVERLAP_RATIO
from dsv4lite.kernels.experts.decode_small import DECODE_SMALL_TOKENS
from dsv4lite.kernels.gemm import LIBRARY_ROWS
from dsv4lite.kernels.hc import has_kernel
from dsv4lite.kernels.indexer import SCORE_BYTES
from dsv4lite.kernels.sampling.rows import row_bytes
from dsv4lite.models.deepseek_v4.batch import SPLITS
from dsv4lite.models.deepseek_v4.config import V4Config
from dsv4lite.weights.quant import Numerics

MIB = 1 << 20
_BF16, _FLOAT, _INT = 2, 4, 4
_SAMPLING = (
    12  # copies of the logits, at most: penalties and masks, noise, sorted tokens with their ids and masses, log-probabilities
)
SCORED_ROWS = 64  # prompt tokens whose logits exist at a time while they are scored
_LISTED = 10  # words of each listed best token: keys and ids while they are ranked, ids and values
# Largest block of rows that one expert multiplies: each expert may leave one such block almost empty.
_EXPERT_ROWS = 64
_SELECT_BINS, _SELECT_SEGMENT = 2 * 256, 4096  # histograms of scores too many for one program
_LIBRARY = 32 * MIB  # scratch of the matrix library on one stream, on the chips where it is largest
_SCRATCH = 16 * MIB  # parts of products of few rows, and counters
SMALL_BLOCKS = 12 * MIB  # what tensors of less than a MiB take, which the allocator keeps apart from others
_GAPS = 1.2  # what the allocator takes for each byte that lives: blocks of other sizes than those before leave gaps
_GRAPH_SEGMENTS = (20 + 2) * MIB  # the least that the allocator takes for a graph's large and small tensors


def _sampling(model: V4Config, sequences: int, listed: int) -> int:
    """Return what sampling from the rows of some sequences takes, or scoring ``SCORED_ROWS`` prompt tokens.

    Args:
        model: Sizes.
        sequences: Most rows that are sampled from.
        listed: Most best tokens of a row that are listed.
    """
    return _FLOAT * (_SAMPLING * model.vocab_size + _LISTED * min(listed, model.vocab_size)) * max(sequences, SCORED_ROWS)


def reference_workspace(model: V4Config, tokens: int, sequences: int, listed: int = 0) -> int:
    """Estimate what a step of the references takes: streams and float32 copies, queries, expert inputs, gathered rows, logits."""
    per_token = 4 * model.streams * model.hidden_size * 3 + 4 * model.num_attention_heads * model.head_dim * 3
    per_token += 4 * model.experts_per_token * (model.hidden_size + 2 * model.expert_width)
    rows = 256 * (model.window + model.index_topk) * model.head_dim * 4 * 2
    return tokens * per_token + rows + _sampling(model, sequences, listed)


def paged_workspace(model: V4Config, numerics: Numerics, *, tokens: int, sequences: int, longest: int, listed: int = 0) -> int:
    """Return the bytes that hold any step on paged state: ``SMALL_BLOCKS``, and the rest in one piece.

    Args:
        model: Sizes.
        numerics: Whether numbers are quantized, and how wide they are. If deterministic, attention is never split, and of all
            products only those of float32 are left to the library.
        tokens: Most tokens of a step.
        sequences: Most sequences that sample in a step.
        longest: Most tokens of a sequence.
        listed: Most best tokens that are listed at a position.
    """
    few: list[int] = []
    if not numerics.deterministic:
        few = [_split_attention(model, numerics, tokens, longest, splits, most) for most, splits in SPLITS if splits > 1]
    sampling = tokens * _held(model, numerics) + _sampling(model, sequences, listed)
    live = max(_model_pass(model, numerics, tokens, longest), sampling, *few)
    library = not numerics.deterministic or numerics.dtype == torch.float32
    return int(_GAPS * live) + _SCRATCH + SMALL_BLOCKS + (_LIBRARY if library else 0)


def graph_bytes(model: V4Config, numerics: Numerics, *, sequences: int, longest: int) -> int:
    """Return what the graphs of decode steps keep: what the largest works with, and of every sequence what it samples from.

    The smaller graphs, recorded later, find room in what the largest has left. All of them put their logits in one place.
    """
    return sequences * sampling_bytes(model) + _model_pass(model, numerics, sequences, longest) + _GRAPH_SEGMENTS


def drafting_bytes(model: V4Config, numerics: Numerics, *, sequences: int, rows: int, own: bool) -> int:
    """Return what graphs of steps that check guesses keep besides, and those that make guesses on the device.

    Args:
        model: Sizes.
        numerics: Arithmetic.
        sequences: Most sequences of a step.
        rows: Most rows of a step.
        own: Whether the model's own drafter guesses: the MTP block one row of a sequence at a time, DSpark a block of rows.
    """
    streams = numerics.dtype.itemsize * model.streams * model.hidden_size
    if not own:
        return rows * streams
    block = 1 if model.dspark is None else model.dspark.block + 1  # and one row apart from the others
    return rows * streams + sequences * (streams + block * _FLOAT * model.vocab_size)


def sampling_bytes(model: V4Config) -> int:
    """Return what sampling keeps of a sequence: its logits and what its settings make of them, and at most its counts and edits."""
    kept = (_FLOAT + _INT) * model.vocab_size  # made when a sequence that needs them takes its slot
    return _FLOAT * model.vocab_size + row_bytes(model.vocab_size) + kept


def exchange_bytes(
    model: V4Config, numerics: Numerics, tokens: int, gathered: int, *, by_expert: bool = False, partial: bool = False
) -> int:
    """Return what sharing a layer with other ranks takes besides: partial sums, and the rows of others and what becomes of them.

    Args:
        model: Sizes of what this rank has of each layer.
        numerics: Arithmetic.
        tokens: Most tokens of a step.
        gathered: How many ranks' tokens come together where experts are; 1 if rows do not travel.
        by_expert: A row travels once for each of its experts, at worst all to the same rank.
        partial: Experts are cut by width, and each one's result is float32; their rows do not travel.
    """
    sums = 2 * _FLOAT * model.hidden_size  # of the routed experts, and of the shared one
    if partial:
        sums += (_FLOAT - numerics.dtype.itemsize) * model.experts_per_token * model.hidden_size
    if gathered == 1:
        return tokens * sums
    row = (_rounded(model.hidden_size, numerics) or numerics.dtype.itemsize * model.hidden_size) + model.experts_per_token * (
        8 + _FLOAT
    )
    if by_expert:
        one, k = replace(model, experts_per_token=1), model.experts_per_token
        results = (2 * _FLOAT + 2 * numerics.dtype.itemsize) * model.hidden_size  # there and back, and again in their order
        return tokens * (sums + gathered * k * (2 * row + _experts(one, numerics) + results))
    return tokens * (sums + row + gathered * (row + _experts(model, numerics) + 2 * _FLOAT * model.hidden_size))


def hop_bytes(model: V4Config, numerics: Numerics, tokens: int) -> int:
    """Return what a stage of a pipeline keeps besides: streams as they came, and those of the step before, on their way from it."""
    return 2 * tokens * numerics.dtype.itemsize * model.streams * model.hidden_size


def _held(model: V4Config, numerics: Numerics) -> int:
    """Return what lives during a whole pass: streams, the embedding that they began with, angles, and what says who is where."""
    angles = 2 * (2 + len({ratio for ratio in model.ratios if ratio})) * model.rope_dim // 2 * _FLOAT
    return numerics.dtype.itemsize * model.hidden_size * (model.streams + 1) + angles + 8 * _INT


def _input(model: V4Config, numerics: Numerics) -> int:
    """Return a sub-layer's input, as it is and in FP8, and the mix for its output."""
    mix = _FLOAT * model.streams * (model.streams + 1)
    return _rounded(model.hidden_size, numerics) + numerics.dtype.itemsize * model.hidden_size + mix


def _rounded(width: int, numerics: Numerics) -> int:
    return width + -(-width // 128) if numerics.quantized else 0


def _model_pass(model: V4Config, numerics: Numerics, tokens: int, longest: int) -> int:
    """Return the bytes that live at the widest point of a pass over all layers."""
    c, item = model, numerics.dtype.itemsize
    # Of queries and rows; the former in FP8, or normed.
    latents = item * (c.q_lora_rank + c.head_dim) + (_rounded(c.q_lora_rank, numerics) or item * c.q_lora_rank)
    latents += item * c.head_dim + (_BF16 * c.rope_dim if numerics.quantized else 0)  # at most: packed rows of this step's tokens
    heads, index_heads = item * c.num_attention_heads * c.head_dim, _index_heads(c, numerics)
    outputs = item * c.o_groups * c.o_lora_rank
    by_library = item == _FLOAT  # whose products of groups, or in tiles of rows, are put together at the end
    again = by_library and numerics.deterministic
    # Between sub-layers: streams before and after, what is written into them, the last input beside the next one.
    between = item * c.hidden_size * (c.streams + 1) + _input(c, numerics) + item * c.hidden_size + _wide_streams(c, numerics)
    widest = max(
        between,
        # Projections for compressed entries, which nobody has read yet.
        _FLOAT * _compressed_columns(c) * (2 if again else 1),
        # Queries as they come from the projection, and normed.
        latents + 2 * (heads + index_heads),
        # Normed queries, the entries they have chosen, and what attention returns.
        latents + 2 * heads + index_heads + _INT * c.index_topk,
        # Attention's results, their low-rank form in bfloat16 and FP8, the sub-layer's output.
        heads + outputs * (2 if by_library else 1) + _rounded(outputs // item, numerics) + item * c.hidden_size,
        _experts(c, numerics),
    )
    # Of few tokens, the experts' outputs are summed between sub-layers only.
    unsummed = min(tokens, DECODE_SMALL_TOKENS) * (between + c.experts_per_token * (_BF16 * c.hidden_size + 8))
    whole = tokens * (_held(c, numerics) + _input(c, numerics))
    # Once, not for each token: weights that are widened for the library; scores of index keys, in rounds.
    widens = numerics.quantized and tokens > LIBRARY_ROWS
    widened = _BF16 * c.o_lora_rank * c.num_attention_heads * c.head_dim if widens else 0
    projecting = tokens * (heads + outputs) + widened
    padding = _EXPERT_ROWS * min(c.num_experts, tokens * c.experts_per_token) * _expert_words(c, numerics)
    chosen = _FLOAT * c.index_heads + _INT * c.index_topk  # head weights, and what they choose
    scoring = tokens * (latents + heads + index_heads + chosen) + _scores(c, numerics, tokens, longest)
    return whole + max(tokens * widest + padding, unsummed, projecting, scoring)


def _wide_streams(model: V4Config, numerics: Numerics) -> int:
    """Return what streams take for the library to project them, unless they are float32 or have a kernel."""
    wide = numerics.dtype == torch.float32 or has_kernel(numerics.dtype, model.streams)
    return 0 if wide else _FLOAT * model.hidden_size * model.streams


def _split_attention(model: V4Config, numerics: Numerics, tokens: int, longest: int, splits: int, most: float) -> int:
    """Return the same for the most tokens whose attention is split: float32 parts of the results live beside them."""
    few = int(min(tokens, most))
    parts = splits * few * _FLOAT * model.num_attention_heads * (model.head_dim + 2)
    return _model_pass(model, numerics, few, longest) + parts


def _index_heads(model: V4Config, numerics: Numerics) -> int:
    return numerics.dtype.itemsize * model.index_heads * model.index_dim if OVERLAP_RATIO in model.ratios else 0


def _compressed_columns(model: V4Config) -> int:
    """Return the columns of the widest projection for compressed entries, those of index keys included."""
    return 4 * (model.head_dim + model.index_dim) + model.index_heads if OVERLAP_RATIO in model.ratios else 2 * model.head_dim


def _experts(model: V4Config, numerics: Numerics) -> int:
    """Return what lives while experts work: the shared result and its hidden layer, routes, and inputs or outputs of every pair."""
    c, k, item = model, model.experts_per_token, numerics.dtype.itemsize
    hidden = item * 2 * c.expert_width + (_rounded(c.expert_width, numerics) or item * c.expert_width)
    routes = _FLOAT * c.num_experts + (8 + _FLOAT) * k + k * _expert_words(c, numerics)
    if numerics.quantized:
        pairs = k * (c.expert_width + max(_BF16 * c.expert_width, _BF16 * c.hidden_size))
    else:
        pairs = k * item * (c.expert_width + c.hidden_size)
    return 2 * item * c.hidden_size + max(hidden, routes + pairs)


def _expert_words(model: V4Config, numerics: Numerics) -> int:
    """Return the bytes of one place in a block of an expert: which pair it is, and scales of its inputs and hidden channels."""
    return _INT * (1 + (model.hidden_size + model.expert_width) // 128) if numerics.quantized else _INT


def _scores(model: V4Config, numerics: Numerics, tokens: int, longest: int) -> int:
    """Return the bytes of the scores of one round of tokens, and the histograms with which the best are found."""
    entries, item = longest // OVERLAP_RATIO if OVERLAP_RATIO in model.ratios else 0, numerics.dtype.itemsize
    if entries <= model.index_topk:
        return 0
    together = min(tokens, max(1, SCORE_BYTES // (item * entries)))
    return together * (item * entries + _SELECT_BINS * _INT * -(-entries // _SELECT_SEGMENT))
