"""A rank of `tests.pool`: a process that answers one call after another, as long as none has changed it."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import random
import signal
import socket
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import torch
import torch.distributed as dist

from tests.pool import receive_message, send_message

_PR_SET_PDEATHSIG = 1


def main(
    rank: int,
    world: int,
    timeout: float,
    backend: str,
    listener: socket.socket,
    pipe: socket.socket,
    namespaces: list[Namespace],
) -> None:
    """Answer calls until the pipe closes or a call fails; never return. namespaces: of the process that has forked."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
        before = Surroundings(namespaces)
        store: dist.Store | None = None
        number = 0
        while True:
            request = pickle.loads(receive_message(pipe))
            stack = _redirect(Path(request["folder"]), rank)
            try:
                if store is None:
                    store = _join(rank, world, timeout, backend, listener)
                message = _call(request, dist.PrefixStore(f"call {number}", store))
            except BaseException as error:
                message = _failure(error)
            sys.stdout.flush()
            sys.stderr.flush()
            send_message(pipe, pickle.dumps(message))
            if message[0] != "result":
                break
            pipe.recv(1)  # all have answered
            gc.collect()
            send_message(pipe, pickle.dumps(before.changes()))
            stack.close()
            before.restore()
            number += 1
    except (EOFError, ConnectionError):
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def find(request: dict[str, Any]) -> Any:
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


class Surroundings:
    """What a call of a rank can see of the calls before it: the state of the process, and what modules are made of."""

    def __init__(self, namespaces: list[Namespace]) -> None:
        self.environ, self.folder = dict(os.environ), os.getcwd()
        self.random, self.numpy = random.getstate(), numpy.random.get_state()
        self.threads = torch.get_num_threads()
        self.namespaces = namespaces

    def changes(self) -> list[str]:
        """Names of functions, classes, methods and constants that have been replaced, and of settings of torch."""
        found = [f"{namespace.name}.{name}" for namespace in self.namespaces for name in namespace.changes()]
        if torch.get_default_dtype() != torch.float32 or torch.are_deterministic_algorithms_enabled():
            found.append("a default of torch")
        if not torch.is_grad_enabled():
            found.append("gradients are disabled")
        return found

    def restore(self) -> None:
        """Set back what may differ after any call."""
        os.environ.clear()
        os.environ.update(self.environ)
        os.chdir(self.folder)
        random.setstate(self.random)
        numpy.random.set_state(self.numpy)
        torch.set_num_threads(self.threads)


class Namespace:
    """A module or class, and what it contained at first. functions: compare only what can be called."""

    def __init__(self, name: str, owner: Any, functions: bool = False):
        self.name, self._functions = name, functions
        contents = vars(owner)
        self._now = contents if isinstance(contents, dict) else gc.get_referents(contents)[0]  # under a class's proxy
        self._version, self._before = _version(self._now), self._contents()

    def changes(self) -> list[str]:
        """Names that were set to another object or are new. Imported modules are no change."""
        if self._version is not None and self._version == _version(self._now):
            return []
        now = self._contents()
        try:
            if now == self._before:  # identical objects are equal, so this compares thousands in a moment
                return []
        except Exception:  # an object that compares with nothing
            pass
        found = [name for name, value in now.items() if _matters(name, value) and self._before.get(name) is not value]
        if not found:
            self._before = now
        return found

    def _contents(self) -> dict[str, Any]:
        contents = self._now
        return (
            {name: contents[name] for name in contents if callable(contents[name])}
            if self._functions
            else dict(contents)
        )


def _version(contents: dict[str, Any]) -> int | None:
    """CPython's number of the last change of a dict (PEP 509), None where it has none any more.

    To compare the contents themselves writes to the reference count of each, and so copies the memory of all that the
    helper has imported into every rank: two thirds of what a rank costs.
    """
    if sys.version_info >= (3, 13):
        return None
    return ctypes.c_uint64.from_address(id(contents) + 3 * ctypes.sizeof(ctypes.c_void_p)).value


def _matters(name: str, value: object) -> bool:
    is_special = name.startswith("__") and not callable(value)
    return not is_special and not issubclass(type(value), ModuleType)


def namespaces() -> list[Namespace]:
    """Every module and class of the program and its tests, and the parts of torch that tests replace. A module that a
    call imports later is not among them."""
    found = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("parallelrun", "tests"):
            found += _with_classes(name, module, name)
        elif name in _TORCH:  # its counters and current groups change in every call
            found += _with_classes(name, module, name, functions=True)
    return found


_TORCH = ("torch", "torch.distributed", "torch.distributed.distributed_c10d", "torch.nn.functional")


def _with_classes(name: str, owner: Any, module: str, functions: bool = False) -> list[Namespace]:
    """A module or class of `module`, and the classes that it defines."""
    found = [Namespace(name, owner, functions)]
    for key, value in list(vars(owner).items()):
        if issubclass(type(value), type) and value.__module__ == module:
            found += _with_classes(f"{name}.{key}", value, module)
    return found


def _redirect(folder: Path, rank: int) -> Any:
    """Let stdout and stderr be files of this call, and stacks be written to another; return the latter."""
    output = os.open(folder / f"output_{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 (lives as long as the rank)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    stack = open(folder / f"stack_{rank}", "w")  # noqa: SIM115
    faulthandler.enable(file=sys.stderr)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    return stack


def _join(rank: int, world: int, timeout: float, backend: str, listener: socket.socket) -> dist.Store:
    """Make the process group of this rank's life; return its store."""
    patience = timedelta(seconds=timeout + 30)
    port = listener.getsockname()[1]
    descriptor = listener.detach() if rank == 0 else None
    if rank:
        listener.close()
    store = dist.TCPStore(
        "127.0.0.1", port, world, rank == 0, patience, wait_for_workers=False, master_listen_fd=descriptor
    )
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=patience)
    return store


def _call(request: dict[str, Any], store: dist.Store) -> tuple:
    """Run the function of a request. Its groups and the keys that it stores are apart from those of earlier calls."""
    world = dist.distributed_c10d._world
    backend, _ = world.pg_map[dist.group.WORLD]
    world.pg_map[dist.group.WORLD] = (backend, store)
    sys.path[:] = request["path"]
    torch.default_generator.manual_seed(0)  # of all devices, it would note a stack for each that is not there
    return "result", pickle.dumps(find(request)(*pickle.loads(request["args"])))


def _failure(error: BaseException) -> tuple:
    try:
        exception = pickle.dumps(error)
    except Exception:
        exception = None
    return "failure", type(error).__name__, str(error), traceback.format_exc(), exception
