"""The rules of the house, read from the package's syntax trees: which room may import which, and what no module does.

A finding reads ``dsv4lite/file.py:line: what``. Where a table below lists an exception, the exception must still be needed.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import dsv4lite
from dsv4lite import paging
from dsv4lite.kernels import indexer

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "dsv4lite"

# The layers, from the ground up. A room is a folder or a file of the package; a module belongs to the longest name that fits.
# A module may import from its own room and from layers below. Rooms side by side do not know each other.
LAYERS: tuple[dict[str, tuple[str, ...]], ...] = (
    {"vocabulary": ("errors", "bare", "checks", "files", "request", "config", "layout", "paging", "progress")},
    {"text": ("text",), "kernels": ("kernels",), "scheduling": ("scheduling",), "device": ("device",)},
    {"state": ("state",), "parallel": ("parallel",)},
    {"models": ("models", "weights")},
    {"sampling": ("sampling",)},
    {"speculation": ("speculation",)},
    {"planning": ("planning",)},
    {"engine": ("engine",)},
    {"training": ("training",)},
    {"api": ("api", "llm"), "debug": ("debug",)},
    {"integrations": ("integrations",)},
    {"door": ("", "__main__")},
)
# Imports that point upward all the same: for annotations, or once a request asks for it.
UPWARD = {
    ("config", "models.family"): "the type of a family of the host's own",
    ("config", "parallel.experts"): "the type of what makes a dispatcher",
    ("config", "weights.formats"): "the type of a weight-only format of the host's own",
    ("request", "text.parse"): "the type of a parsed tool call",
    ("request", "text.tokenizer"): "the type of what makes text of tokens in bodies of OpenAI's format",
    ("request", "text.structured"): "a grammar given as a dict becomes a value when a request has one",
}
# What a room must not know although it lies below.
UNKNOWN_TO = {
    "models": ("request", "text", "scheduling"),
    "text": ("config",),
    "parallel": ("request",),
    "api": ("kernels", "models", "weights", "parallel"),
}
# Importing these must not need torch: policy is plain Python, and the api passes tensors on without making them.
WITHOUT_TORCH = (
    "errors", "checks", "files", "request", "config", "layout", "paging", "llm", "models.deepseek_v4.config",
    "models.deepseek_mla.config", "parallel.shard",
    "parallel.eplb", "text.chat", "text.parse", "text.tokenizer", "speculation.speculator", "speculation.ngram", "scheduling",
    "api",
)  # fmt: skip
READS_ENVIRONMENT = "config"
PROGRAM = "__main__"  # where we are the host ourselves, and may print and set up logging
# What belongs to the process, and so to the host. Assigning to any of these is as forbidden as calling it.
HOSTS = (
    "asyncio.set_event_loop", "asyncio.set_event_loop_policy", "atexit.register", "faulthandler.enable", "gc.disable", "gc.enable",
    "gc.freeze", "gc.set_threshold", "locale.setlocale", "multiprocessing.set_start_method", "os.chdir", "os.fork", "os.putenv",
    "os.umask", "os.unsetenv", "random.seed", "resource.setrlimit", "signal.set_wakeup_fd", "signal.signal", "sys.excepthook",
    "sys.path", "sys.setrecursionlimit", "sys.setswitchinterval", "threading.excepthook", "threading.setprofile",
    "threading.settrace", "torch.autograd.set_grad_enabled", "torch.backends", "torch.cuda.manual_seed", "torch.cuda.set_device",
    "torch.cuda.set_stream", "torch.distributed.init_process_group", "torch.manual_seed", "torch.multiprocessing.set_start_method",
    "torch.random.manual_seed", "torch.seed", "torch.set_default_device", "torch.set_default_dtype",
    "torch.set_default_tensor_type", "torch.set_deterministic_debug_mode", "torch.set_float32_matmul_precision",
    "torch.set_flush_denormal",
    "torch.set_num_interop_threads", "torch.set_num_threads", "torch.set_rng_state", "torch.use_deterministic_algorithms",
    "warnings.filterwarnings", "warnings.resetwarnings", "warnings.simplefilter",
)  # fmt: skip
# Ranks that we start ourselves are our own processes, and so is a command.
OWN_PROCESSES = {
    *(("parallel.launch", name) for name in ("torch.cuda.set_device", "torch.set_num_threads")),
    ("bare", "warnings.filterwarnings"),  # as before once torch is imported
}
# Public functions whose ``**keywords`` are no TypedDict, and why.
OPEN_KEYWORDS = {
    "integrations.verl.Rollout.update_weights": "options of verl's other engines",
    "integrations.verl.Server.start_profile": "those of verl's profiler",
    "kernels.dispatch.Op.__call__": "those of the op's reference",
    "kernels.dispatch.Op.launches": "those of the op's reference",
    "planning.memory.plan_memory": "fields of EngineConfig, which names unknown ones",
    "request.SamplingParams.replace": "its own fields, which its constructor checks",
    "request.SamplingParams.for_rollout": "its own fields, which its constructor checks",
}
# Caches that outlive an engine, and why.
CACHES = {
    "kernels.counters._counters": "scratch of one stream, zero between kernels; engines have streams of their own",
    "kernels.dispatch._known_gpu": "of a device, which does not change",
    "kernels.gemm.prefill_triton._tile_for": "follows from its arguments alone; every launch asks",
    "kernels.gemm.triton.tile_for": "follows from its arguments alone; every launch asks",
    "state.paging._integers": "integers in order; slices of them are positions",
    "kernels.warmup._load_launchers_one_by_one": "Triton has one loader for the whole process",
    "device._idle_streams": "PyTorch keeps memory for every stream that was ever used",
}
MAX_PACKAGE_LINES = 47_368
MAX_TEST_LINES = 46_167
MAX_FUNCTION_LINES = 80

# Debts. These may only shrink: public names that docs/api.md does not describe yet and ops without tests
# of their own.
UNDOCUMENTED: set[str] = set()
UNTESTED: set[str] = set()
ALWAYS_LAUNCHED = {"kernels.peer_memory.triton"}  # launchers of ops that run no reference

MUTABLE = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict", "WeakKeyDictionary",
           "WeakValueDictionary", "WeakSet", "count", "cycle", "Lock", "RLock", "Condition", "Event", "local", "ContextVar",
           "ThreadPoolExecutor", "SimpleQueue", "Queue"}  # fmt: skip
MUTATORS = {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "clear", "remove", "discard", "sort",
            "appendleft", "popleft", "reverse"}  # fmt: skip
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One imported module, by its full name.

    Attributes:
        eager: Importing the module runs it: it stands outside of functions and of ``if TYPE_CHECKING``.
    """

    target: str
    line: int
    eager: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Module:
    name: str  # without the package's own: "engine.pages"; "" is the package itself
    path: Path
    tree: ast.Module
    nodes: tuple[ast.AST, ...]  # all of the tree

    def at(self, node: ast.AST | int, what: str) -> str:
        line = node if isinstance(node, int) else getattr(node, "lineno", 0)
        return f"{self.path.relative_to(ROOT)}:{line}: {what}"


