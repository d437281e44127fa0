"""From logits to tokens: penalties, truncation, counter-based draws and log-probabilities.

    z        = penalties(logits) + bias, forbidden tokens at -inf
    scaled   = (z - max z) / temperature, then min_p, then top_k, then top_p
    token    = argmax(scaled - log(exponential variate of (stream, position, token id)))

Every op here computes each row independently, so a row's bits do not depend on the rest of its batch: sums whose order a backend
may choose by the number of rows are sums of integers, which are exact in any order. Ties always go to the lowest token id.

Randomness has no state. The noise of one token is a 32-bit hash of (stream, position, token id), integer arithmetic that any other
implementation can reproduce bit by bit. With ``^`` xor, ``>>`` logical shift, and everything modulo 2**32:

    mix(x, key) = x ^= x >> 16;  x = x * 0x21F0AAAD + key;  x ^= x >> 15;  x *= 0x735A2D97;  x ^= x >> 15
    a, b = mix(stream[0] ^ position, 0), mix(stream[1] ^ position, 0);  bits = mix(token id ^ a, b)

Shapes: R rows, V vocabulary, K places. Logits are float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4lite.kernels.dispatch import op

_MULTIPLIER_1 = 0x21F0AAAD
_MULTIPLIER_2 = 0x735A2D97
# Fixed point for probabilities: sums are exact in any order, and 2**23 tokens of the largest one still fit into int64.
_FIXED_POINT = float(2**40)
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24


@op("sampling.triton:argmax_finite_triton")
def argmax_finite(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find the best token of each row, and whether the row can be sampled from.

    Args:
        logits: float32 [R, V].

    Returns:
        The largest logit, float32 [R, 1]; the lowest token id that has it, int64 [R]; and bool [R], false where a logit is NaN or
        +inf or all are -inf. The first two are then undefined, but the id is within the vocabulary.
    """
    top, token_ids = logits.max(dim=-1, keepdim=True)  # a NaN wins over every number
    return top, token_ids.squeeze(-1), (top.abs() < float("inf")).squeeze(-1)


def penalize(
    logits: Tensor, in_prompt: Tensor, output_counts: Tensor, *, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> Tensor:
    """Apply repetition, frequency and presence penalties.

    Args:
        logits: float32 [R, V].
        in_prompt: bool [R, V], tokens of the prompt.
        output_counts: int32 [R, V], how often each token was generated.
        repetition: float32 [R, 1]; divides positive and multiplies negative logits of tokens in prompt or output.
        frequency: float32 [R, 1]; subtracted for every occurrence in the output.
        presence: float32 [R, 1]; subtracted once if the token is in the output.

    Returns:
        float32 [R, V].
    """
    generated = output_counts > 0
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(in_prompt | generated, repeated, logits)
    return logits - frequency * output_counts - presence * generated


def scale(logits: Tensor, top: Tensor, temperature: Tensor) -> Tensor:
    """Shift each row's best logit to 0, so that no temperature can overflow, and divide by the temperature.

    Args:
        logits: float32 [R, V].
        top: float32 [R, 1], the largest logit.
        temperature: float32 [R, 1], positive and finite.

    Returns:
        float32 [R, V], at most 0.
    """
    return (logits - top).div_(temperature)


def drop_below(scaled: Tensor, log_min_p: Tensor) -> Tensor:
    """Drop tokens below a fraction of the best token's probability.

    Args:
        scaled: float32 [R, V], best logit 0.
        log_min_p: float32 [R, 1], logarithm of that fraction; -inf keeps all.

    Returns:
        float32 [R, V], dropped tokens at -inf.
    """
    return scaled.masked_fill(scaled < log_min_p, float("-inf"))


def best_tokens(logits: Tensor, k: int) -> Tensor:
    """Return the ``k`` best tokens of each row, best first, ties by token id.

    Args:
        logits: float32 [R, V].
        k: At most V.

    Returns:
        int64 [R, k].
    """
    if k == 0:
        return torch.empty((logits.shape[0], 0), dtype=torch.int64, device=logits.device)
    # Value in the upper bits, reversed token id in the lower: keys of a row differ, so every algorithm sorts them the same way.
    backward_ids = torch.arange(logits.shape[-1] - 1, -1, -1, dtype=torch.int64, device=logits.device)
    keys = ascending(logits).to(torch.int64).bitwise_left_shift_(32).bitwise_or_(backward_ids)
    return keys.shape[-1] - 1 - (keys.topk(k, dim=-1).values & 0xFFFFFFFF)


def ascending(x: Tensor) -> Tensor:
    """Return int32 in the order of the floats; -0.0 equals 0.0."""
    bits = (x + 0.0).view(torch.int32)
    return (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)


def keep_best(scaled: Tensor, top_k: Tensor, top_p: Tensor, *, width: int) -> Tensor:
    """Keep the k best tokens, and of those the smallest set of best ones that has the fraction p of their probability.

    Args:
        scaled: float32 [R, V], best logit 0.
        top_k: int64 [R, 1], in [1, width].
        top_p: float64 [R, 1], in (0, 1]; 1 keeps all.
        width: At least the largest k; does not change the result.

    Returns:
        float32 [R, V], dropped tokens at -inf.
    """
    values = scaled.topk(width, dim=-1).values
    inside = torch.arange(width, device=scaled.device) < top_k
    mass = _fixed_exp(values.masked_fill(~inside, float("-inf")))
    inside &= (_mass_before(mass) < top_p * mass.sum(dim=-1, keepdim=True)) | (top_p >= 1)
    return _only_best(scaled, values, inside.sum(dim=-1, keepdim=True))


def keep_nucleus(scaled: Tensor, top_p: Tensor) -> Tensor:
    """Keep the smallest set of best tokens that has the fraction p of the whole vocabulary's probability.

    Args:
        scaled: float32 [R, V], best logit 0.
        top_p: float64 [R, 1], in (0, 1).

    Returns:
        float32 [R, V], dropped tokens at -inf.
    """
    vocab_size = scaled.shape[-1]
    goal = top_p * _fixed_exp(scaled).sum(dim=-1, keepdim=True)
    rows, width, found = torch.arange(len(scaled), device=scaled.device), min(64, vocab_size), torch.empty_like(scaled)
    while len(rows):  # most nuclei are small: the 64 best tokens first, then 8 times as many for rows whose nucleus is larger
        values, wanted = scaled[rows].topk(width, dim=-1).values, goal[rows]
        mass = _fixed_exp(values)
        fits = (mass.sum(dim=-1) >= wanted[:, 0]) | (width == vocab_size)
        done, count = rows[fits], (_mass_before(mass) < wanted).sum(dim=-1, keepdim=True)
        found[done] = _only_best(scaled[done], values[fits], count[fits])
        rows, width = rows[~fits], min(8 * width, vocab_size)
    return found


def _fixed_exp(scaled: Tensor) -> Tensor:
    """Return ``exp(scaled)`` in fixed point, int64: probabilities up to a factor, whose sums are exact in any order."""
    return torch.exp(scaled).mul_(_FIXED_POINT).to(torch.int64)


def _mass_before(mass: Tensor) -> Tensor:
    return mass.cumsum(dim=-1).sub_(mass)


def _only_best(scaled: Tensor, values: Tensor, count: Tensor) -> Tensor:
    """Keep the ``count`` [R, 1] best tokens of each row; ``values`` has the row's largest values in descending order."""
    least = values.gather(-1, count - 1)
    kept = scaled >= least
    surplus = kept.sum(dim=-1, keepdim=True) - count
    if bool((surplus > 0).any()):  # of tokens equal to the least one, keep the lowest ids
        equal = scaled == least
        kept &= ~equal | (equal.cumsum(-1) <= equal.sum(dim=-1, keepdim=True) - surplus)
    return scaled.masked_fill(~kept, float("-inf"))


def _shift_xor_(x: Tensor, bits: int) -> Tensor:
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (32 - bits)) - 1))


