"""Helper processes of tests, which have imported what pytest has imported: `servant("tests.pool_helper")` is a socket.

Each of the workers of a run needs two of them, one that forks ranks (`tests.pool`) and one that forks launchers
(`tests.cli.launcher`), and each would spend three seconds on importing torch and the program. So the worker is forked
once, after it has collected its tests and before it runs the first, when it has one thread and has computed nothing
with torch. The copy forks the helpers when they are asked for. A script, which collects nothing, starts the copy as a
new process instead.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
_PR_SET_PDEATHSIG = 1
_MADV_COLLAPSE, _LARGE_PAGE = 25, 2 << 20
_NOT_INHERITED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SETTINGS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

_COLLECTOR = gc.get_threshold()  # Python's own thresholds, before `tests/conftest.py` raises them

_forks: socket.socket | None = None  # one per session: this is what makes it cheap


def servant(module: str) -> socket.socket:
    """Start a process that calls `main(connection)` of `module`; return the other end. It ends when that is closed."""
    if _forks is None:
        _start()
    assert _forks is not None
    ours, theirs = socket.socketpair()
    socket.send_fds(_forks, [module.encode()], [theirs.fileno()])
    theirs.close()
    return ours


def fork_now() -> None:
    """Let servants be copies of this process as it is now."""
    ours = _connect()
    parent = os.getpid()
    if os.fork() == 0:
        try:
            leave_with(parent)
            forget_pytest(ours[1])
            _serve(ours[1])
        finally:
            os._exit(1)
    ours[1].close()


def _start() -> None:
    """Let servants be copies of a process that has imported nothing yet."""
    theirs = _connect()[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *_python_path()])}
    code = f"import tests.servants as s, socket; s._serve(socket.socket(fileno={theirs.fileno()}))"
    subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()], cwd=ROOT, env=environment)
    theirs.close()


def _connect() -> tuple[socket.socket, socket.socket]:
    global _forks
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _forks = ours
    atexit.register(ours.close)
    return ours, theirs


def _python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def _serve(connection: socket.socket) -> NoReturn:
    """Fork a servant per message, until the session is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is pytest's to handle; it closes our socket
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.chdir(ROOT)
    for name in _NOT_INHERITED:
        os.environ.pop(name, None)
    os.environ.update(_SETTINGS, PYTHONPATH=os.pathsep.join([str(ROOT), *_python_path()]))
    use_large_pages()
    parent = os.getpid()
    while True:
        name, descriptors, _, _ = socket.recv_fds(connection, 1024, 1)
        if not name:
            os._exit(0)
        if os.fork() == 0:
            try:
                leave_with(parent)
                connection.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                module = sys.modules["__main__"] = importlib.import_module(name.decode())
                module.main(socket.socket(fileno=descriptors[0]))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.close(descriptors[0])


def use_large_pages() -> None:
    """Let the memory of this process lie in pages of 2 MiB where the kernel can: a fork, which copies the table of
    pages, then takes a fifth of the time. A copy that writes there still copies only 4 KiB."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, inode, *name = line.split(maxsplit=5)
        if access == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            start, stop = (int(address, 16) for address in addresses.split("-"))
            for page in range(-(-start // _LARGE_PAGE), stop // _LARGE_PAGE):
                madvise(page * _LARGE_PAGE, _LARGE_PAGE, _MADV_COLLAPSE)  # where it is refused, all stays as it was


def leave_with(parent: int) -> None:
    """End when `parent` ends, which has forked this process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def forget_pytest(connection: socket.socket) -> None:
    """Be as a process that pytest has not started: without its files, with Python's own streams and hooks."""
    faulthandler.disable()
    gc.set_threshold(*_COLLECTOR)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 (lives as long as the process)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    with open(os.devnull) as nothing:  # a closed number would be given again, and closed by what had it before
        for descriptor in [int(name) for name in os.listdir("/proc/self/fd")]:
            if descriptor > 2 and descriptor not in (connection.fileno(), nothing.fileno()):
                with contextlib.suppress(OSError):  # of the listing itself
                    os.dup2(nothing.fileno(), descriptor, inheritable=False)
    threading.excepthook = threading.__excepthook__
    sys.unraisablehook = sys.__unraisablehook__
