"""Weights replaced while an engine lives: afterwards it is as good as a fresh one; after an error nothing has changed."""

from __future__ import annotations

import gc
import math
import random
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor

from dsv4lite.config import MTP
from dsv4lite.errors import EngineStateError, InvalidRequestError, WeightsNotLoadedError, WeightUpdateError
from dsv4lite.kernels.quantize import dequantize_matrix
from dsv4lite.llm import LLM, AsyncLLM
from dsv4lite.request import Phase, SamplingParams
from dsv4lite.weights.delta import DeltaSource
from dsv4lite.weights.shared import IPCSource, SharedWeights
from dsv4lite.weights.update import DiskSource, ModuleSource, NamedTensors
from tests.e2e.engines import MODEST, SMALL, engine_of, opened, write_tokenizer
from tests.e2e.updates import (
    GREEDY,
    KINDS,
    LONG,
    PROMPT,
    VOCAB,
    ask,
    load,
    quantized_tensors,
    read,
    same,
    write_for_kernels,
    write_quantized,
)
from tests.loops import both_loops
from tests.recorded import captured_engines, recorded
from tests.tiny import trainer_model, trainer_settings

EXACT: dict[str, Any] = {"deterministic": True}
DRAFTING: dict[str, Any] = {**EXACT, "speculative": MTP(2, adaptive=False)}


@pytest.fixture
def llm(models: tuple[Path, Path]) -> Iterator[LLM]:
    with opened(models[0], **EXACT) as llm:
        yield llm


# -------------------------------------------------------------------------------------------------------- every tensor

SETS = {kind: (quantized_tensors(0, kind), quantized_tensors(1, kind)) for kind in KINDS}
OLD, NEW = SETS["v4"]
WEIGHTS = {kind: [name for name in old if not name.endswith(".scale")] for kind, (old, _) in SETS.items()}
EACH = [(kind, name) for kind in ("v4", "v32") for name in WEIGHTS[kind]]


def pattern_of(name: str) -> str:
    """A name without the numbers of layer and expert: tensors that differ only in these have nothing to do with each other."""
    return re.sub(r"\.\d+\.", ".*.", name)


def groups() -> dict[str, tuple[str, set[str]]]:
    """All of ``EACH`` in groups of one kind: names that have one pattern, and one pattern of each part of a layer.

    What is derived from several tensors, such as fused matrices, is of one part: another tensor of a group does not renew it.
    """
    of_part: dict[tuple[str, ...], list[str]] = {}
    found: dict[str, tuple[str, set[str]]] = {}
    for kind, name in EACH:
        patterns = of_part.setdefault((kind, *pattern_of(name).split(".")[:3]), [])
        if pattern_of(name) not in patterns:
            patterns.append(pattern_of(name))
        found.setdefault(f"{kind}-{patterns.index(pattern_of(name))}", (kind, set()))[1].add(name)
    return found


GROUPS = groups()


