"""What the package's launchers ask Triton to compile for a chip, found on a machine without one.

Tensors on the device ``meta`` stand for those of the pretended chip: they have shapes and strides, and neither memory nor numbers.
Steps of the released models and of small ones run on them, and beside these the ops that such steps do not contain.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4lite.config import tiny_model
from dsv4lite.engine.packing import padding
from dsv4lite.engine.step_graphs import StepGraphs
from dsv4lite.kernels import warmup
from dsv4lite.kernels.dispatch import Gpu
from dsv4lite.kernels.experts import ExpertInputs, ExpertSum, Tiles, experts_forward, experts_outputs
from dsv4lite.kernels.experts.decode_small import Held, MoeInputs, moe_decode_small
from dsv4lite.kernels.gemm import float_linear, fp8_linear, fp8_weight_linear, pair_linear
from dsv4lite.kernels.indexer import select_paged
from dsv4lite.kernels.peer_memory import (
    Inbox,
    TokenRows,
    all_gather,
    all_gather_columns,
    all_gather_shards,
    all_reduce,
    all_reduce_shards,
    reduce_scatter,
    reduce_scatter_shards,
)
from dsv4lite.kernels.quantize import quantize_fp8, quantize_packed_fp4
from dsv4lite.kernels.routing import Copies, Router
from dsv4lite.kernels.sampling import argmax_finite, token_logprobs
from dsv4lite.kernels.sampling.rows import EVERYTHING, NUM_COLUMNS, RowSpace, SampleInputs, sample_rows
from dsv4lite.kernels.spans import place_spans
from dsv4lite.kernels.warmup import Specialization, recording
from dsv4lite.models.deepseek_mla import config as mla_config
from dsv4lite.models.deepseek_mla.model import DeepseekMla
from dsv4lite.models.deepseek_v4.config import parse_config
from dsv4lite.models.deepseek_v4.model import DeepseekV4
from dsv4lite.models.family import Model
from dsv4lite.state.spec import StateSizes
from dsv4lite.state.store import StateCache
from dsv4lite.weights.quant import Numerics
from tests.kernels.steps import step_of
from tests.mla import V2, V2_LITE, V3, V32
from tests.tiny import FLASH, PRO, TINY

CHIPS = (80, 89, 90, 100, 120)
META = torch.device("meta")
RATIOS = (0, 4, 128)  # a layer of each kind; the first is hashed
# Numbers of tokens, one for each range in which launchers choose other tiles: of one sequence, and of sequences of one token each.
PREFILLS, DECODES = (2, 17, 40, 130, 300, 600, 4096), (1, 2, 5, 16, 64)
FEWER_PREFILLS, FEWER_DECODES = (2, 130, 4096), (1, 16)  # of all but one model
CONTEXT = 65536  # of the longest sequence; others are short
VOCABULARY = 129280


@contextmanager
def pretended(capability: int) -> Iterator[None]:
    """Let launchers take ``meta`` tensors for those of a chip; it compiles nothing and launches nothing."""
    with warmup.pretended(Gpu(capability, 132)), torch.inference_mode():
        yield


def launches(capability: int) -> list[Specialization]:
    """Return what a chip's launches would have compiled, each once, in the order of the launches."""
    found: list[Specialization] = []
    with pretended(capability):
        for work in _works():
            with recording() as wanted:
                work()
            for one in wanted:
                found.append(one.specialization)
                one.install(object())  # a launch does not ask again
    return found


