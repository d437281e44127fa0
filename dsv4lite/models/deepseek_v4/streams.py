"""The residual streams that hyper-connections read from and write to (specification 3.1).

Shape suffixes: T tokens, P tokens of this rank's shard, N streams, D model.
"""

from __future__ import annotations

from torch import Tensor

from dsv4lite.kernels.hc import HcInputs, HcMix, HcSettings, HcWeights, hc_enter, hc_expand
from dsv4lite.kernels.quantize import quantize_fp8
from dsv4lite.models.deepseek_v4.config import V4Config
from dsv4lite.models.partial_sums import ALL_TOKENS, TokenShard
from dsv4lite.weights.quant import ACTIVATION_GROUP, Numerics, Rounded


class Streams:
    """The residual streams between sub-layers. A sub-layer's output is added when the next one enters, in one pass over them.

    In steps of many tokens, a rank holds the streams of its shard of the tokens.
    """

    def __init__(self, streams_PND: Tensor, config: V4Config, numerics: Numerics, shard: TokenShard = ALL_TOKENS) -> None:
        self.value_PND = streams_PND
        self._pending: tuple[Tensor, HcMix] | None = None
        self._mix: HcMix | None = None
        self._settings = HcSettings(config.sinkhorn_iters, config.hc_eps, config.norm_eps)
        self._row_tile = numerics.row_tile
        self._rounded = numerics.resident_fp8  # FP8 weights multiply FP8 inputs
        self._shard = shard

    def enter(self, weights: HcWeights, norm_weight: Tensor) -> tuple[Tensor, Rounded | None]:
        """Return the sub-layer's normed input [T, D], and the same in FP8 if its weights are FP8."""
        pending, self._pending = self._pending, None
        self.value_PND, x_PD, rounded, self._mix = hc_enter(
            HcInputs(self.value_PND, pending, weights, norm_weight, self._settings, self._rounded, self._row_tile)
        )
        if self._shard.axis.size == 1:
            return x_PD, rounded
        # Quantizing again takes less time than gathering codes. ``hc_enter`` quantizes all the same, for the bits of whole streams:
        # its kernels without codes round some inputs differently.
        x_TD = self._shard.gather(x_PD)
        return x_TD, quantize_fp8(x_TD, ACTIVATION_GROUP) if self._rounded else None

    def leave(self, output_PD: Tensor) -> None:
        """Keep the sub-layer's output until ``enter`` or ``final`` adds it to the streams."""
        assert self._mix is not None and self._pending is None
        self._pending = (output_PD, self._mix)

    def mean(self) -> Tensor:
        """Return the average of the streams, [T, D]."""
        return self._shard.gather(self.written().float().mean(1).to(self.value_PND.dtype))

    def final(self) -> Tensor:
        """Return the streams [T, N, D], with the last sub-layer's output written."""
        return self._shard.gather(self.written())

    def written(self) -> Tensor:
        """Return this rank's streams [P, N, D], with the last sub-layer's output written."""
        if self._pending is not None:
            self.value_PND, self._pending = hc_expand(self._pending[0], self.value_PND, self._pending[1]), None
        return self.value_PND
