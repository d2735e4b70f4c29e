"""Workers of pytest-xdist that are copies of one process, which has imported all test modules: `start(root, specs)`.

Each worker would else spend eight seconds on importing torch, the program and the tests. xdist starts a worker by the
Python that its `spec` names. Here that is this file as a script, which hands its streams to the process that has
imported everything, and waits until the copy that it makes of itself has ended.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the worker's to handle
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(f"\0{sys.argv[1]}")
        socket.send_fds(connection, [b"."], [0, 1, 2])
        with contextlib.suppress(ConnectionError):  # reset, if the process ends while it still imports
            connection.recv(1)  # nothing comes: it is closed when the worker has ended
        sys.exit()

import gc
import importlib
import os
import shlex
import types
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis.internal.conjecture import providers

from tests import compositions, scratch
from tests.servants import forget_pytest, leave_with, use_large_pages


def start(root: Path, specs: list[Any]) -> None:
    """Let the workers of `specs` (execnet's XSpec) be copies of a copy of this process, which imports all tests now."""
    name = f"parallelrun-tests-{os.getpid()}"  # in Linux's abstract namespace: no file is left
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0{name}")
    listener.listen()
    for spec in specs:
        spec.python = shlex.join([sys.executable, "-I", "-S", __file__, name])
    parent = os.getpid()
    if os.fork() == 0:
        try:
            leave_with(parent)
            forget_pytest(listener)
            _import_all(root)
            _serve(listener)
        finally:
            os._exit(1)
    listener.close()


def _import_all(root: Path) -> None:
    """In a new clone, where nothing is compiled yet, a second process compiles the last files meanwhile."""
    files = sorted(root.glob("tests/**/test_*.py"))
    modules = [".".join(file.relative_to(root).with_suffix("").parts) for file in files]
    gc.disable()
    importlib.import_module("tests.pool_helper")
    compiles = not (root / "tests" / "unit" / "__pycache__").exists() and os.fork() == 0
    if not compiles:
        compositions.keep_merged()
        compositions.read_all()
    for module in reversed(modules) if compiles else modules:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # which collection meets again, and reports
            importlib.import_module(module)
    if compiles:
        os._exit(0)
    providers._get_local_constants()  # Hypothesis reads all modules of the project
    gc.enable()
    gc.freeze()
    use_large_pages()


def _serve(listener: socket.socket) -> NoReturn:
    """Fork a worker for each script that connects. It ends with the process that has started this one."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # after Ctrl-C, workers clean up
    parent = os.getpid()
    while True:
        connection, _ = listener.accept()
        streams = socket.recv_fds(connection, 1, 3)[1]
        if os.fork() == 0:
            try:
                leave_with(parent)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                listener.close()
                for place, descriptor in enumerate(streams):
                    os.dup2(descriptor, place)
                    os.close(descriptor)
                exec(eval(sys.stdin.readline()), vars(_main()))  # execnet's own first line
            finally:
                scratch.remove()
                os._exit(0)
        connection.close()
        for descriptor in streams:
            os.close(descriptor)


def _main() -> types.ModuleType:
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    return module
