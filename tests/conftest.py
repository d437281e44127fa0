"""Settings for the whole test suite."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Generator, Iterator, Sequence

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.processes import Zygote, forked

# No test may depend on how fast, or how busy, the machine is.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

# Tests work on small tensors: a second thread only makes them slower, and far slower where cores are shared.
torch.set_num_threads(1)


@pytest.hookimpl(trylast=True)  # after what -m and -k leave out
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    gpu = sum(item.get_closest_marker("gpu") is not None for item in items)
    if gpu and not torch.cuda.is_available():
        raise pytest.UsageError(f"{gpu} of the chosen tests are marked gpu and need a CUDA device, but torch sees none")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let no garbage collection look at what stays anyway: a million objects of modules and of collected tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        atexit.register(gc.unfreeze)  # what is left is freed as ever when the interpreter ends, not before, when pytest collects


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    left_out = sum(item.get_closest_marker("gpu") is not None for item in terminalreporter.stats.get("deselected", ()))
    if left_out and config.option.markexpr == "not gpu and not kernel":
        terminalreporter.write_line(f"{left_out} tests that need a CUDA device were not run; run them there with: pytest -m gpu")


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """A process that forks ranks; see ``tests.processes``."""
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture(scope="module")
def forked_ranks(zygote: Zygote) -> Iterator[None]:
    """Let ranks of this module's engines be forked: for tests of what ranks do, not of how they start."""
    with forked(zygote):
        yield
