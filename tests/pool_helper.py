"""The process behind `tests.pool`: imports torch once, forks ranks, hands calls to them and watches them."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import pkgutil
import selectors
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from parallelrun.distributed import shared_memory
from tests import pool_rank
from tests.plans import tiny_plan
from tests.pool import receive_message, send_message
from tests.servants import use_large_pages

_GRACE_S = 1.0  # how long the others may go on after the first failure
_MAX_CALLS = 16  # of the same ranks: the process groups of each call stay, with their threads and connections


def main(connection: socket.socket) -> None:
    """Answer the requests of `tests.pool` until the connection is closed."""
    torch.set_num_threads(1)
    gc.disable()
    _preload()
    gc.enable()
    namespaces = _snapshot()
    waiting: dict[tuple[int, float, str], _Ranks] = {}
    while True:
        try:
            request = pickle.loads(receive_message(connection))
        except (EOFError, ConnectionError):
            return
        send_message(connection, pickle.dumps(_answer(request, waiting, namespaces, connection)))


def _snapshot() -> list[pool_rank.Namespace]:
    """What all modules contain: ranks inherit it, since to read it themselves would copy the memory of all of them."""
    namespaces = pool_rank.namespaces()
    gc.collect()
    gc.freeze()  # else every rank's garbage collector visits, and so copies, all that was imported
    use_large_pages()
    return namespaces


def _preload() -> None:
    """Import what ranks will need, so that a fork has it. What does not import now fails in the test that needs it."""
    names = ["torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.pipelining"]
    names += ["torch.distributed.checkpoint"]
    for package in ("parallelrun", "parallelrun.strategies"):
        module = importlib.import_module(package)
        names += [m.name for m in pkgutil.walk_packages(module.__path__, package + ".", onerror=lambda _: None)]
    for name in names:
        if name.rpartition(".")[2] != "__main__":
            try:
                importlib.import_module(name)
            except Exception:
                continue
    shared_memory.register()
    shared_memory.keep_out_of_graphs()  # a rank that did so itself would be changed by its call
    tiny_plan({"dp": 2, "tp": 2, "pp": 2})  # what every plan reads of the schema is computed once


def _answer(
    request: dict[str, Any],
    waiting: dict[tuple[str, int, float, str], _Ranks],
    namespaces: list[pool_rank.Namespace],
    connection: socket.socket,
) -> dict[str, Any]:
    """Let ranks answer one `run_ranks` call: those that wait after an earlier call, or else new ones."""
    sys.path[:] = request["path"]
    known, settings = len(sys.modules), (request["world"], request["timeout"], request["backend"])
    key = (request["test file"], *settings)
    try:
        for name in request["imports"]:
            importlib.import_module(name)
        pool_rank.find(request)
    except Exception as error:
        failure = (0, type(error).__name__, str(error), traceback.format_exc(), None)
        return {"results": [], "failures": [failure], "output": [""]}
    lack_module = len(sys.modules) > known
    for other in [one for one in waiting if lack_module or one[0] != request["test file"]]:
        waiting.pop(other).end()
    if lack_module:
        namespaces[:] = _snapshot()
    ranks = None if request["fresh"] else waiting.pop(key, None)
    if ranks and not ranks.are_unchanged():
        ranks.end()
        ranks = None
    ranks = ranks or _Ranks(*settings, connection, namespaces)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        call = _Call(ranks, connection, Path(folder), request["timeout"])
        try:
            call.run({**request, "folder": folder})
        finally:
            if call.failures or call.open or request["fresh"] or ranks.calls >= _MAX_CALLS:
                ranks.end()
            else:
                ranks.release()
                waiting[key] = ranks
        texts = [(Path(folder) / f"output_{rank}").read_text(errors="replace") for rank in range(ranks.world)]
    return {"results": call.results, "failures": call.failures, "output": texts}


class _Ranks:
    """`world` forked processes with a process group, which answer one call after another."""

    def __init__(
        self,
        world: int,
        timeout: float,
        backend: str,
        connection: socket.socket,
        namespaces: list[pool_rank.Namespace],
    ):
        self.world = world
        self.calls = 0
        self.pids: list[int] = []
        self.pipes: list[socket.socket] = []
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        for rank in range(world):
            ours, theirs = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                ours.close()
                for pipe in self.pipes:
                    pipe.close()
                connection.close()
                pool_rank.main(rank, world, timeout, backend, listener, theirs, namespaces)
            theirs.close()
            self.pids.append(pid)
            self.pipes.append(ours)
        listener.close()

    def release(self) -> None:
        """Tell the ranks that all have answered: only now may one of them let go of what the others need."""
        for pipe in self.pipes:
            pipe.sendall(b".")

    def are_unchanged(self) -> bool:
        """Whether the last call has left every process as it was."""
        try:
            return not any([pickle.loads(receive_message(pipe)) for pipe in self.pipes])
        except (EOFError, ConnectionError):
            return False

    def end(self) -> None:
        """Kill the ranks that are left and reap them."""
        for pid in filter(None, self.pids):
            os.kill(pid, signal.SIGKILL)
        for pipe in self.pipes:
            pipe.close()
        for pid in filter(None, self.pids):
            os.waitpid(pid, 0)

    def reap(self, rank: int) -> int:
        """Return the exit code of a rank whose pipe has closed; minus the signal's number if one ended it."""
        _, status = os.waitpid(self.pids[rank], 0)
        self.pids[rank] = 0
        return os.waitstatus_to_exitcode(status)