def _works() -> Iterator[Callable[[], object]]:
    fp4 = {"quantized": True, "dense_fp8": True, "expert_format": "fp4"}
    block_fp8 = {"quantized": True, "dense_fp8": True, "scale_dtype": torch.float32, "expert_format": "fp8"}
    int4 = {"quantized": False, "expert_format": "four_bit", "dense_four_bit": True, "group": 128, "scale_dtype": torch.float16}
    small = json.loads((Path(tiny_model()) / "config.json").read_text())
    for config, numerics in (
        (small, fp4),
        (TINY, {"quantized": False, "dtype": torch.float32}),
        (TINY, {"quantized": False}),
        (FLASH, {"quantized": False}),
        (FLASH, {"quantized": False, "dtype": torch.float32}),
        (FLASH, fp4 | {"expert_format": "fp8"}),
        ({**FLASH, "num_attention_heads": 32}, fp4),
        (PRO, fp4),
        (FLASH, fp4 | {"deterministic": True}),
    ):
        yield from _steps(_v4(config, numerics), FEWER_PREFILLS, FEWER_DECODES)
    yield from _steps(_v4(FLASH, fp4), PREFILLS, DECODES)
    for config, numerics in (
        (V2_LITE, {"quantized": False}),
        (V2_LITE, {"quantized": False, "fp8_rows": True}),
        (V2_LITE, {"quantized": False, "dtype": torch.float32}),
        (V2_LITE, {"quantized": False, "dtype": torch.float32, "fp8_rows": True}),
        (V2, {"quantized": False, "deterministic": True}),
        (V2, {"quantized": False, "deterministic": True, "fp8_rows": True}),
        (V3, block_fp8 | {"fp8_rows": True}),
        (V3, block_fp8 | {"fp8_rows": False}),
        (V32, block_fp8 | {"fp8_rows": True}),
        (V32, {"quantized": False}),
        (V3, int4),
        (V3, int4 | {"dtype": torch.float32, "group": 32, "scale_dtype": torch.bfloat16}),
        (V3, int4 | {"group": 16, "scale_dtype": torch.float8_e4m3fn}),
    ):
        yield from _steps(_mla(config, numerics), FEWER_PREFILLS, FEWER_DECODES)
    yield from (_sampling, _runs, _ranks, _products, _experts, _selection, _updates)


def _numerics(settings: Mapping[str, Any]) -> Numerics:
    return Numerics.choose(**{"dtype": torch.bfloat16, "deterministic": False, **settings}, device=META)


def _v4(settings: Mapping[str, Any], numerics: Mapping[str, Any]) -> Model:
    """Return a model with a layer of each kind."""
    config = replace(parse_config(settings), num_hidden_layers=len(RATIOS), ratios=RATIOS, num_hash_layers=1, num_mtp_layers=0)
    return DeepseekV4(config, _numerics(numerics))


def _mla(settings: Mapping[str, Any], numerics: Mapping[str, Any]) -> Model:
    config = replace(mla_config.parse_config(settings), num_hidden_layers=2, routed=(False, True), num_mtp_layers=0)
    return DeepseekMla(config, _numerics(numerics))


