"""A host program with settings of its own: it opens engines of every kind and records the state of the process meanwhile.

python host.py plain|unusual      writes a report as JSON to standard output; see test_hygiene.py
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import faulthandler
import gc
import hashlib
import importlib
import importlib.util
import json
import locale
import logging
import multiprocessing
import os
import pkgutil
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

if importlib.util.find_spec("triton"):  # registers an exit handler when it is imported
    import triton  # noqa: F401

PROMPT = "def add(a, b):"
LENGTH = 6


def look() -> dict[str, Any]:
    """Describe everything that belongs to the process as a whole, or to the thread of its host."""
    root = logging.getLogger()
    return {
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "torch threads": [torch.get_num_threads(), _in_a_thread(torch.get_num_threads), torch.get_num_interop_threads()],
        "torch random state": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
        "python random state": hashlib.sha256(repr(random.getstate()).encode()).hexdigest(),
        "grad mode": [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")],
        "torch determinism": [torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()],
        "torch backends": [str(torch.backends.mkldnn.enabled), str(torch.backends.cuda.matmul.allow_tf32)],
        "cuda initialised": torch.cuda.is_initialized(),
        "process group": torch.distributed.is_available() and torch.distributed.is_initialized(),
        "environment": dict(os.environ),
        "signal handlers": {int(number): _handler(number) for number in sorted(signal.valid_signals())},
        "signal wakeup": _wakeup_fd(),
        "exit handlers": atexit._ncallbacks(),
        "log handlers": [repr(handler) for handler in root.handlers],
        "log level": [root.level, logging.root.manager.disable, repr(logging.lastResort), logging.getLoggerClass().__name__],
        "log filters": [repr(log_filter) for log_filter in root.filters],
        "own loggers": [
            [name, logger.level, repr(logger.handlers), logger.propagate]
            for name, logger in sorted(root.manager.loggerDict.items())
            if name.startswith("dsv4lite") and isinstance(logger, logging.Logger) and (logger.level or logger.handlers)
        ],
        "warning filters": [repr(warning_filter) for warning_filter in warnings.filters],
        "warning hook": repr(warnings.showwarning),
        "exception hooks": [repr(hook) for hook in (sys.excepthook, threading.excepthook, sys.unraisablehook)],
        "trace hooks": [repr(sys.gettrace()), repr(sys.getprofile()), repr(threading.gettrace()), repr(threading.getprofile())],
        "loop policy": repr(asyncio.events._event_loop_policy),
        "import path": list(sys.path),
        "import hooks": [repr(finder) for finder in (*sys.meta_path, *sys.path_hooks)],
        "working directory": os.getcwd(),
        "file mode mask": _umask(),
        "interpreter": [sys.getswitchinterval(), sys.getrecursionlimit(), sys.flags.dev_mode, faulthandler.is_enabled()],
        "garbage collector": [gc.isenabled(), gc.get_threshold(), gc.get_debug()],
        "locale": locale.setlocale(locale.LC_ALL),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "standard streams": [repr(stream) for stream in (sys.stdin, sys.stdout, sys.stderr)],
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "children": _children(),
        "files": _files(),
        "mapped files": _mapped(),
    }


def _in_a_thread(function: Callable[[], int]) -> int:
    """Some settings are copied by each new thread: another thread's change of them does not show in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def _handler(number: int) -> str:
    handler = signal.getsignal(number)
    return "asyncio's" if isinstance(handler, partial) else repr(handler)  # whose own repr changes as its task runs


def _wakeup_fd() -> int:
    number = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(number)
    return number


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _children() -> list[str]:
    children = []
    for task in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended since it was listed
            children += task.read_text().split()
    return children


def _files() -> list[str]:
    """What is open, without the folder that is being read for this."""
    found = []
    for entry in Path("/proc/self/fd").glob("*"):
        try:
            found.append(os.readlink(entry))
        except FileNotFoundError:
            continue
    return sorted(target for target in found if not target.endswith("/fd"))