def with_scale(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A tensor, and its scale if it has one."""
    return {n: tensors[n] for n in (name, name.removesuffix(".weight") + ".scale") if n in tensors}


def with_scales(names: Iterable[str], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor for name in names for key, tensor in with_scale(name, tensors).items()}


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    """Which of ``KINDS`` the lasting engine is of."""
    return str(getattr(request, "param", "v4"))


@pytest.fixture(scope="module")
def lasting_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], LLM]]:
    """One engine of each kind for all tests, with captured steps; its weights are the first of ``SETS`` between the tests."""
    checksums: dict[str, dict[str, str]] = {}
    with recorded(), ExitStack() as stack:

        @cache
        def engine(kind: str) -> LLM:
            folder = write_quantized(tmp_path_factory.mktemp("old"), SETS[kind][0], kind)
            with captured_engines():
                llm = stack.enter_context(opened(folder, **DRAFTING))
            checksums[kind] = llm.weight_checksums()
            return llm

        yield engine
        for kind, before in checksums.items():
            assert engine(kind).weight_checksums() == before and set(before) == set(WEIGHTS[kind])


@pytest.fixture
def lasting(kind: str, lasting_engines: Callable[[str], LLM]) -> LLM:
    return lasting_engines(kind)


@pytest.mark.parametrize(("kind", "names"), GROUPS.values(), ids=GROUPS, indirect=["kind"])
def test_engine_with_some_tensors_replaced_is_as_a_fresh_engine(lasting: LLM, tmp_path: Path, kind: str, names: set[str]) -> None:
    """Logits of prompt and completion, and which drafts are accepted, are those of a fresh engine; after a sleep, too."""
    old, new = SETS[kind][0], with_scales(names, SETS[kind][1])
    assert not any(new[name].float().equal(old[name].float()) for name in names)
    with opened(write_quantized(tmp_path, {**old, **new}, kind), **DRAFTING) as llm:
        wanted, checksums = ask(llm, tokens=12), llm.weight_checksums()
    before = lasting.weight_checksums()
    load(lasting, 1, NamedTensors(new), partial=True)
    try:
        assert same(ask(lasting, tokens=12), wanted) and wanted.usage.drafted_tokens > 0
        assert lasting.weight_checksums() == checksums
        assert {n for n in before if before[n] != checksums[n]} == names
        lasting.sleep(1)
        lasting.wake_up()
        assert same(ask(lasting, tokens=12), wanted)
    finally:
        load(lasting, 0, NamedTensors(with_scales(names, old)), partial=True)


@pytest.mark.parametrize(("kind", "name"), EACH, indirect=["kind"])
def test_every_tensor_gets_to_its_place_and_nowhere_else(lasting: LLM, kind: str, name: str) -> None:
    """All tensors of the model in memory are compared with what the checkpoint says, before and after one is replaced."""
    slots = engine_of(lasting)._runner.model.slots()  # type: ignore[union-attr]
    old, new = SETS[kind]

    def held(of: Mapping[str, Tensor]) -> None:
        for each in WEIGHTS[kind] if of is new else [name]:
            source = of if each == name else old
            pair = [*with_scale(each, source).values()]
            assert slots[each].values().equal(dequantize_matrix(pair[0], pair[1] if len(pair) > 1 else None)), each

    load(lasting, 1, NamedTensors(with_scale(name, new)), partial=True)
    held(new)
    load(lasting, 0, NamedTensors(with_scale(name, old)), partial=True)
    held(old)


# ------------------------------------------------------------------------------------------------------------- sources


def shuffled(tensors: Mapping[str, Tensor], seed: int = 0) -> list[tuple[str, Tensor]]:
    pairs = list(tensors.items())
    random.Random(seed).shuffle(pairs)
    return pairs


def through_one_buffer(pairs: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Hand out every tensor in the same memory, as a trainer's bucket does."""
    buffer = torch.empty(max(tensor.nbytes for _, tensor in pairs), dtype=torch.uint8)
    for name, tensor in pairs:
        place = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        yield name, place.copy_(tensor)
        buffer.fill_(0xFF)


def in_parts(tensors: Mapping[str, Tensor]) -> list[NamedTensors]:
    pairs = shuffled(tensors, 1)
    return [NamedTensors(dict(pairs[i::7])) for i in range(7)]


FORMS: dict[str, Callable[[Path, str], list[Any]]] = {
    "mapping": lambda folder, kind: [NamedTensors(read(folder))],
    "pairs in any order through one buffer": lambda folder, kind: [NamedTensors(through_one_buffer(shuffled(read(folder))))],
    "buckets that part weights from their scales": lambda folder, kind: in_parts(read(folder)),
    "disk": lambda folder, kind: [DiskSource(str(folder))],
    "disk in two parts": lambda folder, kind: [
        DiskSource(str(folder), prefix=KINDS[kind].drafter),
        DiskSource(str(folder), prefix=KINDS[kind].others),
    ],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_whole_update_makes_the_engine_a_fresh_one(lasting: LLM, tmp_path: Path, kind: str, form: str) -> None:
    old, new = SETS[kind]
    folder = write_quantized(tmp_path, new, kind)
    with opened(folder, **DRAFTING) as llm:
        wanted, checksums = ask(llm), llm.weight_checksums()
    load(lasting, 7, *FORMS[form](folder, kind))
    assert lasting.weight_version == 7 and lasting.weight_checksums() == checksums
    output = ask(lasting)
    assert same(output, wanted) and output.outputs[0].weight_versions == ((7, 0, 6),)
    load(lasting, 8, NamedTensors(old))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["v4", "v32"], indirect=True)
def test_floats_are_quantized_to_the_formats_of_the_checkpoint(lasting: LLM, kind: str, dtype: torch.dtype) -> None:
    """Numbers that FP8 and FP4 have are restored exactly; others are rounded by the official recipe."""
    old, new = SETS[kind]
    load(lasting, 1, NamedTensors(new))
    wanted, checksums = ask(lasting), lasting.weight_checksums()
    load(lasting, 2, NamedTensors(old))
    pairs = {name: [*with_scale(name, new).values()] for name in WEIGHTS[kind]}
    wide = {name: dequantize_matrix(*pair).to(dtype) if len(pair) > 1 else pair[0] for name, pair in pairs.items()}
    load(lasting, 3, NamedTensors(shuffled(wide)))
    assert same(ask(lasting), wanted) and lasting.weight_checksums() == checksums
    name = "layers.1.ffn.experts.2.w1.weight"
    rounded = (wide[name].float() + 0.01).to(dtype)
    load(lasting, 4, NamedTensors({name: rounded}), partial=True)
    (held,) = [slot for n, slot in engine_of(lasting)._runner.model.slots().items() if n == name]  # type: ignore[union-attr]
    if kind == "v4":
        scale = torch.exp2(torch.ceil(torch.log2(rounded.float().unflatten(1, (-1, 32)).abs().amax(-1) / 6)))
        steps = (held.values().unflatten(1, (-1, 32)) / scale[..., None]).abs()
        assert torch.isin(steps, torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])).all()
    else:  # two blocks of 128 x 128
        scale = torch.exp2(torch.ceil(torch.log2(rounded.float().unflatten(1, (-1, 128)).abs().amax((0, 2)) / 448)))
        steps = held.values().unflatten(1, (-1, 128)) / scale[:, None]
        assert steps.to(torch.float8_e4m3fn).float().equal(steps) and 224 < steps.abs().max() <= 448
        scale *= 16  # of its largest numbers
    assert (held.values() - rounded.float()).abs().max() <= scale.max() and not held.values().equal(rounded.float())
    load(lasting, 0, NamedTensors(old))


