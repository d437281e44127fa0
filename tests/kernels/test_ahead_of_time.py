"""Every kernel compiles to some work for every GPU it is launched on, within that chip's shared memory, on a machine without one.

What is compiled is what the launchers ask for on a pretended chip (``launches.py``). Some of each kernel's specializations are
compiled, the one with the largest constants among them: more for the chip at hand, both ends for the oldest, which lacks
instructions. Processes share the work; an unchanged kernel comes from Triton's cache.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import multiprocessing
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from math import prod

import pytest

pytest.importorskip("triton")

from dsv4lite.kernels.attention import triton as attention_triton
from dsv4lite.kernels.experts import decode_small_triton
from dsv4lite.kernels.experts import triton as experts_triton
from dsv4lite.kernels.gemm import prefill_triton as gemm_prefill_triton
from dsv4lite.kernels.gemm import triton as gemm_triton
from dsv4lite.kernels.hc import LEAST_RESIDENT
from dsv4lite.kernels.indexer import triton as indexer_triton
from dsv4lite.kernels.warmup import Specialization, triton_modules
from tests.kernels.launches import CHIPS, launches

# Bytes of shared memory that one program may use.
SHARED_MEMORY = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
REGISTERS = 1 << 16  # of a multiprocessor; a thread has at most 255, which count as 256
MOST = {80: 2, 89: 1, 90: 4, 100: 1, 120: 1}  # specializations of one kernel
# Constants with which a source is compiled to another kernel: for FP8 or bfloat16, packed or unquantized rows, one product or two.
KINDS = {
    "_product_kernel": ("FP8_X",),
    "_row_kernel": ("FP8", "FLOAT"),
    "_attend_kernel": ("PACKED",),
    "_merge_kernel": ("FILLS",),
    "_weight_only_kernel": ("GROUP", "SWIGLU"),
    "_latent_kernel": ("KIND",),
    "_heads_kernel": ("FP4_LOG",),
    "route_kernel": ("GROUPED",),
    "_store_tiles_kernel": ("FP4",),
    **dict.fromkeys(("_absorbed_kernel", "_latent_rows_kernel", "_key_kernel", "_scores_kernel"), ("FP8",)),
}
# Of modules whose kernels need e4m3, or run on Hopper alone.
ONLY = {
    "gemm.decode_1_triton": CHIPS[1:],
    "gemm.prefill_triton": (90, 100),
    **dict.fromkeys(("attention.prefill_triton", "gemm.prefill_fp8_triton"), (90,)),
    **dict.fromkeys((f"experts.prefill_{kind}_triton" for kind in ("bf16", "fp4", "fp8")), (90,)),
    **dict.fromkeys((f"latent_attention.{part}_hopper_triton" for part in ("decode", "decode_fp8", "prefill")), (90,)),
}
# PTX, with or without a predicate; a descriptor's copy names the memory that it writes first.
WRITES = re.compile(r"^\s*(?:@!?%p\d+\s+)?(?:(?:st|red|atom)\.(?:\w+\.)*|cp\.async\.bulk\.tensor\.\dd\.)global\b", re.MULTILINE)
# The wait for the kernel before, and whatever touches global memory.
TOUCHES = re.compile(
    r"griddepcontrol\.wait|^\s*(?:@!?%p\d+\s+)?(?:ld|st|red|atom|cp|prefetch)\.(?:[\w:]+\.)*global\b", re.MULTILINE
)
# Layouts in which a thread's four codes are of one row, as assembly wants them that takes one row's scales (``widen_triton``). The
# compiler is free to choose others: keys that the matrix unit took from registers were once of two rows.
FOUR_OF_A_ROW = re.compile(r"register = \[\[(?:0, )+1\], \[(?:0, )+2\]|sizePerThread = \[1, (?:4|8|16|32)\]")


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel of a module, for one chip."""

    module: str
    kernel: str
    capability: int


def launched(module: str) -> set[str]:
    """Names of the kernels that a module launches, as ``name[grid](...)``."""
    tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    calls = [node.func.value for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)]
    return {name.id for name in calls if isinstance(name, ast.Name)}


def cases() -> Iterator[object]:
    for name in triton_modules():
        short = name.removeprefix("dsv4lite.kernels.")
        for kernel in sorted(launched(name)):
            for chip in CHIPS:
                if chip in ONLY.get(short, CHIPS):
                    yield pytest.param(Case(name, kernel, chip), id=f"{short}-{kernel}-sm{chip}")


def chosen(every: list[Specialization], most: int) -> list[Specialization]:
    """Return the one with the largest constants and others at even distances, the one with the smallest if there are two."""
    every = sorted(every, key=lambda one: prod(value for value in one.constants.values() if type(value) is int and value > 0))
    last, gaps = len(every) - 1, max(1, most - 1)
    return [every[at] for at in sorted({last - round(i * last / gaps) for i in range(most)})]