def _steps(model: Model, prefills: Sequence[int], decodes: Sequence[int]) -> Iterator[Callable[[], object]]:
    """Yield steps of a model."""
    sizes = StateSizes(grow_pages=16, window_pages=16, slots=max(decodes), snapshots=0)
    cache = StateCache.allocate(model.state_spec, sizes, META)
    graphs = StepGraphs(model, cache, max_num_seqs=max(decodes), max_model_len=CONTEXT)

    def prefill(tokens: int, longest: int) -> None:
        follow = longest > tokens
        batch = padding(tokens, model, sequences=max(1, tokens // 2) if follow else 1)
        batch.max_tokens = longest
        if follow:
            batch.paging = replace(batch.paging, host_spans=None)
        model.logits(model(batch, cache.layers)[:1])

    for tokens in prefills:
        yield partial(prefill, tokens, CONTEXT)
    for tokens in (prefills[0], prefills[-1]):
        yield partial(prefill, tokens, tokens)
    for shape in graphs.shapes:
        if shape.sequences in decodes:
            yield partial(graphs.dry_run, shape)


def _selection() -> None:
    """The best of as many scores as one program takes, at each of its sizes, and of more."""
    for tokens, columns in ((2, 1024), (2, 2048), (2, 4096), (2, 8192), (2, 16384), (2, 16388), (200, 32768)):
        paging = step_of([0] * tokens, [1] * tokens, device=META)
        select_paged(_empty(tokens, columns, dtype=torch.bfloat16), paging, 4, 0, _empty(tokens, 512, dtype=torch.int32))


def _updates() -> None:
    """What quantizes and stores new weights."""
    for dtype in (torch.bfloat16, torch.float32):
        quantize_packed_fp4(_empty(2048, 4096, dtype=dtype))
    for fp4, half in product((True, False), (None, 1)):
        rows, columns = 2048, 4096
        codes, scales = Tiles.shapes(1, rows * (1 if half is None else 2), columns, fp4=fp4)
        weight = _empty(rows, columns // 2, dtype=torch.uint8) if fp4 else _empty(rows, columns, dtype=torch.float8_e4m3fn)
        scale = _empty(rows, columns // 32, dtype=torch.uint8) if fp4 else _empty(rows // 128, columns // 128)
        Tiles(_empty(*codes, dtype=torch.uint8), _empty(*scales, dtype=torch.int32)).store(0, weight, scale, half)


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def _sampling() -> None:
    rows, slots = 8, 16
    logits, one = _empty(rows, VOCABULARY), _empty(rows, dtype=torch.int32)
    space = RowSpace.allocate(rows, VOCABULARY, META)
    settings, last_token = _empty(slots + 1, NUM_COLUMNS, dtype=torch.float64), _empty(slots + 1, dtype=torch.int64)
    sample_rows(SampleInputs(logits, argmax_finite(logits), one, one, settings, last_token, space, EVERYTHING))
    token_logprobs(logits, _empty(rows, dtype=torch.int64), 5)
    argmax_finite(_empty(1, 61))


def _runs() -> None:
    last_token = _empty(17, dtype=torch.int64)
    for size, width, guesses in ((1, 1, 0), (4, 2, 1), (64, 5, 4)):
        columns = (_empty(3, 16, dtype=torch.int64), _empty(guesses, 16, dtype=torch.int64))
        place_spans(_empty(15, size, dtype=torch.int32), width, last_token, *columns)


def _ranks() -> None:
    """Sums over ranks, and rows on their way to other ranks' experts."""
    tokens, hidden, chosen = 4, 4096, 6
    for ranks in (2, 4, 8):
        calls = _empty(1 << 12, dtype=torch.int64)
        inbox = Inbox(_empty(ranks + 1, dtype=torch.int64), calls, _empty(1, dtype=torch.int32), 0, 1 << 22)
        part, bf16 = _empty(tokens, hidden), _empty(tokens, hidden, dtype=torch.bfloat16)
        all_reduce(part, inbox, torch.bfloat16, part)
        all_reduce(part, inbox, torch.float32)
        all_reduce_shards(part, inbox)
        all_reduce_shards(part, inbox, part)
        all_gather_columns(part, inbox)
        all_gather_shards(bf16, inbox)
        reduce_scatter_shards(part, inbox)
        reduce_scatter_shards(part, inbox, part)
        ids = _empty(tokens, dtype=torch.int64)
        all_gather(TokenRows(bf16, *quantize_fp8(bf16, 128), ids, ids.int()), inbox, tokens)
        slots_TK = _empty(ranks * tokens, chosen, dtype=torch.int64)
        outputs = _empty(ranks * tokens, chosen, hidden, dtype=torch.bfloat16)
        shared = _empty(ranks * tokens, hidden, dtype=torch.bfloat16)
        of_experts = ExpertSum(slots_TK, outputs, shared.float(), 256)
        all_reduce(ExpertSum(slots_TK, outputs.float(), shared.float(), 256), inbox, torch.float32)
        all_reduce(of_experts, inbox, torch.bfloat16)
        all_reduce_shards(of_experts, inbox)
        reduce_scatter_shards(of_experts, inbox)
        reduce_scatter(of_experts._replace(shared_TD=shared), inbox, tokens, torch.bfloat16)


def _products() -> None:
    """Products whose inputs are no whole blocks, or whose weights have a scale in each row."""
    outs, groups = 96, 2
    for rows in (1, 16, 130, 4096):
        for inputs in (200, 4096):
            x = _empty(rows, inputs, dtype=torch.bfloat16)
            rounded, blocks = quantize_fp8(x, 128), -(-inputs // 128)
            codes = _empty(groups, outs, inputs, dtype=torch.float8_e4m3fn)
            scales, plain = _empty(groups * outs, blocks, dtype=torch.uint8), _empty(groups, outs, inputs, dtype=torch.bfloat16)
            fp8_linear(*rounded, codes[0], scales[:outs])
            pair_linear(x, *rounded, codes[0], scales[:outs], plain[0])
            fp8_weight_linear(x[:, None].expand(-1, groups, -1), codes, scales)
            float_linear(x[:, None].expand(-1, groups, -1), plain, torch.float32)
    # Whatever the shape calls for between few rows and many.
    for rows, outs in ((64, 129280), (512, 129280), *product((64, 128, 256, 512), (256, 1024, 1536, 2624, 4096))):
        x, blocks = _empty(rows, 4096, dtype=torch.bfloat16), (-(-outs // 128), 32)
        codes, scales = _empty(outs, 4096, dtype=torch.float8_e4m3fn), _empty(*blocks, dtype=torch.uint8)
        fp8_linear(*quantize_fp8(x, 128), codes, scales)
        fp8_weight_linear(x[:, None], codes[None], scales)
        float_linear(x, _empty(outs, 4096, dtype=torch.bfloat16), torch.float32)


def _experts() -> None:
    """Experts of which this rank has some, with copies, or a part of each."""
    count, hidden, top_k, numbers = 128, 4096, 6, (1, 2, 4, 8, 16, 600, 4096)
    x, w13, w2 = (_empty(*shape, dtype=torch.bfloat16) for shape in ((4096, hidden), (count, 1920, hidden), (count, hidden, 960)))
    slots_TK, weight_TK = _empty(4096, top_k, dtype=torch.int64), _empty(4096, top_k)
    experts_outputs(ExpertInputs(x, None, slots_TK, weight_TK, w13, w2, 10.0))
    # For many rows of FP4, Hopper has kernels of its own if the width is a multiple of 256. 1920 is not.
    for fp4, width, wanted in ((False, 2048, numbers), (True, 2048, numbers), (True, 1920, numbers[-1:])):
        w13, w2 = (
            Tiles(_empty(*codes, dtype=torch.uint8), _empty(*scales, dtype=torch.int32))
            for codes, scales in (Tiles.shapes(count, *size, fp4=fp4) for size in ((2 * width, hidden), (hidden, width)))
        )
        for tokens in wanted:
            rounded = quantize_fp8(_empty(tokens, hidden, dtype=torch.bfloat16), 128)
            slots_TK, weight_TK = _empty(tokens, top_k, dtype=torch.int64), _empty(tokens, top_k)
            experts_forward(ExpertInputs(*rounded, slots_TK, weight_TK, w13, w2, 10.0))
            if tokens > 16:
                continue
            tables = (_empty(257, 17, dtype=torch.int64), _empty(257, dtype=torch.int64), _empty(257, dtype=torch.int64))
            held = Held(shared_partial=True, first=count, copies=Copies(*tables))
            ids = _empty(tokens, dtype=torch.int32)
            router = Router(top_k, 1.5, _empty(256), None, ids, ids)
            shared = (_empty(hidden, width, dtype=torch.float8_e4m3fn), _empty(hidden // 128, width // 128, dtype=torch.uint8))
            for h_TI in (None, _empty(tokens, 2 * width, dtype=torch.bfloat16)):
                moe_decode_small(MoeInputs(_empty(tokens, 256), router, *rounded, h_TI, *shared, w13, w2, 10.0, held))
