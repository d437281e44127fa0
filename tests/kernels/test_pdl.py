"""Kernels that come early wait before they touch memory; on a GPU, no kernel reads what its predecessor has not finished."""

from __future__ import annotations

import ast
import importlib
import inspect
from types import SimpleNamespace

import pytest
import torch

from dsv4lite.kernels.pdl import dependent_launch, let_successor_in, wait_for_predecessor

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402  only where there is Triton
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from dsv4lite.kernels.warmup import triton_modules  # noqa: E402

MODULES = triton_modules()


@triton.jit
def _count_kernel(x, y, BLOCK: tl.constexpr):
    wait_for_predecessor()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(x + tl.num_programs(0) * BLOCK - 1 - at)  # of another program
    let_successor_in()
    tl.store(y + at, number + 1)


def launched_early(module: str) -> list[tuple[str, list[str]]]:
    """Return the kernels that a module launches with ``launch_pdl``, each with its statements."""
    tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    kernels = {node.name: [ast.unparse(each) for each in node.body] for node in tree.body if isinstance(node, ast.FunctionDef)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and any(k.arg == "launch_pdl" for k in node.keywords)]
    names = [call.func.value.id for call in calls if isinstance(call.func, ast.Subscript) and isinstance(call.func.value, ast.Name)]
    assert len(names) == len(calls)
    return [(name, kernels[name]) for name in names]


@pytest.mark.parametrize("module", MODULES)
def test_every_kernel_that_comes_early_waits_first_or_last_if_it_overlaps_the_previous_one(module: str) -> None:
    for name, (first, *_, last) in launched_early(module):
        wait = "wait_for_predecessor()"
        assert first == wait or (first, last) == (f"if not OVERLAPS_PREVIOUS:\n    {wait}", f"if OVERLAPS_PREVIOUS:\n    {wait}"), (
            name
        )


def test_steps_of_few_tokens_are_launched_early() -> None:
    """The test above sees what it is about."""
    found = {name for module in MODULES for name, _ in launched_early(module)}
    assert found >= {"_enter_kernel", "_latent_kernel", "_product_kernel", "_decode_kernel", "_merge_kernel", "_prepare_kernel"}


@pytest.mark.parametrize(("capability", "wanted"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((12, 0), True)])
def test_dependent_launch_is_for_chips_that_know_it(
    capability: tuple[int, int], wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chip = SimpleNamespace(major=capability[0], minor=capability[1], multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: chip)
    assert dependent_launch(torch.device("cuda")) is wanted
    assert not dependent_launch(torch.device("cpu"))


@pytest.mark.kernel
@pytest.mark.parametrize("early", [False, True])
def test_instructions_are_there_only_where_the_launch_wants_them(early: bool) -> None:
    if not isinstance(_count_kernel, triton.JITFunction):
        pytest.skip("nothing is compiled for the interpreter")
    source = ASTSource(_count_kernel, {"x": "*i32", "y": "*i32", "BLOCK": "constexpr"}, {"BLOCK": 128})
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"launch_pdl": early}).asm["ptx"]
    places = [ptx.find(name) for name in ("griddepcontrol.wait", "ld.global", "griddepcontrol.launch_dependents", "st.global")]
    assert places == sorted(places) if early else [place >= 0 for place in places] == [False, True, False, True]


@pytest.mark.gpu
def test_a_chain_of_early_kernels_in_a_graph_counts_right() -> None:
    """Each reads what other programs of the last one wrote, which come and go beside it; copies and torch's kernels lie between."""
    programs, block, launches = 3000, 128, 60
    x, y = torch.zeros(2, programs * block, dtype=torch.int32, device="cuda")

    def chain() -> None:
        for number in range(launches):
            if number % 20 == 7:
                x.add_(1)
                x.sub_(1)
            if number % 20 == 13:
                y.copy_(x)
                y.zero_()
            for source, to in ((x, y), (y, x)):
                _count_kernel[(programs,)](source, to, BLOCK=block, launch_pdl=dependent_launch(x.device))

    chain()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        chain()
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert x.unique().tolist() == [21 * 2 * launches]
