"""Random weights in the official formats, to run, time and size a model without its checkpoint.

Activations stay finite and of order one, experts are chosen about evenly, and hash layers hold random expert ids. Every tensor
has its own generator, seeded with its name, so it depends neither on other tensors nor on global random state. CPU and GPU draw
different numbers.
"""

from __future__ import annotations

import zlib
from collections.abc import Container, Iterator, Mapping, Sequence
from math import log2, prod, sqrt

import torch
from torch import Generator, Tensor

from dsv4lite.kernels.experts import TILE_COLUMNS, TILE_ROWS, Tiles, scale_words
from dsv4lite.models.config import ModelConfig
from dsv4lite.parallel.shard import Cut, blocks_of
from dsv4lite.weights.checkpoint import ExpertFormat
from dsv4lite.weights.tensors import StoredTensor, Tensors, stored_tensors

# Drawing normal numbers is slow. Random bits become floats if sign, mantissa and the last bit of the exponent are random, and the
# rest of the exponent is fixed: magnitudes from 0.5 to below 2, in any format.
_E4M3_FREE, _E4M3_FIXED = 0x80 | 0x0F, 0x30
_BF16_FREE, _BF16_FIXED = 0x80FF - 0x10000, 0x3F00  # as int16
_BF16_STD = sqrt((0.5**2 + 1) * 7 / 3 / 2)  # of numbers uniform in [0.5, 1) and in [1, 2)
_CODE_STD: Mapping[torch.dtype, float] = {
    torch.float8_e4m3fn: sqrt(sum((2.0**e * (1 + m / 8)) ** 2 for e in (-1, 0) for m in range(8)) / 16),
    torch.int8: sqrt(sum(x * x for x in (0, 0.5, 1, 1.5, 2, 3, 4, 6)) / 8),  # every code of e2m1 is a finite number
}
_SCALE_STEPS = (0, 1)  # exponents vary between blocks, so that tests notice a scale of the wrong block
_SCALE_STD = sqrt(sum(4.0**step for step in _SCALE_STEPS) / len(_SCALE_STEPS))

# (mean, standard deviation) by the end of the name; all others are matrices with standard deviation 1 / sqrt(in).
_NUMBERS: Mapping[str, tuple[float, float]] = {
    "norm.weight": (1.0, 0.0),
    "_scale": (1.0, 0.0),
    "_base": (0.0, 0.5),
    "attn_sink": (0.0, 1.0),
    "ape": (0.0, 0.5),
    "gate.bias": (0.0, 0.0),
    "embed.weight": (0.0, 1.0),
}