def test_module_of_a_trainer_is_a_source(tmp_path: Path) -> None:
    """transformers' names, with the experts of a layer in one tensor; it has no drafter, and this engine needs none."""
    pytest.importorskip("transformers")
    settings = trainer_settings(ratios=(0, 4, 8), vocab_size=VOCAB)
    old, new = (trainer_model(settings, seed=seed) for seed in (0, 1))
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer", VOCAB))
    for name, model in (("old", old), ("new", new)):
        model.save_pretrained(tmp_path / name)
    with opened(tmp_path / "new", tokenizer=tokenizer, **EXACT) as llm:
        wanted, checksums = ask(llm), llm.weight_checksums()
    with opened(tmp_path / "old", tokenizer=tokenizer, **EXACT) as llm:
        assert not same(ask(llm), wanted)
        load(llm, 1, ModuleSource(new))
        assert same(ask(llm), wanted) and llm.weight_checksums() == checksums


@pytest.mark.parametrize("kind", KINDS)
def test_engine_with_random_weights_takes_those_of_a_checkpoint(tmp_path: Path, kind: str) -> None:
    """For MLA it expected e8m0 scales of FP8 matrices, where releases have float32."""
    folder = write_quantized(tmp_path, SETS[kind][1], kind)
    with opened(folder, **EXACT) as llm:
        wanted, checksums = ask(llm), llm.weight_checksums()
    with opened(folder, load_format="dummy", **EXACT) as llm:
        load(llm, 1, DiskSource(str(folder)))
        assert same(ask(llm), wanted) and llm.weight_checksums() == checksums


def test_model_of_this_package_is_a_source(llm: LLM, models: tuple[Path, Path], fresh: Any) -> None:
    with opened(models[1], **EXACT) as other:
        load(llm, 1, ModuleSource(engine_of(other)._runner.model))  # type: ignore[union-attr, arg-type]
    assert same(ask(llm), fresh[1][0])


@pytest.mark.parametrize("way", ["tensors", "shared", "delta"])
def test_tensors_of_any_strides_are_taken(llm: LLM, models: tuple[Path, Path], fresh: Any, way: str) -> None:
    """Every second number of a tensor of twice the size, also where that is one number."""
    old, new = ({name: torch.stack([x, x], -1)[..., 0] for name, x in read(model).items()} for model in models)
    with SharedWeights(new.items() if way == "shared" else ()) as shared:
        sources = {"tensors": NamedTensors(new), "shared": IPCSource(shared.handles), "delta": DeltaSource(NamedTensors(new), old)}
        with llm.update_weights(1, partial=True) as update:
            update.load(sources[way])
    assert same(ask(llm), fresh[1][0])


def test_source_of_the_hosts_own_is_used_and_anything_else_refused(llm: LLM, models: tuple[Path, Path], fresh: Any) -> None:
    class Mine:
        def tensors(self) -> Iterator[tuple[str, Tensor]]:
            yield from read(models[1]).items()

    load(llm, 1, Mine())
    assert same(ask(llm), fresh[1][0])
    with pytest.raises(WeightUpdateError, match="is not a source of weights; pass a NamedTensors"):
        load(llm, 2, {"embed.weight": torch.zeros(1)})
    assert llm.weight_version == 1