def _mix_(x: Tensor, key: Tensor | int) -> Tensor:
    """Hash int32 in place; int32 arithmetic wraps and has the bits of uint32 arithmetic."""
    _shift_xor_(x, 16).mul_(_MULTIPLIER_1).add_(key)
    _shift_xor_(x, 15).mul_(_MULTIPLIER_2)
    return _shift_xor_(x, 15)


def random_bits(streams: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Hash (stream, position, token id).

    Args:
        streams: int32 [R, 2], 64 bits that identify each row's random stream.
        positions: int32 [R], position of the token that is drawn.
        vocab_size: V.

    Returns:
        int32 [R, V], all 32 bits random.
    """
    keys = _mix_(streams ^ positions[:, None], 0)
    token_ids = torch.arange(vocab_size, dtype=torch.int32, device=streams.device)
    return _mix_(token_ids ^ keys[:, :1], keys[:, 1:])


def log_exponential(bits: Tensor) -> Tensor:
    """Turn random bits into logarithms of standard exponential variates (negative Gumbel noise), between -22.3 and 2.9.

    The low 31 bits give u in (0, 1); the result is log(-log(1 - u)). Small variates win, and they have the finest u in float32.

    Args:
        bits: int32, any shape; overwritten.

    Returns:
        float32 of the same shape, finite for all bits.
    """
    minus_u = bits.bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(-(2.0**-31)).clamp_min_(-_LARGEST_BELOW_ONE)
    return minus_u.log1p_().neg_().log_()


def draw(scaled: Tensor, streams: Tensor, positions: Tensor) -> Tensor:
    """Draw one token per row from ``softmax(scaled)``: the one with the smallest exponential variate of rate ``exp(scaled)``.

    Args:
        scaled: float32 [R, V].
        streams: int32 [R, 2].
        positions: int32 [R].

    Returns:
        int64 [R]; each depends only on its own row, stream and position.
    """
    return (scaled - log_exponential(random_bits(streams, positions, scaled.shape[-1]))).argmax(dim=-1)


@op("sampling.triton:token_logprobs_triton")
def token_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probabilities of given tokens and of the best tokens.

    Args:
        logits: float32 [T, V].
        token_ids: int64 [T].
        k: Number of best tokens, at most V.

    Returns:
        Log-probabilities of the tokens, float32 [T]; their ranks, int32 [T], 1 plus the number of strictly more probable tokens;
        the best tokens, int32 [T, k], ties by token id; and their log-probabilities, float32 [T, k].
    """
    token_ids = token_ids.unsqueeze(-1)
    logprobs = torch.log_softmax(logits, dim=-1)
    ranks = (logits > logits.gather(-1, token_ids)).sum(dim=-1, dtype=torch.int32).add_(1)
    best = best_tokens(logits, k)
    return logprobs.gather(-1, token_ids).squeeze(-1), ranks, best.to(torch.int32), logprobs.gather(-1, best)
