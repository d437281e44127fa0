"""Ranks to test with: a few processes that stay, and run functions of test modules on meshes of gloo groups.

    def gathered(mesh: Mesh, width: int) -> Tensor:
        return mesh.tp.all_gather(torch.full((width,), float(mesh.rank)))

    def test_x(ranks: Ranks) -> None:
        assert ranks.run(gathered, 3, layout=Layout(tp=2))[0].tolist() == [0, 0, 0, 1, 1, 1]

Processes come from a fork server that has torch loaded, so that one costs milliseconds and not seconds.
"""

from __future__ import annotations

import io
import multiprocessing
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any

import torch
import torch.distributed as dist

from dsv4lite.layout import Layout
from dsv4lite.parallel.mesh import Mesh

TIMEOUT_S = 180.0  # of a run that hangs; a busy machine takes tens of seconds for some
_LOADED = ("dsv4lite.engine.engine", "tests.e2e.engines", "torch.distributed.device_mesh")  # what most functions need


class RankError(AssertionError):
    """A function raised on a rank."""


def fork_server() -> ForkServerContext:
    """Return what starts processes that have torch loaded, and not Triton."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *_LOADED])
    return context


class Ranks:
    """Up to ``size`` processes; ``run`` starts those that it needs. Get it from the fixture ``ranks``."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._context = fork_server()
        self._store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._generation = 0

    def run(self, function: Callable[..., Any], *args: Any, layout: Layout) -> list[Any]:
        """Call ``function(mesh, *args)`` on every rank of a layout; return the results in order of ranks.

        Args:
            function: Of a module, so that ranks can import it.
            args: Anything that can be pickled.
            layout: Its mesh is made once and stays.

        Raises:
            RankError: The function raised somewhere; all tracebacks are in it. The ranks are given up, others start next time.
        """
        assert layout.world <= self.size
        while len(self._pipes) < layout.world:
            self._start(len(self._pipes))
        pipes = self._pipes[: layout.world]
        for pipe in pipes:
            pipe.send((layout, function, args))
        answers = []
        for rank, pipe in enumerate(pipes):
            try:
                answers.append(pipe.recv() if pipe.poll(TIMEOUT_S) else (False, f"rank {rank} did not answer in {TIMEOUT_S} s"))
            except EOFError:
                answers.append((False, f"rank {rank} died"))
        if not all(fine for fine, _ in answers):
            self.close()
            raise RankError("\n".join(f"--- rank {r}: {what}" for r, (fine, what) in enumerate(answers) if not fine))
        return [torch.load(io.BytesIO(result), weights_only=False) for _, result in answers]

    @property
    def port(self) -> int:
        """Of a store that all ranks can use."""
        port: int = self._store.port
        return port

    def _start(self, rank: int) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, rank, self._store.port, self._generation), daemon=True)
        process.start()
        theirs.close()
        self._pipes.append(ours)
        self._processes.append(process)

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._pipes, self._processes = [], []
        self._generation += 1


def _serve(pipe: Connection, rank: int, port: int, generation: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False)
    meshes: dict[Layout, Mesh] = {}
    while True:
        try:
            layout, function, args = pipe.recv()
        except EOFError:
            return
        answer: tuple[bool, Any]
        try:
            if layout not in meshes:
                place = dist.PrefixStore(f"{generation}/{layout}", store)
                meshes[layout] = Mesh.from_store(place, layout, rank, torch.device("cpu"), timeout_s=TIMEOUT_S)
            # Saved here: tensors would otherwise travel as handles of shared memory that this process has to keep.
            torch.save(function(meshes[layout], *args), result := io.BytesIO())
            answer = (True, result.getvalue())
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)


@contextmanager
def started(size: int) -> Iterator[Ranks]:
    """Ranks that end with the block."""
    ranks = Ranks(size)
    try:
        yield ranks
    finally:
        ranks.close()