def test_tensors_in_memory_keep_their_addresses(llm: LLM, models: tuple[Path, Path]) -> None:
    """Captured graphs read the model's tensors at these."""
    model: Any = engine_of(llm)._runner.model  # type: ignore[union-attr]

    def places() -> dict[str, tuple[int, int]]:
        return {name: (id(x), x.data_ptr()) for name, x in (*model.named_parameters(), *model.named_buffers())}

    before = places()
    load(llm, 1, DiskSource(str(models[1])))
    assert places() == before and len(before) > 50


# --------------------------------------------------------------------------------------------------------- what is wrong


def raising() -> Iterator[tuple[str, Tensor]]:
    yield "norm.weight", torch.ones(SMALL["hidden_size"])
    raise OSError("the disk is gone")


def with_number(shape: Iterable[int], value: float) -> Tensor:
    """Zeros, but for one number; of FP4, a number that is not finite became 0, or changed the others of its group."""
    tensor = torch.zeros(*shape, dtype=torch.bfloat16)
    tensor[2, 3] = value
    return tensor


W1, W1_SCALE = "layers.0.ffn.experts.1.w1.weight", "layers.0.ffn.experts.1.w1.scale"
IDS = "layers.0.ffn.gate.tid2eid"
WRONG: dict[str, tuple[Any, str, str]] = {
    "name": ({"layers.0.attn.wx.weight": torch.zeros(2)}, "unexpected", "layers.0.attn.wx.weight: unexpected"),
    "layer": ({"layers.x.attn.wq_a.weight": torch.zeros(2)}, "unexpected", "layers.x.attn.wq_a.weight: unexpected"),
    "shape": ({"norm.weight": torch.zeros(3)}, "mismatched", "norm.weight: shape [3], expected [32]"),
    "dtype": ({"norm.weight": torch.zeros(32, dtype=torch.int64)}, "mismatched", "norm.weight: dtype I64, expected BF16"),
    "odd dtype": ({"norm.weight": torch.zeros(32, dtype=torch.complex64)}, "mismatched", "norm.weight: dtype torch.complex64"),
    "no tensor": ({"norm.weight": 3}, "mismatched", "'norm.weight': 3, expected a name and a tensor"),
    "no memory": ({"norm.weight": torch.zeros(32, device="meta")}, "mismatched", "norm.weight: torch.strided on meta"),
    "sparse": ({"norm.weight": torch.zeros(32).to_sparse()}, "mismatched", "norm.weight: torch.sparse_coo on cpu"),
    "scale of a float": ({W1: torch.zeros(16, 32), W1_SCALE: NEW[W1_SCALE]}, "mismatched", f"{W1_SCALE}: a scale, but {W1} is F32"),
    "weight without scale": ({W1: NEW[W1]}, "missing", f"{W1_SCALE}: missing; {W1} came"),
    "scale without weight": ({W1_SCALE: NEW[W1_SCALE]}, "missing", f"{W1}: missing; {W1_SCALE} came"),
    "scale of a norm": ({"norm.scale": NEW[W1_SCALE]}, "unexpected", "norm.scale: unexpected"),
    "other format": (
        {W1: torch.zeros(16, 32).to(torch.float8_e4m3fn), W1_SCALE: NEW[W1_SCALE]},
        "mismatched",
        f"{W1}: dtype F8_E4M3, expected I8 or U8, or floats",
    ),
    "scale's dtype": ({W1: NEW[W1], W1_SCALE: torch.ones(16, 1)}, "mismatched", f"{W1_SCALE}: dtype F32, expected F8_E8M0"),
    "stack of experts": (
        {"layers.0.mlp.experts.down_proj": torch.zeros(3)},
        "mismatched",
        "layers.0.mlp.experts.down_proj has shape [3]; stacked experts are",
    ),
    **{
        f"{value} {name}": ({name: with_number(shape, value)}, "mismatched", f"{name}: has numbers that are infinite or NaN")
        for name, shape in ((W1, (16, 32)), ("layers.0.attn.wq_a.weight", OLD["layers.0.attn.wq_a.weight"].shape))
        for value in (math.nan, math.inf, -math.inf)
    },
    "ids": ({IDS: torch.full((VOCAB, 2), 4)}, "mismatched", f"{IDS}: 192 ids are out of range"),
    "ids twice": ({IDS: torch.full((VOCAB, 2), 3)}, "mismatched", f"{IDS}: 96 rows have an id twice, the first one row 0: [3, 3]"),
}


