"""Time hyper-connections, norm, quantizer and router: ``python -m examples.benchmarks.kernels.hc [--sweep]`` on a CUDA device.

Checks each op first. Replays a graph that walks through copies of the inputs larger than the L2 cache.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable

import torch

from dsv4lite.kernels.hc import HcInputs, HcMix, HcSettings, HcWeights, hc_enter, hc_expand
from dsv4lite.kernels.hc import prefill_triton as hc_triton
from dsv4lite.kernels.hc.prefill_triton import Tile, collapse_triton, expand_project_triton
from dsv4lite.kernels.norm import rms_norm
from dsv4lite.kernels.quantize import quantize_fp8
from dsv4lite.kernels.routing import Router, route
from examples.benchmarks.kernels.timing import BANDWIDTH, ROTATED, distance, microseconds

TOKENS = (1, 16, 64, 256, 512, 1024, 8192)
EPS = 1e-6

Op = Callable[[int], object]


def cases(tokens: int, width: int) -> dict[str, tuple[Op, int, int, float]]:
    """Return ops, how many copies of their inputs there are, the bytes each must move, and its error."""
    copies = min(64, max(2, ROTATED // (8 * tokens * width + 96 * 4 * width)))
    streams = [torch.randn(tokens, 4, width, device="cuda").bfloat16() for _ in range(copies)]
    ys = [torch.randn(tokens, width, device="cuda").bfloat16() for _ in range(copies)]
    mix = HcMix(torch.rand(tokens, 4, device="cuda"), torch.rand(tokens, 4, 4, device="cuda").softmax(-1))
    weights, heads = (
        [
            HcWeights(
                torch.randn(rows, 4 * width, device="cuda") / (4 * width) ** 0.5,
                torch.randn(rows, device="cuda"),
                torch.ones(scales, device="cuda"),
            )
            for _ in range(copies)
        ]
        for rows, scales in ((24, 3), (4, 1))
    )
    norm = torch.rand(width, device="cuda") + 0.5
    settings = HcSettings(20, EPS, EPS)
    small = slice(0, 256)

    left, sums = expand_project_triton(streams[0], (ys[0], mix), weights[0].fn, None)
    wanted = hc_expand.reference(ys[0][small], streams[0][small], HcMix(mix.post[small], mix.comb[small]))
    leave_error = distance(left[small], wanted)
    inputs = [HcInputs(x, None, w, norm, settings, quantize=True) for x, w in zip(streams, weights, strict=True)]
    head_inputs = [HcInputs(x, None, w, None, settings) for x, w in zip(streams, heads, strict=True)]
    entered = collapse_triton(left, sums, inputs[0])
    assert entered.rounded is not None and entered.mix is not None
    codes, scales = entered.rounded
    expected = hc_enter.reference(inputs[0]._replace(streams_TND=left[small]))
    assert expected.mix is not None
    collapse_error = max(distance(entered.x_TD[small], expected.x_TD), distance(entered.mix.comb[small], expected.mix.comb))
    wanted_codes, wanted_scales = quantize_fp8.reference(entered.x_TD, 128)
    assert torch.equal(codes.view(torch.uint8), wanted_codes.view(torch.uint8)) and torch.equal(scales, wanted_scales)
    got_codes, got_scales = quantize_fp8(ys[0], 128)
    wanted_codes, wanted_scales = quantize_fp8.reference(ys[0], 128)
    assert torch.equal(got_codes.view(torch.uint8), wanted_codes.view(torch.uint8)) and torch.equal(got_scales, wanted_scales)
    logits = [torch.randn(tokens, 256, device="cuda") for _ in range(copies)]
    router = Router(6, 1.5, torch.randn(256, device="cuda"))
    routed, wanted_routed = route(logits[0], router), route.reference(logits[0], router)
    assert torch.equal(routed[0], wanted_routed[0])
    few = head_inputs[0]._replace(streams_TND=streams[0][small])
    head_error = distance(hc_enter(head_inputs[0]).x_TD[small], hc_enter.reference(few).x_TD)
    row = 2 * tokens * width
    return {
        "expand_project": (
            lambda i: expand_project_triton(streams[i], (ys[i], mix), weights[i].fn, None),
            copies,
            9 * row + weights[0].fn.numel() * 4,
            leave_error,
        ),
        "collapse_quantize": (
            lambda i: collapse_triton(streams[i], sums, inputs[i]),
            copies,
            5 * row + row // 2,
            collapse_error,
        ),
        "head": (
            lambda i: hc_enter(head_inputs[i]),
            copies,
            9 * row + heads[0].fn.numel() * 4,
            head_error,
        ),
        "rms_norm": (
            lambda i: rms_norm(ys[i], norm, EPS),
            copies,
            2 * row,
            distance(rms_norm(ys[0], norm, EPS), rms_norm.reference(ys[0], norm, EPS)),
        ),
        "quantize_fp8": (lambda i: quantize_fp8(ys[i], 128), copies, row + row // 2, 0.0),
        "route": (lambda i: route(logits[i], router), copies, tokens * 1096, distance(routed[1], wanted_routed[1])),
    }


def main() -> None:
    """Print a table; with ``--sweep`` also other tiles."""
    print(f"{'op':<20}{'width':>6}{'tokens':>8}{'us':>9}{'TB/s':>7}{'roofline':>10}{'error':>10}")
    for width, tokens in itertools.product((4096, 7168), TOKENS):
        for name, (op, copies, moved, error) in cases(tokens, width).items():
            assert error < 5e-3, (name, tokens, error)
            us = microseconds(op, copies)
            rate = moved / us * 1e6
            speed = f"{us:>9.1f}{rate / 1e12:>7.2f}{rate / BANDWIDTH:>10.0%}"
            print(f"{name:<20}{width:>6}{tokens:>8}{speed}{error:>10.1e}", flush=True)
            if name == "expand_project" and "--sweep" in sys.argv:
                sweep(op, copies)


def sweep(op: Op, copies: int) -> None:
    """Print the times of other tiles."""
    chosen = hc_triton.tile_for
    for tokens, whole, warps, stages in itertools.product((64, 128), (False, True), (4, 8), (2, 3, 4)):
        if warps * 32 > 2 * tokens or (not whole and stages > 2):
            continue
        tile = Tile(tokens=tokens, whole=whole, num_warps=warps, num_stages=stages)
        hc_triton.tile_for = lambda tokens, tile=tile: tile
        try:
            print(f"    {microseconds(op, copies):>8.1f} us  {tile}", flush=True)
        except Exception as error:  # too much shared memory for this tile
            if "OutOfResources" not in type(error).__name__:
                raise
        finally:
            hc_triton.tile_for = chosen


if __name__ == "__main__":
    main()
