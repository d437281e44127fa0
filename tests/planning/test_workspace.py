"""The workspace of a step on paged state against what such steps really allocate: on tensors without memory, launching nothing."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4lite.config import tiny_model
from dsv4lite.kernels import dispatch
from dsv4lite.kernels.counters import counters_of
from dsv4lite.kernels.paging import Paging
from dsv4lite.models.config import PassBytes
from dsv4lite.models.deepseek_v4.config import V4Config, parse_config
from dsv4lite.models.deepseek_v4.model import DeepseekV4
from dsv4lite.models.deepseek_v4.workspace import _model_pass, workspace
from dsv4lite.planning.workspace import _GAPS, MIB, SMALL_BLOCKS, prompt_pool_bytes, step_bytes
from dsv4lite.request import Request, SamplingParams
from dsv4lite.sampling.sampler import Sampler
from dsv4lite.scheduling.step_plan import SequencePlan
from dsv4lite.state.spec import StateSizes
from dsv4lite.state.store import StateCache
from dsv4lite.weights.checkpoint import read_config
from dsv4lite.weights.quant import Numerics
from examples.benchmarks.engine import flash

triton_jit = pytest.importorskip("triton.runtime.jit")
META = torch.device("meta")
Block = tuple[int, int, int]
"""Bytes, segment, place in it."""


class Allocator:
    """PyTorch's caching allocator for one stream: the smallest free block that is large enough, split, and joined again."""

    def __init__(self) -> None:
        self.live = self.peak = self.reserved = self._segments = 0
        self._free: dict[bool, list[Block]] = {True: [], False: []}

    def take(self, count: int) -> tuple[int, bool, Block]:
        """Return what was asked for, in which pool it lies, and its block."""
        count = -(-max(count, 1) // 512) * 512
        small = count <= MIB
        self.live += count
        self.peak = max(self.peak, self.live)
        if fit := [block for block in self._free[small] if block[0] >= count]:
            size, segment, at = min(fit)
            self._free[small].remove((size, segment, at))
        else:
            size, at = 2 * MIB if small else max(20 * MIB * (count < 10 * MIB), -(-count // (2 * MIB)) * 2 * MIB), 0
            self.reserved += size
            self._segments += 1
            segment = self._segments
        if size - count >= (512 if small else MIB + 1):
            self._free[small].append((size - count, segment, at + count))
            size = count
        return count, small, (size, segment, at)

    def give_back(self, count: int, small: bool, block: Block) -> None:
        """Free a block, and join it with its free neighbours."""
        self.live -= count
        size, segment, at = block
        for other in [b for b in self._free[small] if b[1] == segment]:
            if other[2] + other[0] == at or at + size == other[2]:
                self._free[small].remove(other)
                size, at = size + other[0], min(at, other[2])
        self._free[small].append((size, segment, at))


class Ledger(TorchDispatchMode):
    """Keeps an allocator informed of every tensor on a device as it is made and freed."""

    def __init__(self, device: torch.device = META) -> None:
        super().__init__()
        self.device, self.allocator = device, Allocator()
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor) and tensor.device == self.device:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known and storage.nbytes():
                    self._known.add(storage._cdata)
                    weakref.finalize(storage, self._gone, storage._cdata, self.allocator, self.allocator.take(storage.nbytes()))
        return result

    def _gone(self, key: int, allocator: Allocator, taken: tuple[int, bool, Block]) -> None:
        self._known.discard(key)
        allocator.give_back(*taken)


def tensor_of(given: Any) -> Tensor:
    """The first tensor of some arguments, also in tuples."""
    return next(tensor_of(one) if isinstance(one, tuple) else one for one in given if isinstance(one, (Tensor, tuple)))


@pytest.fixture
def nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ops prepare their kernels on the meta device, and launch none of them."""
    monkeypatch.setattr(dispatch, "use_triton", lambda *given: tensor_of(given).device == META)
    monkeypatch.setattr(triton_jit.JITFunction, "run", lambda *args, **options: None)


def pass_of(model: DeepseekV4, cache: StateCache, tokens: int, longest: int) -> None:
    """Run one chunk, up to the end of the longest sequence, and the logits of a few of its tokens."""

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=META)

    paging = Paging(
        positions_T=ints(tokens),
        sequence_T=ints(tokens),
        slots_S=ints(1),
        first_S=ints(1),
        rows_S=ints(1),
        lens_S=ints(1),
        drafts_S=ints(1),
        state_copy_S=ints(1),
        grow_SP=ints(1, -(-longest // 256)),
        window_SP=ints(1, 4),
        window_first_S=ints(1),
        width=int(tokens == 1),
    )
    token_ids = torch.empty(tokens, dtype=torch.int64, device=META)
    batch = model.batch(token_ids, paging, max_tokens=longest)
    model.logits(model(batch, cache.layers)[:8])


SHIPPED = read_config(Path(tiny_model()))
FLASH, SMALL = parse_config({**SHIPPED, **flash(4)}), parse_config(SHIPPED)


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    with torch.inference_mode(), Ledger() as ledger:
        yield ledger


KINDS = {"quantized": (torch.bfloat16, True), "bfloat16": (torch.bfloat16, False), "float32": (torch.float32, False)}


def numerics_of(kind: str, *, deterministic: bool) -> Numerics:
    dtype, quantized = KINDS[kind]
    return Numerics.choose(
        dtype=dtype, quantized=quantized, deterministic=deterministic, device=META, dense_fp8=quantized, expert_format="fp4"
    )


def paged_model(config: V4Config, numerics: Numerics) -> tuple[DeepseekV4, StateCache]:
    config = replace(config, quantized=numerics.quantized)
    sizes = StateSizes(grow_pages=4, window_pages=8, slots=2, snapshots=0)
    model = DeepseekV4(config, numerics)
    return model, StateCache.allocate(model.state_spec, sizes, META)


CASES: Mapping[str, tuple[V4Config, int, int]] = {
    "prefill": (FLASH, 8192, 16384),
    "prefill of a long context, scored in rounds": (FLASH, 2048, 1 << 20),
    "experts' blocks that are mostly padding": (FLASH, 600, 4096),
    "few tokens, long context": (FLASH, 64, 1 << 20),
    "small": (SMALL, 8192, 16384),
}


def whole_workspace(model: DeepseekV4, numerics: Numerics, *, tokens: int, sequences: int, longest: int) -> int:
    step = workspace(model.config, numerics, model.shard, tokens=tokens, longest=longest)
    return step_bytes(step, numerics, model.config.vocab_size, tokens=tokens, sequences=sequences, listed=0)


def check_widest_point(ledger: Ledger, case: str, kind: str, *, deterministic: bool) -> None:
    config, tokens, longest = CASES[case]
    # Split attention is counted apart; only few tokens have it.
    numerics = numerics_of(kind, deterministic=deterministic or tokens < 100)
    model, cache = paged_model(config, numerics)
    before = ledger.allocator.live
    pass_of(model, cache, tokens, longest)
    lived, counted = ledger.allocator.peak - before, _model_pass(config, numerics, tokens, longest)
    assert 0.97 * lived <= counted <= 1.15 * lived + MIB, (lived, counted)
    numerics = numerics_of(kind, deterministic=deterministic)
    assert whole_workspace(model, tokens=tokens, sequences=64, longest=longest, numerics=numerics) >= _GAPS * lived


@pytest.mark.usefixtures("nothing_is_launched")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_workspace_is_what_lives_at_the_widest_point(ledger: Ledger, case: str, deterministic: bool) -> None:
    check_widest_point(ledger, case, "quantized", deterministic=deterministic)


@pytest.mark.usefixtures("nothing_is_launched")
@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("case", "deterministic"),
    [("prefill", False), ("experts' blocks that are mostly padding", True)],
)
def test_workspace_of_plain_models_is_what_lives_at_the_widest_point(
    ledger: Ledger, case: str, kind: str, deterministic: bool
) -> None:
    check_widest_point(ledger, case, kind, deterministic=deterministic)


def check_one_piece(ledger: Ledger, config: V4Config, numerics: Numerics, tokens: int, longest: int) -> None:
    model, cache = paged_model(config, numerics)
    whole = whole_workspace(model, tokens=tokens, sequences=8, longest=longest, numerics=numerics)
    counters_of(META)  # which are made once in a process
    allocator = ledger.allocator = Allocator()
    allocator.give_back(*allocator.take(whole - SMALL_BLOCKS))
    for count in (2, 100, tokens, 1025, 513, 4, 7777, 1500, 12, 3000, tokens, 5000, 600, 32, tokens):
        pass_of(model, cache, min(count, tokens), longest)
    assert allocator.live == 0 and allocator.reserved <= whole + 2 * MIB


@pytest.mark.usefixtures("nothing_is_launched")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("config", [FLASH, SMALL], ids=["flash", "small"])
@pytest.mark.parametrize(("tokens", "longest"), [(8192, 16384), (2048, 1 << 20), (512, 16384)])
def test_workspace_in_one_piece_holds_steps_of_any_size(
    ledger: Ledger, config: V4Config, deterministic: bool, tokens: int, longest: int
) -> None:
    check_one_piece(ledger, config, numerics_of("quantized", deterministic=deterministic), tokens, longest)


@pytest.mark.usefixtures("nothing_is_launched")
@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
def test_workspace_in_one_piece_holds_steps_of_plain_models(ledger: Ledger, kind: str) -> None:
    check_one_piece(ledger, FLASH, numerics_of(kind, deterministic=False), 8192, 1 << 17)


@pytest.mark.usefixtures("nothing_is_launched")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("config", [FLASH, SMALL], ids=["flash", "small"])
@pytest.mark.parametrize(("tokens", "lengths"), [(4096, (8192, 2052)), (2048, (1 << 20, 8192, 2052))])
def test_one_segment_holds_captured_steps_with_prompts(
    ledger: Ledger, config: V4Config, deterministic: bool, tokens: int, lengths: Sequence[int]
) -> None:
    """The graphs' pool begins with the segment; in segments as they come, the first step took 1.4 times as much."""
    numerics = numerics_of("quantized", deterministic=deterministic)
    model, cache = paged_model(config, numerics)
    pool = prompt_pool_bytes(workspace(config, numerics, model.shard, tokens=tokens, longest=lengths[0]))
    counters_of(META)
    allocator = ledger.allocator = Allocator()
    allocator.give_back(*allocator.take(pool))
    for count in (tokens, 64, 128, 384, 896, 1024, 1536, 2048, 640):
        for longest in lengths:
            pass_of(model, cache, count, longest)
    assert allocator.live == 0 and allocator.reserved <= pool + SMALL_BLOCKS


@pytest.mark.parametrize("settings", [{"top_p": 0.9}, {"top_k": 3000, "presence_penalty": 1.0}, {"logprobs": 50}], ids=str)
def test_workspace_holds_sampling_on_a_cpu(settings: dict[str, Any]) -> None:
    """All logits are equal, so that a nucleus is nearly the whole vocabulary."""
    rows, vocab, cpu = 64, 4096, torch.device("cpu")
    sampler = Sampler(vocab, "cpu", 0, None, slots=rows, rows=rows)
    params = SamplingParams(**settings, logprobs_mode="processed")
    runs = [SequencePlan(i, i, 3, (0,), (), 0, (), True) for i in range(rows)]
    for i in range(rows):
        sampler.add(i, Request(request_id=str(i), prompt_token_ids=(5, 6, 7), params=params), 0)
    numerics = Numerics.choose(dtype=torch.float32, quantized=False, deterministic=False, device=cpu)
    counted = step_bytes(PassBytes(hidden=0, held=0, widest=0), numerics, vocab, tokens=0, sequences=rows, listed=50)
    last_token = torch.zeros(rows + 1, dtype=torch.int64)
    with torch.inference_mode(), Ledger(cpu) as ledger:
        sampler.sample(torch.zeros(rows, vocab), runs, last_token)
        assert 0.2 * counted < ledger.allocator.peak <= counted