@pytest.mark.parametrize("case", WRONG)
def test_tensor_that_does_not_fit_is_named_and_nothing_changes(lasting: LLM, case: str) -> None:
    tensors, kind, line = WRONG[case]
    before, version, checksums = ask(lasting), lasting.weight_version, lasting.weight_checksums()
    with pytest.raises(WeightUpdateError) as caught:
        load(lasting, 9, NamedTensors(NEW if "embed.weight" in tensors else {}), NamedTensors(tensors), partial=True)
    lines = getattr(caught.value, kind)
    assert len(lines) == 1 and lines[0].startswith(line) and line in str(caught.value)
    others = {"missing", "unexpected", "mismatched"} - {kind}
    assert not any(getattr(caught.value, other) for other in others)
    assert (lasting.state, lasting.weight_version, lasting.weight_checksums()) == (Phase.READY, version, checksums)
    assert same(ask(lasting), before)


def test_all_that_is_missing_is_listed(lasting: LLM) -> None:
    some = {name: tensor for name, tensor in NEW.items() if "experts.1." not in name and name != "mtp.0.norm.weight"}
    with pytest.raises(WeightUpdateError) as caught:
        load(lasting, 9, NamedTensors(some))
    absent = {name for name in NEW if name not in some and not name.endswith(".scale")}
    assert {line.removesuffix(": missing") for line in caught.value.missing} == absent and len(absent) > 10
    assert lasting.state is Phase.READY


def test_tensor_given_twice_is_refused(lasting: LLM) -> None:
    with pytest.raises(WeightUpdateError, match=r"norm\.weight: given twice"):
        load(lasting, 9, NamedTensors({"norm.weight": NEW["norm.weight"]}), NamedTensors({"norm.weight": NEW["norm.weight"]}))


def test_tensor_given_whole_and_in_blocks_at_once_is_refused(lasting: LLM) -> None:
    """One of the two was dropped without an error."""
    norm, checksums = NEW["norm.weight"], lasting.weight_checksums()
    parts = {"shape": torch.tensor(norm.shape), "offsets": torch.tensor([[0, 0]]), "values": norm[None, None, :1] + 1}
    blocks = [(f"norm.weight@{part}", tensor) for part, tensor in parts.items()]
    for given in ([*blocks, ("norm.weight", norm)], [("norm.weight", norm), *blocks], blocks * 2, [blocks[0], *blocks]):
        with pytest.raises(WeightUpdateError, match=r"norm\.weight(@shape)?: given twice"):
            load(lasting, 9, NamedTensors(given), partial=True)
    assert lasting.weight_checksums() == checksums


def test_source_that_raises_is_the_cause(llm: LLM, fresh: Any) -> None:
    with pytest.raises(WeightUpdateError, match="the source of the update failed: OSError: the disk is gone") as caught:
        load(llm, 1, NamedTensors(raising()))
    assert isinstance(caught.value.__cause__, OSError)
    assert (llm.state, llm.weight_version) == (Phase.READY, 0) and same(ask(llm), fresh[0][0])


@both_loops
async def test_source_that_hangs_does_not_outlive_the_engine(models: tuple[Path, Path]) -> None:
    """A load ends with the engine, though a trainer sends no more."""
    begun, go = threading.Event(), threading.Event()

    def hanging() -> Iterator[tuple[str, Tensor]]:
        begun.set()
        go.wait(60)
        yield "norm.weight", torch.full((32,), 9.0)

    async def load_all(llm: AsyncLLM) -> None:
        with pytest.raises(EngineStateError, match="load: the engine was closed"):
            async with llm.update_weights(1) as update:
                await update.load(NamedTensors(hanging()))
        assert not go.is_set()

    llm = await AsyncLLM.create(str(models[0]), **MODEST)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(load_all, llm)
        assert await anyio.to_thread.run_sync(begun.wait, 60)
        await llm.aclose()
    go.set()


def test_source_that_hangs_is_given_up_at_the_deadline(llm: LLM, models: tuple[Path, Path], fresh: Any) -> None:
    """What it yields after that reaches no later update."""
    go, gone = threading.Event(), threading.Event()

    def hanging() -> Iterator[tuple[str, Tensor]]:
        yield "norm.weight", torch.full((32,), 9.0)
        go.wait(60)
        try:
            yield "norm.weight", torch.full((32,), 9.0)
        finally:
            gone.set()

    with pytest.raises(WeightUpdateError, match=r"did not end within 0\.05 s"):
        with llm.update_weights(1) as update:
            update.load(NamedTensors(hanging()), deadline=0.05)
    assert llm.state is Phase.READY and same(ask(llm), fresh[0][0])
    with llm.update_weights(2) as update:
        for deadline in (0, -1, float("nan"), float("inf"), 1e30, "soon", True):
            with pytest.raises(InvalidRequestError, match="deadline="):
                update.load(NamedTensors({}), deadline=deadline)  # type: ignore[arg-type]
        go.set()
        gone.wait(60)
        update.load(DiskSource(str(models[1])))
    assert same(ask(llm), fresh[1][0]) and llm.weight_version == 2


