"""The residual streams that hyper-connections read from and write to (specification 3.1).

Shape suffixes: T tokens, N streams, D model.
"""

from __future__ import annotations

from torch import Tensor

from dsv4lite.kernels.hc import HcInputs, HcMix, HcSettings, HcWeights, hc_enter, hc_expand
from dsv4lite.models.deepseek_v4.config import V4Config
from dsv4lite.weights.quant import Numerics, Rounded


class Streams:
    """The residual streams between sub-layers. A sub-layer's output is added when the next one enters, in one pass over them."""

    def __init__(self, streams_TND: Tensor, config: V4Config, numerics: Numerics) -> None:
        self.value_TND = streams_TND
        self._pending: tuple[Tensor, HcMix] | None = None
        self._mix: HcMix | None = None
        self._settings = HcSettings(config.sinkhorn_iters, config.hc_eps, config.norm_eps)
        self._row_tile = numerics.row_tile
        self._rounded = numerics.resident_fp8  # FP8 weights multiply FP8 inputs

    def enter(self, weights: HcWeights, norm_weight: Tensor) -> tuple[Tensor, Rounded | None]:
        """Return the sub-layer's normed input [T, D], and the same in FP8 if its weights are FP8."""
        pending, self._pending = self._pending, None
        self.value_TND, x_TD, rounded, self._mix = hc_enter(
            HcInputs(self.value_TND, pending, weights, norm_weight, self._settings, self._rounded, self._row_tile)
        )
        return x_TD, rounded

    def leave(self, output_TD: Tensor) -> None:
        """Keep the sub-layer's output until ``enter`` or ``final`` adds it to the streams."""
        assert self._mix is not None and self._pending is None
        self._pending = (output_TD, self._mix)

    def mean(self) -> Tensor:
        """Return the average of the streams, [T, D]."""
        return self.final().float().mean(1).to(self.value_TND.dtype)

    def final(self) -> Tensor:
        """Return the streams [T, N, D], with the last sub-layer's output written."""
        if self._pending is not None:
            self.value_TND, self._pending = hc_expand(self._pending[0], self.value_TND, self._pending[1]), None
        return self.value_TND