def _modules() -> dict[str, Module]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found[name] = Module(name=name, path=path, tree=tree, nodes=tuple(ast.walk(tree)))
    return found


MODULES = _modules()


@cache
def imports(module: Module) -> tuple[Import, ...]:
    """Every import of a module, wherever it stands."""

    def visit(node: ast.AST, eager: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(target=alias.name, line=node.lineno, eager=eager)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, module.at(node, "a relative import")
            origin = node.module or ""
            inner = origin.removeprefix("dsv4lite").lstrip(".")
            for alias in node.names:
                submodule = f"{inner}.{alias.name}".lstrip(".")
                is_module = origin.startswith("dsv4lite") and submodule in MODULES
                yield Import(target=f"dsv4lite.{submodule}" if is_module else origin, line=node.lineno, eager=eager)
        else:
            for_types = isinstance(node, ast.If) and dotted(node.test).endswith("TYPE_CHECKING")
            lazy = for_types or isinstance(node, Function | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from visit(child, eager and not lazy)

    return tuple(visit(module.tree, True))


def inner_imports(module: Module) -> Iterator[tuple[str, Import]]:
    """The imports of a module from its own package, by name without the package's."""
    for found in imports(module):
        if found.target.split(".")[0] == "dsv4lite":
            yield found.target.removeprefix("dsv4lite").lstrip("."), found


def is_within(name: str, prefix: str) -> bool:
    return name == prefix or (prefix != "" and name.startswith(prefix + "."))


def place(name: str) -> tuple[int, str] | None:
    """The layer and the room of a module."""
    fits = [
        (len(prefix), level, room)
        for level, rooms in enumerate(LAYERS)
        for room, prefixes in rooms.items()
        for prefix in prefixes
        if is_within(name, prefix)
    ]
    return max(fits)[1:] if fits else None


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of names and attributes, else nothing."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return ""


@cache
def full_names(module: Module) -> Callable[[ast.AST], str]:
    """A function that names what an expression refers to by its full name: ``environ`` as ``os.environ``."""
    origins = {}
    for node in module.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                origins[alias.asname or alias.name.split(".")[0]] = alias.name if alias.asname else alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                origins[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def resolve(node: ast.AST) -> str:
        head, dot, rest = dotted(node).partition(".")
        return origins.get(head, head) + dot + rest

    return resolve


def functions(module: Module) -> Iterator[tuple[str, Function]]:
    """Every function with its name inside the package: ``llm.LLM.chat``."""

    def visit(node: ast.AST, name: str) -> Iterator[tuple[str, Function]]:
        for child in ast.iter_child_nodes(node):
            inner = name
            if isinstance(child, Function | ast.ClassDef):
                inner = f"{name}.{child.name}".lstrip(".")
            if isinstance(child, Function):
                yield inner, child
            yield from visit(child, inner)

    yield from visit(module.tree, module.name)


def findings(rule: Callable[[Module], Iterator[str]]) -> list[str]:
    return [finding for module in MODULES.values() for finding in rule(module)]


def rule(check: Callable[[Module], Iterator[str]]) -> Callable[[], None]:
    """Make a test of a generator of what is wrong with a module."""

    def test() -> None:
        assert findings(check) == []

    test.__doc__ = check.__doc__
    return test


# ---------------------------------------------------------------------------------------------------------- who knows whom


def test_modules_each_have_a_room() -> None:
    assert [name for name in MODULES if place(name) is None and MODULES[name].tree.body] == []


@rule
def test_imports_point_downward_or_stay_in_their_room(module: Module) -> Iterator[str]:
    here = place(module.name)
    for name, found in inner_imports(module):
        there = place(name)
        if here is None or there is None or here == there or there[0] < here[0] or (module.name, name) in UPWARD:
            continue
        yield module.at(found.line, f"{here[1]} imports {name} of {there[1]}")


def test_upward_imports_are_lazy_and_still_needed() -> None:
    upward = {(module.name, name): found for module in MODULES.values() for name, found in inner_imports(module)}
    assert [pair for pair in UPWARD if pair not in upward] == []
    assert [pair for pair in UPWARD if upward[pair].eager] == []


def test_import_graph_has_no_cycle() -> None:
    graph = {module.name: {name for name, found in inner_imports(module) if found.eager} for module in MODULES.values()}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"a cycle of imports: {' -> '.join((*path[path.index(name) :], name))}"
        if name not in done:
            for target in sorted(graph.get(name, ())):
                visit(target, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


@rule
def test_rooms_do_not_know_what_is_none_of_their_business(module: Module) -> Iterator[str]:
    here = place(module.name)
    for name, found in inner_imports(module):
        for unknown in UNKNOWN_TO.get(here[1], ()) if here else ():
            if is_within(name, unknown):
                yield module.at(found.line, f"{name} is none of its business")


@rule
def test_families_are_named_by_their_own_folder_and_one_table(module: Module) -> Iterator[str]:
    """A family is a value: only ``models/family.py``, which has the table, imports the modules of a family's folder."""
    families = {name for name, module in MODULES.items() if name.startswith("models.") and module.path.parent != PACKAGE / "models"}
    families = {".".join(name.split(".")[:2]) for name in families}
    assert "models.deepseek_v4" in families
    for name, found in inner_imports(module):
        own = [family for family in families if is_within(name, family) and not is_within(module.name, family)]
        if own and module.name != "models.family":
            yield module.at(found.line, f"imports {name}")


def test_page_sizes_of_the_kernels_are_those_of_the_state() -> None:
    """``kernels`` imports nothing of the package, so it has a copy of its own."""
    assert indexer.PAGE_TOKENS == paging.PAGE_TOKENS and paging.PAGE_TOKENS % paging.WINDOW_PAGE_TOKENS == 0


@rule
def test_kernels_import_only_torch_and_triton_and_themselves(module: Module) -> Iterator[str]:
    for found in imports(module) if is_within(module.name, "kernels") else ():
        top = found.target.split(".")[0]
        if top not in {"torch", "triton"} | sys.stdlib_module_names and not is_within(found.target, "dsv4lite.kernels"):
            yield module.at(found.line, f"imports {found.target}")


@rule
def test_only_declared_dependencies_are_imported(module: Module) -> Iterator[str]:
    """The six dependencies; what extras bring is imported inside functions only."""
    always = {"dsv4lite", "torch", "triton", "anyio", "safetensors", "huggingface_hub", "tokenizers"} | sys.stdlib_module_names
    extras = {"tqdm", "llguidance", "trio", "jinja2"}
    for found in imports(module):
        top = found.target.split(".")[0]
        if top not in always and not (top in extras and not found.eager) and not is_within(module.name, "integrations"):
            yield module.at(found.line, f"imports {found.target}")


def test_torch_free_modules_import_with_torch_blocked() -> None:
    """The package's own ``__init__`` is left out, for it may offer names that do need torch."""
    names = [name for name in MODULES if any(is_within(name, prefix) for prefix in WITHOUT_TORCH)]
    program = f"""
import importlib, sys, types
package = sys.modules["dsv4lite"] = types.ModuleType("dsv4lite")
package.__path__ = [{str(PACKAGE)!r}]
sys.modules["torch"] = sys.modules["triton"] = None
for name in {names!r}:
    importlib.import_module(f"dsv4lite.{{name}}")
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


# ---------------------------------------------------------------------------------------------------- what no module does


@rule
def test_package_does_not_print_nor_probe_nor_leave_things_unwritten(module: Module) -> Iterator[str]:
    forbidden = {"hasattr", "NotImplementedError", "NotImplemented"}
    forbidden |= set() if module.name == PROGRAM else {"print", "breakpoint", "input"}
    forbidden -= {"input"} if module.name == "integrations.inspect_ai" else set()  # Inspect names a parameter so
    for node in module.nodes:
        if isinstance(node, ast.Name) and node.id in forbidden:
            yield module.at(node, node.id)
    for number, line in enumerate(module.path.read_text(encoding="utf-8").splitlines(), start=1):
        if any(mark in line for mark in ("TODO", "FIXME", "XXX", "HACK")):
            yield module.at(number, line.strip())


@rule
def test_logging_is_by_name_and_leaves_handlers_and_levels_alone(module: Module) -> Iterator[str]:
    allowed = {"logging.getLogger", "logging.Logger", "logging.LoggerAdapter", "logging.DEBUG", "logging.INFO", "logging.WARNING"}
    resolve = full_names(module)
    for node in module.nodes if module.name != PROGRAM else ():
        name = resolve(node)
        if name.startswith("logging.") and name not in allowed and not name.startswith("logging.getLogger"):
            yield module.at(node, name)
        if isinstance(node, ast.Attribute) and node.attr in {"addHandler", "removeHandler", "addFilter", "setLevel"}:
            yield module.at(node, node.attr)
        if isinstance(node, ast.Call) and resolve(node.func) == "logging.getLogger":
            named = node.args and isinstance(node.args[0], ast.Constant) and str(node.args[0].value).startswith("dsv4lite")
            if not named:
                yield module.at(node, 'a logger must be named "dsv4lite..."')


@rule
def test_environment_is_read_in_one_place_and_written_nowhere(module: Module) -> Iterator[str]:
    resolve = full_names(module)
    for node in module.nodes:
        if not isinstance(node, ast.Name | ast.Attribute) or resolve(node) not in {"os.environ", "os.environb", "os.getenv"}:
            continue
        if module.name != READS_ENVIRONMENT:
            yield module.at(node, "reads the environment")
    for node in module.nodes:
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and resolve(node.value) == "os.environ":
            yield module.at(node, "writes the environment")
        if isinstance(node, ast.Attribute) and resolve(node.value) == "os.environ" and node.attr in MUTATORS:
            yield module.at(node, "writes the environment")


@rule
def test_package_does_not_touch_what_belongs_to_the_host(module: Module) -> Iterator[str]:
    resolve = full_names(module)
    for node in module.nodes:
        if isinstance(node, ast.Call):
            name = resolve(node.func)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = resolve(node)
        else:
            continue
        for forbidden in HOSTS:
            if is_within(name, forbidden) and (module.name, forbidden) not in OWN_PROCESSES and "is_" not in name:
                yield module.at(node, name)


@rule
def test_numbers_of_the_host_are_sent_to_the_device(module: Module) -> Iterator[str]:
    """``torch.tensor`` on a GPU waits for the step in flight, so that no step was launched beside one that began a sequence."""
    if module.name.split(".")[0] in ("engine", "sampling", "speculation", "state"):
        for node in module.nodes:
            if isinstance(node, ast.Call) and dotted(node.func) == "torch.tensor":
                devices = [keyword.value for keyword in node.keywords if keyword.arg == "device"]
                if not all(isinstance(device, ast.Constant) and device.value == "cpu" for device in devices):
                    yield module.at(node, "torch.tensor on a device: use kernels.dispatch.send")


@rule
def test_new_tensors_name_their_dtype_and_device(module: Module) -> Iterator[str]:
    """Without, they take the host's defaults."""
    makers = {"empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randint", "randn", "tensor", "zeros"}
    resolve = full_names(module)
    for node in module.nodes:
        name = resolve(node.func) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and name.removeprefix("torch.") in makers | {"arange"} and name.startswith("torch."):
            needed = {"device"} if name == "torch.arange" else {"dtype", "device"}
            if missing := needed - {keyword.arg for keyword in node.keywords}:
                yield module.at(node, f"{name} without {', '.join(sorted(missing))}")


@rule
def test_modules_and_classes_hold_no_mutable_state(module: Module) -> Iterator[str]:
    """A table may be a dict or a list, in capitals, and then no code changes it."""
    for body in (module.tree.body, *(node.body for node in module.nodes if isinstance(node, ast.ClassDef))):
        for statement in body:
            if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
                continue
            kind = mutable_kind(statement.value)
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for name in (target.id for target in targets if isinstance(target, ast.Name)):
                table = kind == "display" and name.lstrip("_").isupper()
                if kind and not table and name not in {"__all__", "__slots__"}:
                    yield module.at(statement, f"{name} is mutable state")
    for node in module.nodes:
        if isinstance(node, ast.Global):
            yield module.at(node, f"global {', '.join(node.names)}")
        if isinstance(node, Function):
            for decorator in node.decorator_list:
                name = dotted(decorator.func if isinstance(decorator, ast.Call) else decorator).split(".")[-1]
                if name in {"cache", "lru_cache"} and f"{module.name}.{node.name}" not in CACHES:
                    yield module.at(node, f"{node.name} remembers its results for all engines")


def test_architecture_page_names_every_cache_that_outlives_an_engine() -> None:
    """It said that there is none."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    assert [name for name in CACHES if f"`{name}`" not in page] == []


def mutable_kind(value: ast.expr) -> str:
    """``display`` for a literal or comprehension, ``call`` for the making of an object that changes, else nothing."""
    if isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp):
        return "display"
    if isinstance(value, ast.Call):
        name = dotted(value.func).split(".")[-1]
        return "display" if name in {"list", "dict", "set"} else "call" if name in MUTABLE else ""
    return ""


TABLES = {
    target.id
    for module in MODULES.values()
    for node in module.tree.body
    if isinstance(node, ast.Assign | ast.AnnAssign)
    for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    if isinstance(target, ast.Name) and target.id.lstrip("_").isupper()
}


@rule
def test_tables_never_change(module: Module) -> Iterator[str]:
    for node in module.nodes:
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            name = dotted(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            name = dotted(node.func.value)
        elif isinstance(node, ast.AugAssign):
            name = dotted(node.target)
        else:
            continue
        if name.split(".")[-1] in TABLES:
            yield module.at(node, f"changes {name}")


@rule
def test_no_exception_is_swallowed_whole(module: Module) -> Iterator[str]:
    """Catching everything is for handing it on; only a named error may be ignored."""
    broad = {"", "Exception", "BaseException"}
    for node in module.nodes:
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            idle = all(isinstance(s, ast.Pass | ast.Continue | ast.Break) or is_constant(s) for s in node.body)
            if node.type is None or (idle and any(dotted(kind) in broad for kind in caught if kind is not None)):
                yield module.at(node, "swallows every exception")
        suppresses = isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] == "suppress"
        if suppresses and any(dotted(arg) in broad for arg in node.args):
            yield module.at(node, "suppresses every exception")


def is_constant(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def test_public_functions_take_no_open_keywords() -> None:
    seen = set()

    def opens(module: Module) -> Iterator[str]:
        for name, function in functions(module):
            keywords = function.args.kwarg
            public = not any(part.startswith("_") and not part.endswith("__") for part in name.split("."))
            if keywords is None or not public or _is_unpack(keywords.annotation):
                continue
            seen.add(name)
            if name not in OPEN_KEYWORDS:
                yield module.at(function, f"{name} takes **{keywords.arg}")

    assert findings(opens) == []
    assert set(OPEN_KEYWORDS) <= seen


def _is_unpack(annotation: ast.expr | None) -> bool:
    return isinstance(annotation, ast.Subscript) and dotted(annotation.value).split(".")[-1] == "Unpack"


# ------------------------------------------------------------------------------------------------------ sizes and coverage


@pytest.mark.parametrize(("folder", "most"), [("dsv4lite", MAX_PACKAGE_LINES), ("tests", MAX_TEST_LINES)])
def test_lines_stay_within_their_budget(folder: str, most: int) -> None:
    """A change may lower the budget, and raise it only in a commit that says what was bought."""
    assert sum(path.read_bytes().count(b"\n") for path in (ROOT / folder).rglob("*.py")) <= most


@rule
def test_functions_stay_within_their_budget(module: Module) -> Iterator[str]:
    for name, function in functions(module):
        lines = (function.end_lineno or 0) - function.lineno + 1
        if lines > MAX_FUNCTION_LINES:
            yield module.at(function, f"{name} has {lines} lines")


def test_public_names_are_documented() -> None:
    """Each stands in backticks, in a heading or in a tree of docs/api.md."""
    page = ROOT / "docs" / "api.md"
    text = page.read_text() if page.exists() else ""
    missing = {name for name in dsv4lite.__all__ if not re.search(rf"(`|^#.*|^[│├└─ ]*)\b{name}\b", text, re.MULTILINE)}
    assert missing - UNDOCUMENTED == set()


def test_every_op_has_its_tests() -> None:
    """A file of ``tests/kernels`` names each public function of the ops.

    A reference may hide behind its op, and so may a launcher that is called by ``launch`` or whose op always launches. Kernels
    themselves are what the ahead-of-time test compiles.
    """
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "kernels").glob("test_*.py"))
    named, launched = set(re.findall(r"\w+", text)), set(re.findall(r"\blaunch\((\w+)", text))
    untested = set()
    for module in MODULES.values():
        if not module.name.startswith("kernels."):
            continue
        for node in module.tree.body:
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            compiled = any(dotted(d.func if isinstance(d, ast.Call) else d) == "triton.jit" for d in node.decorator_list)
            name = node.name.removesuffix("_ref")
            name = name.removesuffix("_triton") if module.name in ALWAYS_LAUNCHED else name
            if not compiled and name not in named and name.removesuffix("_triton") not in launched:
                untested.add(f"{module.name}.{node.name}")
    assert untested - UNTESTED == set()