def test_failed_load_that_was_caught_still_rolls_back(llm: LLM, models: tuple[Path, Path], fresh: Any) -> None:
    with pytest.raises(WeightUpdateError, match="rolled back, because a load has failed"):
        with llm.update_weights(1) as update:
            update.load(DiskSource(str(models[1])))
            with pytest.raises(WeightUpdateError, match="given twice"):
                update.load(DiskSource(str(models[1])))
    assert same(ask(llm), fresh[0][0])


def test_exception_of_the_block_rolls_back_and_passes(llm: LLM, models: tuple[Path, Path], fresh: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        with llm.update_weights(1) as update:
            update.load(DiskSource(str(models[1])))
            raise ZeroDivisionError
    assert (llm.state, llm.weight_version) == (Phase.READY, 0) and same(ask(llm), fresh[0][0])
    with pytest.raises(EngineStateError, match="this update is not open"):
        update.load(DiskSource(str(models[1])))
    with pytest.raises(RuntimeError, match="entered only once"), update:
        raise AssertionError
    assert llm.state is Phase.READY


def test_error_that_is_kept_does_not_keep_the_model(models: tuple[Path, Path]) -> None:
    with opened(models[0]) as llm:
        held = weakref.ref(engine_of(llm)._runner.model.embed)  # type: ignore[union-attr]
        with pytest.raises(WeightUpdateError) as caught:
            load(llm, 1, NamedTensors({"norm.weight": torch.zeros(3)}))
    gc.collect()
    assert caught.value.mismatched and held() is None


def test_second_update_beside_an_open_one_is_refused(llm: LLM) -> None:
    with pytest.raises(EngineStateError, match="the engine is updating; leave the block"), llm.update_weights(1):
        assert llm.state is Phase.UPDATING
        with llm.update_weights(2):
            raise AssertionError
    assert llm.state is Phase.READY


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"version": -1}, "version=-1 must be an integer of at least 0"),
        ({"version": True}, "version=True must be"),
        ({"version": 1, "mode": "now"}, "mode='now' must be"),
        ({"version": 1, "partial": 1}, "partial=1 must be True or False"),
        ({"version": 1, "staged": None}, "staged=None must be True or False"),
    ],
)
def test_bad_arguments_are_refused(llm: LLM, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.update_weights(**arguments)
    assert llm.state is Phase.READY


# ---------------------------------------------------------------------------------------------------- without staging


def test_failure_without_staging_leaves_no_valid_weights_until_a_full_update(
    llm: LLM, models: tuple[Path, Path], fresh: Any
) -> None:
    load(llm, 1, DiskSource(str(models[1])), staged=False)
    assert same(ask(llm), fresh[1][0])
    with llm.stream(PROMPT, SamplingParams(max_tokens=900, ignore_eos=True)) as stream:
        next(iter(stream))
        with pytest.raises(WeightUpdateError, match="missing"):
            load(llm, 2, NamedTensors({"norm.weight": torch.zeros(32)}), staged=False)
        with pytest.raises(WeightsNotLoadedError):
            stream.final()
    assert (llm.state, llm.weight_version) == (Phase.WEIGHTS_INVALID, 1)
    with pytest.raises(WeightsNotLoadedError):
        ask(llm)
    with pytest.raises(WeightsNotLoadedError):
        llm.weight_checksums()
    with pytest.raises(WeightsNotLoadedError, match="partial=True cannot replace all"):
        load(llm, 3, DiskSource(str(models[0])), partial=True)
    with pytest.raises(WeightUpdateError, match="missing"):
        load(llm, 3, NamedTensors({}))
    assert llm.state is Phase.WEIGHTS_INVALID
    load(llm, 4, DiskSource(str(models[0])))
    assert (llm.state, llm.weight_version) == (Phase.READY, 4)
    assert same(ask(llm), fresh[0][0]) and llm.weight_checksums() == fresh[0][1]


# ----------------------------------------------------------------------------------------------- requests in the meantime


@pytest.mark.parametrize("mode", ["keep", "recompute", "wait", "abort"])
@both_loops
async def test_requests_meet_an_update_as_its_mode_says(models: tuple[Path, Path], fresh: Any, mode: Any) -> None:
    """The versions of tokens change once, at the same step for all; a request of afterwards is that of a fresh engine."""
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, logprobs=0)
    outputs: list[Any] = []

    async def generate() -> None:
        outputs.append(await llm.generate(PROMPT, params))

    async with AsyncLLM(str(models[0]), **{**MODEST, **EXACT}) as llm, anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(generate)
        while llm.stats().generated_tokens < 30:
            await anyio.sleep(0.001)
        async with llm.update_weights(5, mode=mode) as update:
            assert llm.state is Phase.UPDATING
            before = llm.stats().generated_tokens
            await update.load(DiskSource(str(models[1])))
            while llm.stats().generated_tokens == before and len(outputs) < 3:
                await anyio.sleep(0.001)  # steps go on beside the update
        later = await llm.generate(PROMPT, GREEDY)
        assert same(later, fresh[1][0]) and later.outputs[0].weight_versions == ((5, 0, 6),)
        assert llm.stats().preemptions == (3 if mode == "recompute" else 0)
    for output in outputs:
        (one,) = output.outputs
        spans = one.weight_versions
        if mode in ("keep", "recompute"):
            assert one.finish_reason == "length" and [span[0] for span in spans] == [0, 5]
            assert (spans[0][1], spans[-1][2]) == (0, 60) and spans[0][2] == spans[1][1]
        else:
            assert one.finish_reason == ("length" if mode == "wait" else "abort")
            assert spans == ((0, 0, len(one.token_ids)),)


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_open_request_goes_on_with_new_weights_from_its_tokens(models: tuple[Path, Path], llm: LLM, mode: Any) -> None:
    """With recomputed state its next tokens are what the new weights make of prompt and completion so far."""
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, logprobs=1)
    with llm.stream(PROMPT, params) as stream:
        iterator, seen = iter(stream), 0
        while seen < 7:
            seen += len(next(iterator).token_ids)
        load(llm, 3, DiskSource(str(models[1])), mode=mode)
        (one,) = stream.final().outputs
    (_, _, border), (version, start, end) = one.weight_versions
    assert (version, start, end) == (3, border, 40) and 7 <= border < 40
    scored = llm.score(PROMPT, one.token_ids, params)  # by the new weights alone
    assert one.logprobs is not None
    assert scored.sampled[border:].equal(one.logprobs.sampled[border:]) == (mode == "recompute")
    assert not scored.sampled[:border].equal(one.logprobs.sampled[:border])