def _mapped() -> list[str]:
    """Files of a checkpoint that are mapped into memory."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    return sorted({line.split()[-1] for line in lines if line.endswith((".safetensors", ".json"))})


def be_unusual() -> None:
    """Change what a host may change."""
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(20)
    random.seed(21)
    signal.signal(signal.SIGINT, lambda number, frame: None)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.DEBUG, stream=open(os.devnull, "w"))  # noqa: SIM115
    sys.excepthook = lambda *error: traceback.print_exception(*error)
    threading.excepthook = lambda arguments: None
    sys.setswitchinterval(0.004)
    gc.set_threshold(5000, 11, 9)
    os.umask(0o077)
    os.chdir("/")
    if sys.version_info < (3, 14):
        asyncio.set_event_loop_policy(type("HostsPolicy", (asyncio.DefaultEventLoopPolicy,), {})())


def main(mode: str) -> dict[str, Any]:
    """Run an engine, two engines, and an engine in an event loop."""
    stages: dict[str, Any] = {}
    results: dict[str, Any] = {}
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    if mode == "unusual":
        be_unusual()
    asyncio.run(asyncio.sleep(0))  # the first loop of a process sets the policy
    stages["before import"] = look()

    import dsv4lite

    for module in pkgutil.walk_packages(dsv4lite.__path__, "dsv4lite."):
        if not module.name.startswith(("dsv4lite.integrations.", "dsv4lite.__main__")):
            importlib.import_module(module.name)
    stages["after import"] = look()

    from dsv4lite.config import EngineConfig
    from dsv4lite.engine.engine import Engine
    from dsv4lite.request import Request, SequenceUpdate

    params = dsv4lite.SamplingParams(max_tokens=LENGTH, ignore_eos=True, temperature=1.0, seed=5, logprobs=1)
    config = EngineConfig(
        model=dsv4lite.tiny_model(), device="cpu", max_model_len=2048, max_num_seqs=4, kv_cache_memory_bytes=64 << 20
    )

    results["plan"] = repr(dsv4lite.plan_memory(config, memory_bytes=8 << 30))
    received: list[SequenceUpdate] = []
    begun, ended = threading.Event(), threading.Event()

    def deliver(updates: list[SequenceUpdate]) -> None:
        received.extend(updates)
        begun.set()
        if any(update.finish_reason == "abort" for update in updates):
            ended.set()

    engine = Engine(config)
    engine.start(deliver, lambda error: ended.set())
    stages["an engine"] = look()
    long = dsv4lite.SamplingParams(max_tokens=2000, ignore_eos=True, temperature=0.0)
    ids = tuple(engine.info.tokenizer.encode(PROMPT))
    # 1,024 completions of 2,000 tokens, four at a time: half a million steps, so that the first engine still computes when the
    # second one has started and answered, however slow its start is.
    endless = long.replace(n=config.max_completions)
    engine.submit(Request(request_id="endless", prompt_token_ids=ids, params=endless))
    begun.wait()
    stages["an engine at work"] = look()

    with dsv4lite.LLM(config) as llm:
        stages["two engines at work"] = look()
        output = llm.generate(PROMPT, params)
        results["LLM"] = describe(output)
    engine.close()
    ended.wait()
    assert received[-1].finish_reason == "abort"
    engine.close()
    stages["both closed"] = look()

    async def serve() -> None:
        stages["in an event loop, before"] = look()
        async with dsv4lite.AsyncLLM(config) as llm:
            results["AsyncLLM"] = describe(await llm.generate(PROMPT, params))
            async with llm.stream(PROMPT, long) as stream:
                await anext(aiter(stream))
                stages["in an event loop"] = look()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        results["tasks left"] = [repr(task) for task in left]

    asyncio.run(serve())
    del engine, llm
    gc.collect()
    deadline = time.monotonic() + 10
    while threading.active_count() > 1 and time.monotonic() < deadline:
        time.sleep(0.05)  # worker threads of the event loop's library end by themselves
    stages["at the end"] = look()
    return {"stages": stages, "results": results}


def describe(output: Any) -> dict[str, Any]:
    """Return a completion's tokens, text and log-probabilities, and where its tensors are."""
    logprobs = output.outputs[0].logprobs
    return {
        "token_ids": list(output.outputs[0].token_ids),
        "text": output.text,
        "logprobs": [float(value) for value in logprobs.sampled],
        "tensors": [f"{value.device} {value.dtype}" for value in (logprobs.sampled, logprobs.values, logprobs.token_ids)],
    }


if __name__ == "__main__":
    json.dump(main(sys.argv[1]), sys.stdout)
