"""The steps that an engine runs before its first request launch every kernel that any other step does."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsv4lite.config import tiny_model
from dsv4lite.engine.runner import Runner
from dsv4lite.models.deepseek_v4.batch import Batch
from dsv4lite.models.deepseek_v4.config import parse_config
from dsv4lite.models.deepseek_v4.model import DeepseekV4
from dsv4lite.paging import PAGE_TOKENS, WINDOW_PAGE_TOKENS
from dsv4lite.state.paging import SequenceInput
from dsv4lite.state.spec import StateSizes
from dsv4lite.state.store import StateCache
from dsv4lite.weights.quant import Numerics
from tests.models.paged import make_batch

triton = pytest.importorskip("triton")

from dsv4lite.kernels.warmup import recording  # noqa: E402
from tests.kernels.test_warmup import Hopper  # noqa: E402

CPU = torch.device("cpu")
MOST = 8192
COUNTS = (*range(1, 140, 3), *range(62, 68), 200, 256, 300, 511, 512, 513, 1000, 1025, 2047, 2048, 2049, 3001, 5000, 8191, 8192)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops take their kernels, which nobody compiles or launches."""
    monkeypatch.setattr(triton.runtime.driver, "_active", Hopper())
    for name, module in list(sys.modules.items()):
        if name.startswith("dsv4lite.kernels.") and "use_triton" in vars(module):
            monkeypatch.setattr(module, "use_triton", lambda *_: True)


def shipped(*ratios: int) -> DeepseekV4:
    """The shipped checkpoint's model with layers of some kinds, the first of which is hashed, and anything for weights."""
    config = parse_config(json.loads((Path(tiny_model()) / "config.json").read_text()))
    config = replace(config, num_hidden_layers=len(ratios), ratios=ratios, num_hash_layers=1, num_mtp_layers=0)
    numerics = Numerics.choose(dtype=torch.bfloat16, quantized=True, deterministic=True, device=CPU)
    numerics = replace(numerics, resident_fp8=True, resident_experts="fp4", matrix_dtype=torch.bfloat16)
    return DeepseekV4(config, numerics)


def step_of(model: DeepseekV4, tokens: int) -> Batch:
    """Return a step that reads the beginning of a prompt."""
    pages, windows = -(-tokens // PAGE_TOKENS), -(-tokens // WINDOW_PAGE_TOKENS)
    sequence = SequenceInput(
        token_ids=(1,) * tokens, start=0, slot=0, pages=range(pages), window_first=0, window_pages=(0,) * windows
    )
    return make_batch(model, [sequence])


@torch.inference_mode()
def test_no_number_of_tokens_launches_what_warming_up_has_not() -> None:
    model = shipped(0, 4, 128, 0)
    sizes = StateSizes(grow_pages=MOST // PAGE_TOKENS + 1, window_pages=1, slots=1, snapshots=0)
    cache = StateCache.allocate(model.state_spec, sizes, CPU)
    runner = Runner(model, cache, None)
    with recording() as wanted:
        runner.dry_run(MOST, MOST)
    ready = {repr(one.specialization) for one in wanted}
    assert len(ready) > 40
    late: dict[str, int] = {}
    for tokens in COUNTS:
        with recording() as wanted:
            model(step_of(model, tokens), cache.layers)
        for one in wanted:
            if repr(one.specialization) not in ready:
                late.setdefault(one.specialization.name, tokens)
    assert late == {}


@torch.inference_mode()
def test_brief_passes_launch_what_whole_ones_do() -> None:
    model = shipped(0, *(0, 4, 128) * 4)
    sizes = StateSizes(grow_pages=2, window_pages=1, slots=1, snapshots=0)
    cache = StateCache.allocate(model.state_spec, sizes, CPU)
    ran: list[int] = []
    for number, block in enumerate(model.layers):
        block.register_forward_pre_hook(lambda *_, number=number: ran.append(number))
    for tokens in (1, 9, 40, 300):
        found = []
        for brief in (True, False):
            with recording() as wanted, model.brief() if brief else nullcontext():
                model(step_of(model, tokens), cache.layers)
            found.append({repr(one.specialization) for one in wanted})
        assert found[0] == found[1]
        assert ran == [*range(7), *range(len(model.layers))]
        ran.clear()