def by_kind(every: list[Specialization]) -> list[list[Specialization]]:
    """Return specializations by the constants of ``KINDS``."""
    kinds: dict[object, list[Specialization]] = {}
    for one in every:
        constants = constants_of(one)
        kinds.setdefault(tuple(constants.get(name) for name in KINDS.get(one.name, ())), []).append(one)
    return list(kinds.values())


@dataclass(frozen=True, slots=True)
class Compiled:
    """What came of a specialization.

    Attributes:
        shared: Bytes of shared memory of one program.
        stores: Instructions in PTX that write to global memory.
        waits: How often it waits for the kernel before.
        late: Whether something else touches global memory before that; after that, if it runs at the same time as that kernel.
        mixed: Layouts in which codes of several rows would be given one row's scales.
    """

    shared: int
    stores: int
    waits: int
    late: bool
    mixed: tuple[str, ...]


def compile_one(specialization: Specialization) -> Compiled:
    """Compile a specialization."""
    kernel = specialization.compile()
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", kernel.asm["ttgir"], re.MULTILINE))
    registers = re.escape(importlib.import_module("dsv4lite.kernels.widen_triton")._WIDEN_REGISTERS.value)
    assembly = rf'inline_asm "[^"]*" {{constraints = "{registers}", packed_element = 4 .*-> tensor<[^,]*, (#\w+)>'
    used = {layouts[name] for name in re.findall(assembly, kernel.asm["ttgir"])}
    mixed = tuple(layout for layout in used if not FOUR_OF_A_ROW.search(layout))
    ptx = kernel.asm["ptx"]
    waits, touches = ptx.count("griddepcontrol.wait"), [found.group() for found in TOUCHES.finditer(ptx)]
    at_its_end = constants_of(specialization).get("OVERLAPS_PREVIOUS", False)  # it runs at the same time as the kernel before
    late = waits > 0 and touches[-1 if at_its_end else 0] != "griddepcontrol.wait"
    return Compiled(kernel.metadata.shared, len(WRITES.findall(ptx)), waits, late, mixed)


@dataclass(frozen=True, slots=True)
class Work:
    """What the chosen tests want to know.

    Attributes:
        found: What the launches of each kernel would have compiled.
        compiling: Some of that, under way.
    """

    found: Mapping[Case, list[Specialization]]
    compiling: Mapping[Case, list[Future[Compiled]]]


@pytest.fixture(scope="module")
def work(request: pytest.FixtureRequest) -> Iterator[Work]:
    """Find each chip's launches, and have some of them compiled."""
    params = [item.callspec.params for item in request.session.items if item.path == request.path]
    wanted = {param["case"] for param in params if "case" in param}
    chips = sorted({case.capability for case in wanted} | {param["chip"] for param in params if "chip" in param})
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            found: dict[Case, list[Specialization]] = {}
            for chip, specializations in zip(chips, pool.map(launches, chips), strict=True):
                for one in specializations:
                    found.setdefault(Case(one.module, one.name, chip), []).append(one)
            compiling = {
                case: [
                    pool.submit(compile_one, one) for kind in by_kind(found[case]) for one in chosen(kind, MOST[case.capability])
                ]
                for case in sorted(wanted & found.keys(), key=str)
            }
            yield Work(found, compiling)
        finally:
            pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("case", list(cases()))
def test_kernel_compiles(case: Case, work: Work) -> None:
    """One that writes nothing was optimised away: wide tiles on sm_100 once were, without a word."""
    assert case in work.compiling, "none of the launches in launches.py is this kernel's"
    for future in work.compiling[case]:
        kernel = future.result()
        assert kernel.shared <= SHARED_MEMORY[case.capability]
        assert kernel.stores > 0
        assert kernel.waits <= (case.capability >= 90) and not kernel.late
        assert kernel.mixed == ()
        if case.kernel == "_enter_kernel":  # whose programs wait for others: so many have to fit
            assert kernel.shared <= SHARED_MEMORY[case.capability] / LEAST_RESIDENT
            assert all(one.options["num_warps"] * 32 * 256 * LEAST_RESIDENT <= REGISTERS for one in work.found[case])


def constants_of(one: Specialization) -> dict[str, object]:
    """Return the constants by the names of the arguments, and the options that belong to a tile."""
    names = getattr(importlib.import_module(one.module), one.name).arg_names
    constants = {names[path[0]]: value for path, value in one.constants.items()}
    return constants | {"num_warps": one.options["num_warps"], "num_stages": one.options["num_stages"]}


