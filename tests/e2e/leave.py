"""A host program that does not close its engines while they generate; see test_leaving.py.

python leave.py FOLDER end|exit|raise|interrupt ENGINE...   ends this way, with engines of the kinds llm, async, process
python leave.py FOLDER rank RANK PORT                       two external ranks share an engine; rank 1 ends while rank 0 generates
python leave.py FOLDER drop ENGINE...                       drops engines and streams, and ends after their threads
python leave.py FOLDER grammar                              closes an engine, and ends, while a grammar is compiled
python leave.py FOLDER late thread|handler                  asks for a grammar after the main thread's end
python leave.py FOLDER fork ENGINE...                       uses and drops the engine in a fork, and then in this process
"""

from __future__ import annotations

import asyncio
import atexit
import dataclasses
import gc
import os
import signal
import sys
import threading
import time
import warnings
from typing import Any

import dsv4lite

PROMPT = "def add(a, b):"
LONG = dsv4lite.SamplingParams(max_tokens=4000, ignore_eos=True, temperature=0.0)
kept: list[Any] = []


def config(kind: str) -> dsv4lite.EngineConfig:
    return dsv4lite.EngineConfig(
        model=sys.argv[1],
        device="cpu",
        max_model_len=4096,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 << 20,
        executor="process" if kind == "process" else "thread",
    )


async def enter() -> None:
    """Let an event loop end with an open engine and an open stream."""
    llm = await dsv4lite.AsyncLLM.create(config("async"))
    stream = await llm.stream(PROMPT, LONG).__aenter__()
    await anext(stream)
    kept.extend((llm, stream))


def leave_behind(kind: str, thread: bool = True) -> None:
    """Start an engine with a stream, and a thread, that read from it."""
    if kind == "async":
        return asyncio.run(enter())
    llm = dsv4lite.LLM.create(config(kind))
    stream = llm.stream(PROMPT, LONG).__enter__()
    next(stream)
    if thread:
        threading.Thread(target=llm.generate, args=(PROMPT, LONG), daemon=True).start()
    return kept.extend((llm, stream))


def drop(*kinds: str) -> None:
    warnings.simplefilter("always", ResourceWarning)
    for kind in kinds:
        leave_behind(kind, thread=False)
    kept.clear()
    gc.collect()
    while [thread for thread in threading.enumerate() if thread.name.startswith("dsv4lite-")]:
        time.sleep(0.01)


def be_rank(rank: str, port: str) -> None:
    from torch import distributed

    store = distributed.TCPStore("127.0.0.1", int(port), 2, is_master=rank == "0")
    distributed.init_process_group("gloo", store=store, rank=int(rank), world_size=2)
    settings = dataclasses.replace(config("async"), executor="external", tensor_parallel_size=2)
    llm = dsv4lite.LLM.create(settings)
    if rank == "1":
        kept.append(llm)
        store.get("generating")
        sys.exit(3)
    try:
        with llm.stream(PROMPT, LONG) as stream:
            next(stream)
            store.set("generating", "yes")
            stream.final()
    except dsv4lite.EngineDeadError as error:
        assert error.rank == 1, error
        llm.close()
        os._exit(4)  # without the host's own groups, which lack a rank


def grammar() -> None:
    pattern = {f"p{k}": {"type": "string", "pattern": f"^(a|b|c|d){{1,{200 + k}}}$"} for k in range(1500)}
    schema = {"json": {"type": "object", "additionalProperties": False, "properties": pattern}}  # takes a second or more
    with dsv4lite.LLM(config("llm")) as llm:
        output = llm.generate(PROMPT, dsv4lite.SamplingParams(max_tokens=4, structured_outputs=schema), deadline=0.05)
    assert output.outputs[0].finish_reason == "deadline"


def late(ending: str) -> None:
    """Ask for a grammar in a thread that outlives the main one, or in an exit handler."""
    llm = dsv4lite.LLM.create(config("llm"))

    def ask() -> None:
        if ending == "thread":
            threading.main_thread().join()
        try:
            print(llm.generate(PROMPT, dsv4lite.SamplingParams(max_tokens=4, structured_outputs={"regex": "b{9}"})).text)
        except dsv4lite.EngineStateError as error:
            print(error)
        sys.stdout.flush()

    if ending == "thread":
        threading.Thread(target=ask).start()
    else:
        atexit.register(ask)


def refused(call: Any) -> None:
    try:
        call()
    except dsv4lite.EngineStateError as error:
        assert "fork" in str(error)
    else:
        raise AssertionError("a fork has no engine")


def fork(*kinds: str) -> None:
    for kind in kinds:
        use_in_a_fork(kind)


def use_in_a_fork(kind: str) -> None:
    llm = dsv4lite.LLM.create(config(kind))
    short = dsv4lite.SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0)
    expected = llm.generate(PROMPT, short).token_ids
    stream = llm.stream(PROMPT, LONG).__enter__()
    next(stream)
    with warnings.catch_warnings():  # Python 3.12 warns of threads, and they are what is tested
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        signal.alarm(60)  # a call that hangs ends the child with a status of its own
        rows = llm.as_completed
        for call in (
            lambda: llm.generate(PROMPT, short), lambda: list(stream), stream.final, llm.pause, llm.resume, llm.stats,
            lambda: rows([PROMPT]), lambda: llm.score("a", "b"), lambda: llm.paused().__enter__(),
        ):  # fmt: skip
            refused(call)
        assert llm.state == "closed"
        llm.abort()
        stream.abort()
        del stream, call, rows
        llm.close()
        del llm
        gc.collect()
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    stream.__exit__(None, None, None)
    assert llm.generate(PROMPT, short).token_ids == expected
    llm.close()


def main(ending: str, *kinds: str) -> None:
    if ending in ("drop", "fork", "grammar", "late", "rank"):
        return {"drop": drop, "fork": fork, "grammar": grammar, "late": late, "rank": be_rank}[ending](*kinds)
    for kind in kinds:
        leave_behind(kind)
    if ending == "exit":
        sys.exit(3)
    if ending == "raise":
        raise ZeroDivisionError
    if ending == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    return None


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a program that is started in the background ignores it
    main(*sys.argv[2:])
