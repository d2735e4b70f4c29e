"""The process behind `tests.pool`: imports torch once, forks the ranks of every call, watches them."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import importlib.util
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
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from tests.plans import tiny_plan
from tests.pool import receive_message, send_message

_GRACE_S = 1.0  # how long the others may go on after the first failure
_PR_SET_PDEATHSIG = 1


def main(descriptor: int) -> None:
    connection = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is pytest's to handle; it closes our socket
    torch.set_num_threads(1)
    gc.disable()
    _preload()
    gc.enable()
    gc.collect()
    gc.freeze()  # else every rank's garbage collector visits, and so copies, all that was imported
    while True:
        try:
            request = pickle.loads(receive_message(connection))
        except (EOFError, ConnectionError):
            return
        send_message(connection, pickle.dumps(_Call(request, connection).run()))


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
    tiny_plan({"dp": 2, "tp": 2, "pp": 2})  # what every plan reads of the schema is computed once


class _Call:
    """One `run_ranks` call: forks, collects, watches."""

    def __init__(self, request: dict[str, Any], connection: socket.socket):
        self.request = request
        self.connection = connection
        self.world: int = request["world"]
        self.pids: list[int] = []
        self.pipes: list[socket.socket] = []
        self.results: list[bytes | None] = [None] * self.world
        self.failures: list[tuple] = []
        self.open: set[int] = set()

    def run(self) -> dict[str, Any]:
        sys.path[:] = self.request["path"]
        try:
            function = _find(self.request)
        except Exception as error:
            return self._reply([""], [(0, type(error).__name__, str(error), traceback.format_exc(), None)])
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            try:
                self._fork(function, Path(folder))
                self._collect(Path(folder))
            finally:
                self._end()
            texts = [(Path(folder) / f"output_{rank}").read_text(errors="replace") for rank in range(self.world)]
        return self._reply(texts, self.failures)

    def _reply(self, output: list[str], failures: list[tuple]) -> dict[str, Any]:
        return {"results": self.results, "failures": failures, "output": output}

    def _fork(self, function: Any, folder: Path) -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        for rank in range(self.world):
            ours, theirs = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                ours.close()
                for pipe in self.pipes:
                    pipe.close()
                self.connection.close()
                _rank(rank, self.request, function, listener, theirs, folder)
            theirs.close()
            self.pids.append(pid)
            self.pipes.append(ours)
            self.open.add(rank)
        listener.close()

    def _collect(self, folder: Path) -> None:
        """Read until every rank has answered or died; after a failure or the timeout the rest is cut short."""
        deadline = time.monotonic() + self.request["timeout"]
        with selectors.DefaultSelector() as selector:
            for rank, pipe in enumerate(self.pipes):
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
                    self._cut_short(folder)
                    return

    def _hear(self, rank: int) -> bool:
        """Take one message of a rank, or its death; True when that was a failure."""
        self.open.discard(rank)
        try:
            kind, *rest = pickle.loads(receive_message(self.pipes[rank]))
        except (EOFError, ConnectionError):
            _, status = os.waitpid(self.pids[rank], 0)
            self.pids[rank] = 0
            code = os.waitstatus_to_exitcode(status)
            name = signal.Signals(-code).name if code < 0 else f"exit {code}"
            self.failures.append((rank, name, "the rank ended without a result", "", None))
            return True
        if kind == "result":
            self.results[rank] = rest[0]
            return False
        self.failures.append((rank, *rest))
        return True

    def _cut_short(self, folder: Path) -> None:
        if self.failures:
            return  # the others were only waiting for the rank that failed
        waiting = sorted(self.open)
        for rank in waiting:
            os.kill(self.pids[rank], signal.SIGUSR1)
        time.sleep(0.3)
        message = f"no result within {self.request['timeout']} s; ranks without one: {waiting}"
        for rank in waiting:
            stack = (folder / f"stack_{rank}").read_text(errors="replace")
            self.failures.append((rank, "timeout", message, stack, None))

    def _end(self) -> None:
        for rank, pid in enumerate(self.pids):
            if pid and (self.failures or rank in self.open):
                os.kill(pid, signal.SIGKILL)
        for pipe in self.pipes:
            pipe.close()  # what ranks that are done wait for: the store must outlive the slowest of them
        for pid in self.pids:
            if pid:
                os.waitpid(pid, 0)


def _find(request: dict[str, Any]) -> Any:
    """The function of a request, its module imported here once (a script's `__main__` by its file)."""
    name, file = request["module"], request["file"]
    if name == "__main__":
        name = f"__pool_main__{abs(hash(file))}"
    if name not in sys.modules:
        if request["module"] == "__main__" or importlib.util.find_spec(name) is None:
            _load_file(name, file)
        else:
            importlib.import_module(name)
    found: Any = sys.modules[name]
    for part in request["name"].split("."):
        found = getattr(found, part)
    return found


def _load_file(name: str, file: str | None) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file) if file else None
    if spec is None or spec.loader is None:
        raise ImportError(f"the function's module {name!r} has no file: put it in a test module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _rank(rank: int, request: dict, function: Any, listener: socket.socket, pipe: socket.socket, folder: Path) -> None:
    """The life of one rank; never returns."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        output = os.open(folder / f"output_{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 (lives as long as the rank)
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        stack = open(folder / f"stack_{rank}", "w")  # noqa: SIM115
        faulthandler.enable(file=sys.stderr)
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        message = _call(rank, request, function, listener)
        sys.stdout.flush()
        send_message(pipe, pickle.dumps(message))
        if message[0] == "result":
            pipe.recv(1)
            code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _call(rank: int, request: dict[str, Any], function: Any, listener: socket.socket) -> tuple:
    try:
        world, timeout = request["world"], timedelta(seconds=request["timeout"] + 30)
        port = listener.getsockname()[1]
        descriptor = listener.detach() if rank == 0 else None
        if rank:
            listener.close()
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
        store = dist.TCPStore(
            "127.0.0.1", port, world, rank == 0, timeout, wait_for_workers=False, master_listen_fd=descriptor
        )
        torch.manual_seed(0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
        return "result", pickle.dumps(function(*pickle.loads(request["args"])))
    except BaseException as error:
        try:
            exception = pickle.dumps(error)
        except Exception:
            exception = None
        return "failure", type(error).__name__, str(error), traceback.format_exc(), exception


if __name__ == "__main__":
    main(int(sys.argv[1]))