def test_prefix_that_older_weights_have_cached_is_not_used(models: tuple[Path, Path], llm: LLM) -> None:
    ask(llm, LONG)
    assert ask(llm, LONG).usage.cached_tokens == 256
    load(llm, 1, DiskSource(str(models[1])))
    output = ask(llm, LONG)
    with opened(models[1], **EXACT) as other:
        assert output.usage.cached_tokens == 0 and same(output, ask(other, LONG))
    assert ask(llm, LONG).usage.cached_tokens == 256


@both_loops
async def test_cancelled_update_rolls_back(models: tuple[Path, Path], fresh: Any) -> None:
    async with AsyncLLM(str(models[0]), **{**MODEST, **EXACT}) as llm:
        with anyio.move_on_after(0.1) as scope:
            async with llm.update_weights(1) as update:
                await update.load(DiskSource(str(models[1])))
                await anyio.sleep_forever()
        assert scope.cancelled_caught and (llm.state, llm.weight_version) == (Phase.READY, 0)
        assert same(await llm.generate(PROMPT, GREEDY), fresh[0][0])


@both_loops
async def test_update_whose_load_was_cancelled_rolls_back(models: tuple[Path, Path], fresh: Any) -> None:
    """Also where the cancellation ends inside the block, and the tensors that did not come may be left out."""
    async with AsyncLLM(str(models[0]), **{**MODEST, **EXACT}) as llm:
        with pytest.raises(WeightUpdateError, match="rolled back, because a load was cancelled or has not ended"):
            async with llm.update_weights(1, partial=True) as update:
                with anyio.CancelScope() as scope:
                    scope.cancel()
                    await update.load(DiskSource(str(models[1])))
        assert scope.cancelled_caught and (llm.state, llm.weight_version) == (Phase.READY, 0)
        assert same(await llm.generate(PROMPT, GREEDY), fresh[0][0])


