"""The rooflines of a profile, of the launches of V4-Flash's steps on a pretended GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from dsv4lite.engine.step_graphs import StepGraphs
from dsv4lite.kernels.warmup import recording
from dsv4lite.layout import Layout
from dsv4lite.models.deepseek_v4.config import parse_config
from dsv4lite.models.deepseek_v4.model import DeepseekV4
from dsv4lite.state.spec import StateSizes
from dsv4lite.state.store import StateCache
from examples.benchmarks.engine import BYTES_PER_SECOND, flash, roofline_bytes
from examples.benchmarks.profile import Costs, Watch
from tests.kernels.launches import META, _numerics, pretended
from tests.tiny import FLASH

LAYERS, CONTEXT = 8, 1100


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_rooflines_of_ops_are_together_those_of_the_weights(batch: int) -> None:
    """A step also reads a few rows and activations, and the roofline of the weights also counts tables and index heads."""
    config = parse_config({**FLASH, **flash(LAYERS), "num_nextn_predict_layers": 0})
    with pretended(90):
        model = DeepseekV4(config, _numerics({"quantized": True, "dense_fp8": True, "expert_format": "fp4"}))
        sizes = StateSizes(grow_pages=16, window_pages=16, slots=batch, snapshots=0)
        graphs = StepGraphs(model, StateCache.allocate(model.state_spec, sizes, META), max_num_seqs=batch, max_model_len=16384)
        watch = Watch(Costs(config, CONTEXT))
        with watch.watching(), recording():
            graphs.dry_run(next(shape for shape in graphs.shapes if shape.sequences == batch))
    calls = watch.tape.calls
    roofline = roofline_bytes(config, model.numerics, Layout(), [batch])[0] / BYTES_PER_SECOND
    assert sum(call.roofline_s for call in calls) == pytest.approx(roofline, rel=0.05)
    assert [call.op for call in calls].count("paged_attention") == LAYERS
    experts = 256 * (1 - (1 - 6 / 256) ** batch) * 13.4e6 / BYTES_PER_SECOND
    routed = [call for call in calls if call.op in ("experts_outputs", "moe_decode_small")]
    assert len(routed) == LAYERS and all(call.roofline_s == pytest.approx(experts, rel=0.12) for call in routed)