def dummy_tensors(
    config: ModelConfig,
    tensors: Tensors,
    *,
    expert_format: ExpertFormat,
    quantized: bool,
    seed: int = 0,
    device: str | torch.device = "cpu",
    names: Container[str] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Return random tensors for a whole checkpoint, one at a time, each scale before its weight.

    Args:
        expert_format: Format of the routed experts.
        quantized: Whether the dense matrices are FP8.
        seed: Seeds all generators, together with the names.
        device: Device on which the tensors are made.
        names: Weights to return, with their scales; default is all.

    Yields:
        Official name, and a newly allocated tensor in the official dtype.
    """
    for name, spec in tensors.specs(config).items():
        if names is not None and name not in names:
            continue
        stored = stored_tensors(name, spec, quantized=quantized, expert_format=expert_format)
        fan_in = spec.shape[-1]
        for part, like in sorted(stored.items(), key=lambda item: item[0] == name):
            generator = _generator(part, seed, device)
            if like.dtype == torch.float8_e8m0fnu:
                yield part, _scales(like.shape, _least_scale(fan_in, stored[name].dtype), generator)
            elif like.dtype == torch.int64:
                draws = torch.rand(like.shape[0], config.num_experts, generator=generator, dtype=torch.float32, device=device)
                yield part, draws.topk(like.shape[1]).indices
            elif like.dtype in _CODE_STD:
                codes = _bytes(like.shape, generator)
                if like.dtype == torch.float8_e4m3fn:
                    codes.bitwise_and_(_E4M3_FREE).bitwise_or_(_E4M3_FIXED)
                yield part, codes.view(like.dtype)
            else:
                yield part, _unquantized(part, like, fan_in, generator)


def fill_tiles(
    tiles: Tiles, names: Sequence[str], seed: int = 0, *, shape: tuple[int, int] | None = None, cut: Cut | None = None
) -> None:
    """Fill a stack of experts in place with numbers distributed like those of ``dummy_tensors``.

    Args:
        tiles: The stack; every code and every scale is overwritten.
        names: Names of its matrices, which seed their generators.
        seed: Seeds all generators, together with the names.
        shape: Shape of the whole matrices in elements; default is that of the stack's matrices.
        cut: The part of the whole matrices that the stack holds, in elements.
    """
    device, (rows, columns) = tiles.codes.device, shape or tiles.shape[1:]
    places = [tiles.codes, tiles.scales]
    whole = places
    if (rows, columns) != tiles.shape[1:]:
        size = (1, rows // TILE_ROWS, columns // TILE_COLUMNS)
        whole = [words.new_empty(*size, words.shape[-1]) for words in places]
    for i, name in enumerate(names):
        generator = _generator(name, seed, device)
        for words, made in zip(places, whole, strict=True):
            if made is words:
                _fill(words[i].view(torch.int64), generator)
            else:
                assert cut is not None
                _fill(made.view(torch.int64), generator)
                words[i].copy_(made[0][blocks_of(cut, (TILE_ROWS, TILE_COLUMNS))])
    if tiles.fp4:  # four exponents in a word, from their bits 2 on
        least = torch.tensor([_least_scale(columns, torch.int8)], dtype=torch.int64, device="cpu")
        word = int(scale_words(least.repeat(4), least - 26))
        tiles.scales.bitwise_and_(0x04040404).add_(word)
    else:  # bits of a float32
        tiles.codes.bitwise_and_(_E4M3_FREE).bitwise_or_(_E4M3_FIXED)
        tiles.scales.bitwise_and_(1).add_(_least_scale(columns, torch.float8_e4m3fn)).bitwise_left_shift_(23)


def _generator(name: str, seed: int, device: str | torch.device) -> Generator:
    return Generator(device).manual_seed(zlib.crc32(f"{seed}:{name}".encode()))


def _unquantized(name: str, like: StoredTensor, fan_in: int, generator: Generator) -> Tensor:
    mean, std = next((value for end, value in _NUMBERS.items() if name.endswith(end)), (0.0, 1 / sqrt(fan_in)))
    if std and like.dtype == torch.bfloat16:
        bits = _bytes((*like.shape[:-1], 2 * like.shape[-1]), generator).view(torch.int16)
        return bits.bitwise_and_(_BF16_FREE).bitwise_or_(_BF16_FIXED).view(torch.bfloat16).mul_(std / _BF16_STD)
    tensor = torch.empty(like.shape, dtype=like.dtype, device=generator.device)
    return tensor.normal_(mean, std, generator=generator) if std else tensor.fill_(mean)


def _least_scale(fan_in: int, codes: torch.dtype) -> int:
    """Return the smaller e8m0 byte of the two scales that give random codes a standard deviation of about 1 / sqrt(fan_in)."""
    return 127 + round(log2(1 / (sqrt(fan_in) * _CODE_STD[codes] * _SCALE_STD)))


def _scales(shape: tuple[int, ...], least: int, generator: Generator) -> Tensor:
    """Return random e8m0 scales: ``least`` or one more."""
    steps = torch.randint(
        _SCALE_STEPS[0], _SCALE_STEPS[-1] + 1, shape, generator=generator, dtype=torch.int64, device=generator.device
    )
    return (steps + least).to(torch.uint8).view(torch.float8_e8m0fnu)


def _bytes(shape: tuple[int, ...], generator: Generator) -> Tensor:
    """Return random bytes, drawn eight at a time."""
    count = prod(shape)
    words = _fill(torch.empty(-(-count // 8), dtype=torch.int64, device=generator.device), generator)
    return words.view(torch.uint8)[:count].view(shape)


def _fill(words: Tensor, generator: Generator) -> Tensor:
    """Fill int64 words with random bits."""
    return words.random_(-(2**63), None, generator=generator)