@both_loops
@pytest.mark.parametrize("way", ["cancelled", "late"])
async def test_load_that_has_ended_reads_its_source_no_further(models: tuple[Path, Path], way: str) -> None:
    """It read the next 64 MiB, here all of it."""
    yielded: list[str] = []
    go = threading.Event()

    def slow() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in read(models[1]).items():
            yielded.append(name)
            yield name, tensor
            go.wait(60)

    async with AsyncLLM(str(models[0]), **{**MODEST, **EXACT}) as llm:
        with pytest.raises(WeightUpdateError, match="rolled back"):
            async with llm.update_weights(1, partial=True) as update:
                with anyio.move_on_after(0.2), suppress(WeightUpdateError):
                    await update.load(NamedTensors(slow()), deadline=0.1 if way == "late" else None)
                go.set()
                for thread in [thread for thread in threading.enumerate() if thread.name == "dsv4lite-weights"]:
                    await anyio.to_thread.run_sync(thread.join, 60)
        assert len(yielded) <= 2


def test_update_that_is_left_while_a_load_goes_on_rolls_back(llm: LLM, models: tuple[Path, Path], fresh: Any) -> None:
    """What that source yields afterwards is refused."""
    begun, go = threading.Event(), threading.Event()
    refused: list[WeightUpdateError] = []

    def halting() -> Iterator[tuple[str, Tensor]]:
        begun.set()
        go.wait(60)
        yield from read(models[1]).items()

    def load_all(update: Any) -> None:
        with pytest.raises(WeightUpdateError) as caught:
            update.load(NamedTensors(halting()))
        refused.append(caught.value)

    with pytest.raises(WeightUpdateError, match="has not ended"), llm.update_weights(1, partial=True) as update:
        other = threading.Thread(target=load_all, args=(update,))
        other.start()
        begun.wait(60)
    go.set()
    other.join(60)
    assert "this update has ended" in str(refused) and (llm.state, llm.weight_version) == (Phase.READY, 0)
    assert same(ask(llm), fresh[0][0])


@pytest.mark.parametrize("staged", [True, False])
def test_update_that_is_dropped_in_its_block_rolls_back_with_a_warning(
    llm: LLM, models: tuple[Path, Path], fresh: Any, staged: bool
) -> None:
    """The engine once stayed in the state ``updating``, which refuses all further updates."""
    update = llm.update_weights(5, staged=staged)
    update.__enter__()
    update.load(NamedTensors(dict(list(read(models[1]).items())[:2])))
    with pytest.warns(ResourceWarning, match="version=5 was dropped in its block"):
        del update
        gc.collect()
    posted: Future[None] = Future()  # after the end of the update
    llm._bridge.post(lambda: posted.set_result(None))
    posted.result(60)
    assert llm.state is (Phase.READY if staged else Phase.WEIGHTS_INVALID)
    load(llm, 6, DiskSource(str(models[1])))
    assert same(ask(llm), fresh[1][0]) and llm.weight_checksums() == fresh[1][1]
    gone = llm.update_weights(7)  # was never entered
    del gone


def test_pause_before_or_during_an_update_outlasts_it(llm: LLM, models: tuple[Path, Path], fresh: Any) -> None:
    llm.pause()
    load(llm, 1, DiskSource(str(models[1])))
    assert llm.state is Phase.PAUSED
    llm.resume()
    assert same(ask(llm), fresh[1][0])
    with llm.update_weights(2) as update:
        llm.pause()
        update.load(DiskSource(str(models[0])))
    assert llm.state is Phase.PAUSED
    llm.resume()
    assert same(ask(llm), fresh[0][0])


def test_closing_the_engine_inside_an_update_is_an_error_of_the_block(models: tuple[Path, Path]) -> None:
    llm = LLM.create(str(models[0]), **MODEST)
    with pytest.raises(EngineStateError, match="closed"), llm.update_weights(1):
        llm.close()
    assert llm.state is Phase.CLOSED


# ------------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
def test_gpu_update_keeps_captured_steps(tmp_path: Path) -> None:
    """Graphs that read freed memory gave wrong numbers elsewhere: here none is captured again, and results are a fresh engine's."""
    old, new = write_for_kernels(tmp_path / "old", 0), write_for_kernels(tmp_path / "new", 1)
    settings: dict[str, Any] = {**DRAFTING, "max_model_len": 1024, "max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 30}
    with LLM(str(new), **settings) as llm:
        wanted, checksums = ask(llm), llm.weight_checksums()
    with LLM(str(old), **settings) as llm:
        ask(llm)
        graphs: Any = engine_of(llm)._runner._graphs  # type: ignore[union-attr]
        captured = {shape: id(found.graph) for shape, found in graphs._captured.items()}
        for version, tensors in enumerate((read(new), {n: t.cuda() for n, t in read(new).items()}), 1):
            load(llm, version, DiskSource(str(old)))
            load(llm, version, NamedTensors(tensors))
            assert same(ask(llm), wanted) and llm.weight_checksums() == checksums
        assert {shape: id(found.graph) for shape, found in graphs._captured.items()} == captured