class _Call:
    """One `run_ranks` call: asks, collects, watches."""

    def __init__(self, ranks: _Ranks, connection: socket.socket, folder: Path, timeout: float):
        self.ranks = ranks
        self.connection = connection
        self.folder = folder
        self.timeout = timeout
        self.results: list[bytes | None] = [None] * ranks.world
        self.failures: list[tuple] = []
        self.open = set(range(ranks.world))

    def run(self, request: dict[str, Any]) -> None:
        """Read until every rank has answered or died; after a failure or the timeout the rest is cut short."""
        for rank in range(self.ranks.world):
            (self.folder / f"output_{rank}").touch()
        self.ranks.calls += 1
        text = pickle.dumps(request)
        for pipe in self.ranks.pipes:
            with contextlib.suppress(OSError):  # a rank that has died is found below
                send_message(pipe, text)
        deadline = time.monotonic() + self.timeout
        with selectors.DefaultSelector() as selector:
            for rank, pipe in enumerate(self.ranks.pipes):
                selector.register(pipe, selectors.EVENT_READ, rank)
            selector.register(self.connection, selectors.EVENT_READ, "client")
            while self.open:
                for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                    if key.data == "client":
                        raise SystemExit(0)  # the test session is gone
                    if self._hear(key.data) and len(self.failures) == 1:
                        deadline = min(deadline, time.monotonic() + _GRACE_S)
                    if key.data not in self.open:
                        selector.unregister(key.fileobj)
                if time.monotonic() >= deadline and self.open:
                    self._cut_short()
                    return

    def _hear(self, rank: int) -> bool:
        """Take one message of a rank, or its death; True when that was a failure."""
        self.open.discard(rank)
        try:
            kind, *rest = pickle.loads(receive_message(self.ranks.pipes[rank]))
        except (EOFError, ConnectionError):
            code = self.ranks.reap(rank)
            name = signal.Signals(-code).name if code < 0 else f"exit {code}"
            self.failures.append((rank, name, "the rank ended without a result", "", None))
            return True
        if kind == "result":
            self.results[rank] = rest[0]
            return False
        self.failures.append((rank, *rest))
        return True

    def _cut_short(self) -> None:
        if self.failures:
            return  # the others were only waiting for the rank that failed
        waiting = sorted(self.open)
        for rank in waiting:
            os.kill(self.ranks.pids[rank], signal.SIGUSR1)
        time.sleep(0.3)
        message = f"no result within {self.timeout} s; ranks without one: {waiting}"
        for rank in waiting:
            stack = (self.folder / f"stack_{rank}").read_text(errors="replace")
            self.failures.append((rank, "timeout", message, stack, None))