@pytest.mark.parametrize("chip", CHIPS)
def test_launches_take_every_tile(chip: int, work: Work) -> None:
    """The steps of ``launches.py`` have as many tokens as it takes for launchers to choose each tile that they have."""

    def tiles(module: str, kernel: str, *names: str) -> set[tuple[object, ...]]:
        every = map(constants_of, work.found[Case(f"dsv4lite.kernels.{module}", kernel, chip)])
        return {tuple(one[name] for name in names) for one in every}

    names = ("BM", "BN", "num_warps")
    products = tiles("gemm.triton", "_product_kernel", *names, "FP8_X", "SCALE_ROWS")
    for kinds, *operands in (
        (gemm_triton._FP8_TILES, True, 128),
        (gemm_triton._WEIGHT_ONLY_TILES, False, 128),
        (gemm_triton._UNQUANTIZED_TILES, False, 0),
    ):
        every = (*(tile for *_, tile in (*kinds.few, *kinds.between)), kinds.many)
        wanted = {(tile.rows, tile.outs, tile.num_warps, *operands) for tile in every if gemm_triton.fitted(kinds, tile, chip)}
        assert wanted <= products, wanted - products
    if chip in ONLY["gemm.prefill_triton"]:
        wanted = {(tile.rows, tile.outs, tile.num_warps) for tile in gemm_prefill_triton._TILES}
        assert wanted == tiles("gemm.prefill_triton", "_many_rows_kernel", *names)
    blocks = {(block.rows, block.tiles, block.num_warps) for _, block in (*experts_triton.DECODE_BLOCKS, *experts_triton.BLOCKS)}
    for kernel in ("gate_up_tile", "down_tile"):
        assert blocks <= tiles("experts.triton", kernel, "ROWS", "TILES", "num_warps")
    few = {(block.tiles, block.num_stages) for _, block in decode_small_triton.GATE_UP}
    assert few <= tiles("experts.decode_small_triton", "_experts_kernel", "TILES", "STAGES")
    heads = (8, 16, 32, 64, 128)
    attention = {attention_triton.tile_for(chip)}
    shapes = itertools.product(heads, (1024, 2048), (1, attention_triton.SMALL_BLOCK_SPLITS), (chip,))
    unquantized = {attention_triton.unquantized_tile_for(*shape) for shape in shapes}
    wanted = {(tile.heads, tile.rows, tile.swap, tile.num_warps, True) for tile in attention}
    wanted |= {(tile.heads, tile.rows, tile.swap, tile.num_warps, False) for tile in unquantized}
    assert wanted <= tiles("attention.triton", "_attend_kernel", "HEADS", "ROWS", "SWAP", "num_warps", "PACKED")
    sizes = [1 << n for n in range(10, indexer_triton.MOST.bit_length())]
    assert {(size, max(min(4, size // 512), size // 2048)) for size in sizes} <= tiles(
        "indexer.triton", "_select_kernel", "BLOCK", "num_warps"
    )
    assert {(number,) for number in range(5)} <= tiles("indexer.triton", "_segment_kernel", "PASS")


def place_of_heads(one: Specialization) -> str:
    """Return where threads hold the heads of the products [keys, heads] that the scores' kernel adds."""
    ttgir = one.compile().asm["ttgir"]
    (name,) = set(re.findall(r"\}\) : \(tensor<\d+x\d+xf32, (#\w+)>\) ->", ttgir))
    (layout,) = re.findall(rf"^{name} = (.*)$", ttgir, re.MULTILINE)
    if "linear" in layout:  # the heads that the bits of a register's, a lane's and a warp's number stand for
        bits = re.findall(r"(\w+) = \[(.*?\]|)\](?=,)", layout)
        return str([(kind, re.findall(r"\[0, (\d+)\]", places)) for kind, places in bits])
    (warps,), (shape,) = re.findall(r"warpsPerCTA = \[\d+, (\d+)\]", layout), re.findall(r"instrShape = \[(.*?)\]", layout)
    return f"{warps} warps of {shape}"


@pytest.mark.parametrize("chip", CHIPS)
def test_scores_add_heads_in_one_order(chip: int, work: Work) -> None:
    """Scores of a token would otherwise depend on whether it decodes or is one of a prompt."""
    places: dict[tuple[object, ...], set[str]] = {}
    for one in work.found[Case("dsv4lite.kernels.indexer.triton", "_scores_kernel", chip)]:
        constants = constants_of(one)
        if constants["HEADS"] == 64:
            kind = one.signature["iq"], constants["GROUPS"], constants["FP8"]
            places.setdefault(kind, set()).add(place_of_heads(one))
    assert len(places) >= 3 and all(len(found) == 1 for found in places.values()), places
