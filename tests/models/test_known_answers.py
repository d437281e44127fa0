"""Known answers of the specification (4.6, 9.3, 9.4): element values, hyper-connection coefficients, the whole tiny model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.hc import hc_project, hc_split
from dsv4lite.kernels.indexer import index_scores, select_entries
from dsv4lite.kernels.norm import rms_norm
from dsv4lite.kernels.quantize import (
    e2m1_codes,
    e2m1_values,
    hadamard,
    quantize_fp4,
    quantize_fp8,
    round_fp4,
    round_fp8,
)
from dsv4lite.kernels.rope import rope
from dsv4lite.kernels.routing import Router, route, softplus
from dsv4lite.models.deepseek_v4.batch import Batch
from dsv4lite.models.deepseek_v4.model import DeepseekV4
from dsv4lite.models.moe import Tokens
from dsv4lite.weights.quant import linear
from tests.golden import TINY, fill, plain, poisoned, tiny_checkpoint, tiny_ids, tiny_model

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=[False, True], ids=["library", "deterministic"])
def model(request: pytest.FixtureRequest) -> DeepseekV4:
    return tiny_model(deterministic=request.param)


def assert_values(got: Tensor, expected: Sequence[float] | Sequence[Sequence[float]]) -> None:
    wanted = torch.tensor(expected)
    assert got.shape == wanted.shape
    assert (got.detach() - wanted).abs().max() < TOLERANCE


def floats(text: str) -> list[float]:
    return [float(word) for word in text.split()]


class Trace:
    """What goes into and comes out of the sub-layers of one pass over ``count`` tokens."""

    def __init__(self, model: DeepseekV4, count: int) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.batch, self.caches = model.prepare(tiny_ids(count))
        hooks = []
        for i, block in enumerate(model.layers):
            for part in ("attn", "ffn"):
                hooks.append(getattr(block, part).register_forward_hook(self._keep(f"{i}.{part}")))
        with torch.no_grad():
            self.streams = model(self.batch, self.caches)
        for hook in hooks:
            hook.remove()

    def _keep(self, name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            self.tensors[name + ".in"] = args[0].x_TD if isinstance(args[0], Tokens) else args[0]
            self.tensors[name + ".out"] = output

        return hook


@pytest.fixture(scope="module")
def trace(model: DeepseekV4) -> Trace:
    return Trace(model, 37)


def logits_of(model: DeepseekV4, count: int) -> Tensor:
    with torch.no_grad():
        return model.logits(model.one_pass(tiny_ids(count)))


def mtp_logits_of(model: DeepseekV4, count: int) -> Tensor:
    """Run the MTP block over all positions but the last, each with the token that follows it."""
    ids = tiny_ids(count)
    batch, caches = model.prepare(ids[1:], drafter=True)
    with torch.no_grad():
        streams = model.one_pass(ids)[:-1]
        return model.mtp_logits(model.mtp_forward(streams, batch, caches[-1]))


# Elements (4.6) ---------------------------------------------------------------------


def test_e4m3_rounds_to_the_even_neighbour_and_clamps() -> None:
    # A group whose largest value is 448 has scale 1, so the values themselves are rounded; 464 is only reached before the clamp.
    assert round_fp8(torch.tensor([448.0, 17.0, 19.0, -17.0, -19.0]), 5).tolist() == [448.0, 16.0, 20.0, -16.0, -20.0]
    codes, scales = quantize_fp8(torch.tensor([464.0, 17.0]), 2)
    assert scales.item() == 128 and codes.float()[0] == 232.0 - 8.0  # 464 gets scale 2 instead of clamping: 232 rounds to even 224


def test_e2m1_ties_go_to_the_even_code() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert e2m1_values(e2m1_codes(ties)).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert e2m1_values(e2m1_codes(-ties)).tolist() == [-0.0, -1.0, -1.0, -2.0, -2.0, -4.0, -4.0]


def test_kv_groups_have_the_published_scales_and_codes() -> None:
    i = torch.arange(448)
    x = (((37 * i) % 101 - 50) / 16).to(torch.bfloat16)
    x[64:128] *= 100
    x[128:192] = 0
    codes, scales = quantize_fp8(x, 64)
    assert scales.tolist() == [120, 127, 105, 120, 120, 120, 120]
    assert codes.view(torch.uint8)[:8].tolist() == [252, 237, 116, 250, 220, 120, 247, 102]
    assert codes.view(torch.uint8)[64:72].tolist() == [224, 116, 244, 96, 120, 241, 108, 250]
    assert round_fp8(x, 64)[:6].tolist() == [-3.0, -0.8125, 1.5, -2.5, -0.1875, 2.0]


def test_hadamard_and_fp4_give_the_published_values() -> None:
    v = (((29 * torch.arange(128)) % 37) - 18) / 4
    turned = hadamard(v)
    assert_values(turned[:8], floats("0.265165 -0.132583 -0.265165 -1.635184 -0.530330 -1.635184 0 1.635184"))
    assert_values(turned.view(4, 32).abs().amax(-1), [13.081475, 4.905553, 8.175922, 4.905553])
    _, scales = quantize_fp4(turned)
    assert scales.tolist() == [127 + 2, 127, 127 + 1, 127]
    assert round_fp4(turned)[:8].tolist() == [0.0, -0.0, -0.0, -2.0, -0.0, -2.0, 0.0, 2.0]


# Hyper-connections (9.3) ----------------------------------------------------------------------------------------------------------


def test_hc_split_gives_the_published_coefficients() -> None:
    i = torch.arange(24, dtype=torch.float64)
    projected, base = i.sin().float()[None], (i.cos() / 2).float()
    pre, post, comb = hc_split(projected, base, torch.tensor([1.0, 0.5, 2.0]), iters=20, eps=1e-6)
    assert_values(pre[0], floats("0.622460 0.752432 0.668460 0.412444"))
    assert_values(post[0], floats("0.661310 0.832770 1.168564 1.338788"))
    assert_values(
        comb[0],
        [
            floats("0.578847 0.303878 0.080179 0.037085"),
            floats("0.010414 0.177903 0.652372 0.159315"),
            floats("0.038741 0.034607 0.144959 0.781709"),
            floats("0.371998 0.483612 0.122489 0.021890"),
        ],
    )
    assert (comb[0].sum(0) - 0.999999).abs().max() < 2e-6
    assert (comb[0].sum(1) - torch.tensor([0.999988, 1.000004, 1.000015, 0.999989])).abs().max() < 2e-6


# The tiny model (9.4) ---------------------------------------------------------------------


def test_generator_gives_the_published_weights_and_ids() -> None:
    weights = tiny_checkpoint()
    assert_values(weights["layers.1.attn.wq_b.weight"][0, :3], [0.25201, -0.34608, -0.34570])
    assert_values(weights["layers.2.ffn.gate.bias"][:3], [0.00929, 0.50773, -0.02701])
    assert_values(weights["layers.1.attn_norm.weight"][:3], [0.78196, 1.33502, 0.55400])
    assert tiny_ids(12) == [1, 11, 35, 12, 3, 8, 27, 60, 46, 46, 60, 27]


LOGITS = {
    1: ("15", "-0.72220 -1.55244 -1.21722 1.52415 0.78291 -1.49921 -2.07343 0.30994", 9.22881),
    11: (
        "15 32 54 42 18 18 44 25 19 47 25",
        "-1.74667 1.94293 0.67486 0.71959 -0.54916 0.07635 0.91733 0.38401",
        10.27604,
    ),
    37: (
        "15 32 54 42 18 18 44 25 19 47 25 1 39 39 9 52 7 47 38 7 55 36 45 3 45 1 5 19 18 53 35 46 18 5 49 55 2",
        "0.21392 -0.02345 2.39978 -0.23556 0.16599 0.03305 1.54103 0.74592",
        6.03148,
    ),
}
MTP_LOGITS = {
    11: ("-0.77139 -2.17750 -1.27881 -0.21993 -0.05030 0.53619 0.09644 0.69680", 8.85446),
    37: ("-0.40024 0.82864 0.16639 -0.20144 -0.30699 -0.56196 0.81236 -0.98837", 7.38435),
}


@pytest.mark.parametrize("count", LOGITS)
def test_logits_are_the_published_ones(model: DeepseekV4, count: int) -> None:
    argmax, last, norm = LOGITS[count]
    logits = logits_of(model, count)
    assert logits.dtype == torch.float32 and logits.shape == (count, TINY.vocab_size)
    assert logits.argmax(-1).tolist() == [int(word) for word in argmax.split()]
    assert_values(logits[-1, :8], floats(last))
    assert_values(logits[-1].norm(), norm)


@pytest.mark.parametrize("count", MTP_LOGITS)
def test_mtp_logits_are_the_published_ones(model: DeepseekV4, count: int) -> None:
    last, norm = MTP_LOGITS[count]
    logits = mtp_logits_of(model, count)
    assert logits.shape == (count - 1, TINY.vocab_size)
    assert_values(logits[-1, :8], floats(last))
    assert_values(logits[-1].norm(), norm)


NORMS = [
    "6.84342 6.84342 6.84342 6.84342",
    "7.76526 7.11214 8.01829 7.44387",
    "7.54840 7.41712 7.39711 7.52155",
    "7.64409 8.05649 7.61917 7.60503",
    "7.74099 7.66689 8.16643 7.84802",
    "8.64745 8.76444 8.94657 8.80517",
]


@pytest.mark.parametrize("layers", range(6))
def test_streams_after_each_layer_have_the_published_norms(layers: int) -> None:
    config = replace(TINY, num_hidden_layers=layers, num_mtp_layers=0, ratios=TINY.ratios[:layers])
    absent = ("mtp.", *(f"layers.{i}." for i in range(layers, TINY.num_hidden_layers)))
    cut = {name: tensor for name, tensor in tiny_checkpoint().items() if not name.startswith(absent)}
    model = fill(poisoned(config, plain()), cut)
    with torch.no_grad():
        streams = model.one_pass(tiny_ids(37))
    assert_values(streams[-1].norm(dim=-1), floats(NORMS[layers]))


def coefficients(model: DeepseekV4, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    weights = model.layers[0].hc_attn.weights
    with torch.no_grad():
        projected = hc_project(streams, weights.fn, TINY.norm_eps, model.numerics.row_tile)
        return hc_split(projected, weights.base, weights.scale, TINY.sinkhorn_iters, TINY.hc_eps)


def test_first_layer_mixes_and_attends_as_published(model: DeepseekV4, trace: Trace) -> None:
    embedded = model.embed[torch.tensor(tiny_ids(37)[-1:])]
    pre, post, comb = coefficients(model, embedded[:, None].repeat(1, 4, 1))
    assert_values(pre[0], floats("0.40472 0.77730 0.76176 0.66798"))
    assert_values(post[0], floats("1.65295 0.17257 0.46986 0.51659"))
    assert_values(
        comb[0],
        [
            floats("0.49395 0.06268 0.10634 0.33703"),
            floats("0.07964 0.29077 0.60687 0.02272"),
            floats("0.38169 0.16523 0.18536 0.26772"),
            floats("0.04472 0.48133 0.10144 0.37252"),
        ],
    )
    assert_values(trace.tensors["0.attn.in"][-1, :5], floats("-1.20180 2.21309 -1.15400 -0.13831 -1.50809"))
    assert_values(trace.tensors["0.attn.out"][-1, :5], floats("0.28757 0.25387 0.48901 -0.41925 0.38480"))


def stored(trace: Trace, layer: int, what: str) -> Tensor:
    store = trace.caches[layer].stores[what]
    return store.read(torch.arange(len(store.memory) * store.rows_per_page), torch.float32)


def test_second_layer_compresses_and_selects_as_published(model: DeepseekV4, trace: Trace) -> None:
    x = trace.tensors["1.attn.in"]
    assert_values(x[-1, :5], floats("-0.46731 2.28155 -0.25697 -0.45556 -1.08565"))
    entries, keys = stored(trace, 1, "entries"), stored(trace, 1, "keys")
    assert_values(entries[0, :4], floats("0.18289 -1.79158 -0.72974 -1.86815"))
    assert_values(entries[8, :4], floats("0.45692 -0.14300 0.09767 1.61141"))
    assert_values(entries[8, 24:28], floats("0.90785 -0.57101 -0.07478 0.24883"))
    # The published key went through the Hadamard transform, which cancels against the queries' where nothing is rounded.
    assert_values(hadamard(keys[8])[:4], floats("-0.74588 1.26416 1.61646 -0.24099"))
    scores, chosen = selection(model, 1, x, trace.batch, keys)
    published = "-0.65051 -0.27271 -0.53126 -0.22793 -0.53352 -0.30147 0.21397 -0.82255 0.00368"
    assert_values(scores[-1], floats(published))
    assert sorted(chosen[-1].tolist()) == [3, 6, 8]
    assert_values(trace.tensors["1.attn.out"][-1, :5], floats("-0.77074 -0.34021 0.23119 0.27276 -0.24296"))


def selection(model: DeepseekV4, layer: int, x: Tensor, batch: Batch, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat the selection of a csa layer from its input; return scores [T, E] and the chosen entries."""
    attn, c = model.layers[layer].attn, TINY
    angles = batch.compress_rope_T
    with torch.no_grad():
        qr = rms_norm(linear(x, attn.wq_a_wkv)[:, : c.q_lora_rank], attn.q_norm, c.norm_eps)
        queries = linear(qr, attn.wq_b)[:, c.num_attention_heads * c.head_dim :].view(len(x), c.index_heads, c.index_dim)
        weights = linear(x, attn.compress_in, torch.float32)[:, -c.index_heads :] * (c.index_dim * c.index_heads) ** -0.5
        scores = index_scores(rope(queries, *angles), weights, keys[: len(x) // 4], row_tile=model.numerics.row_tile)
        return scores, select_entries(scores, (batch.paging.positions_T + 1) // 4, c.index_topk)[0]


def test_third_layer_pools_and_routes_as_published(model: DeepseekV4, trace: Trace) -> None:
    assert_values(stored(trace, 2, "entries")[3, :4], floats("-0.11550 -2.06045 -1.24213 -0.45155"))
    assert_values(trace.tensors["2.attn.out"][-1, :5], floats("0.22977 -0.16671 0.03972 -0.37434 -0.24496"))
    ffn = model.layers[2].ffn
    with torch.no_grad():
        logits = linear(trace.tensors["2.ffn.in"][-1:], ffn.gate, torch.float32)
        assert_values(softplus(logits).sqrt()[0], floats("0.23552 0.54539 1.14200 0.41400 0.69623 0.66535"))
        chosen, weights = route(logits, Router(TINY.experts_per_token, TINY.route_scale, ffn.bias))
    assert chosen[0].tolist() == [1, 2]
    assert_values(weights[0], [0.48482, 1.01518])
    assert_values(trace.tensors["2.ffn.out"][-1, :5], floats("0.17598 -0.21233 -0.13241 0.08827 0.26519"))
