"""Launchers of ``hc_enter`` and ``hc_expand``; they choose the kernels."""

from __future__ import annotations

from torch import Tensor

from dsv4lite.kernels.hc import HcEntered, HcInputs, HcMix, has_kernel, suits_decode_small
from dsv4lite.kernels.hc import general_triton as general
from dsv4lite.kernels.hc import prefill_triton as prefill
from dsv4lite.kernels.hc.decode_small_triton import enter_triton
from dsv4lite.kernels.norm.triton import rms_norm_triton


def hc_expand_triton(output_TD: Tensor, streams_TND: Tensor, mix: HcMix) -> Tensor:
    """See ``hc.hc_expand``."""
    kernels = prefill if has_kernel(streams_TND.dtype, streams_TND.shape[1]) else general
    expanded: Tensor = kernels.expand_project_triton(streams_TND, (output_TD, mix), None, None)[0]
    return expanded


def hc_enter_triton(given: HcInputs) -> HcEntered:
    """See ``hc.hc_enter``."""
    streams_TND, pending, weights, norm_weight, settings, _, row_tile = given
    if norm_weight is not None and suits_decode_small(streams_TND, row_tile):
        return enter_triton(given)
    kernels = prefill if has_kernel(streams_TND.dtype, streams_TND.shape[1]) else general
    streams_TND, sums = kernels.expand_project_triton(streams_TND, pending, weights.fn, row_tile)
    entered: HcEntered = kernels.collapse_triton(streams_TND, sums, given)
    if given.is_head and norm_weight is not None:
        entered = entered._replace(x_TD=rms_norm_triton(entered.x_TD, norm_weight, settings.norm_eps))
    return entered
