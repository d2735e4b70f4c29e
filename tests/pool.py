"""Real ranks for tests, in tens of milliseconds: `from tests.pool import run_ranks`.

    def body(scale):                       # module-level; the process group is initialised when it is called
        tensor = torch.full((2,), scale * dist.get_rank())
        dist.all_reduce(tensor)
        return tensor                      # any picklable thing

    def test_sum():
        results = run_ranks(4, body, 2.0)  # [result of rank 0, ..., result of rank 3]

Tests run as `pytest` from the project root; every folder under `tests/` is a package, so helpers are imported as
`tests.pool`, `tests.plans`. The same function comes as the fixture `run_ranks`.

How: one helper process per test session (`tests.servants`) has imported torch and every parallelrun module (one thread,
no tensor operation) and forks ranks. Ranks that have answered a call answer the next one of the same test file and
world, which takes half the time. A call that fails, or that replaces a function or a constant of the program, ends its
ranks, so a test cannot poison the next. The helper imports the test's module once: a module edited during a session is
not reloaded.

A failing call raises `RanksFailed`; its text starts with the first real cause (rank and traceback), victims of a lost
connection come last. After `timeout` seconds the stacks of all ranks are collected, all are killed, and the call fails.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.servants import servant

BACKEND = os.environ.get("PARALLELRUN_TEST_BACKEND", "shm")  # of tests that name none
COMPILER = ("torch._dynamo.backends.debugging",)  # what `torch.compile` imports when used, without code generation
TRANSFORMERS = ("transformers.modeling_utils", "transformers.models.auto.modeling_auto")
_VICTIM_SIGNS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused", "gloo/")


@dataclass(frozen=True)
class RankFailure:
    """How one rank failed: `kind` is the exception's class name, `SIGKILL`, `exit 3` or `timeout`."""

    rank: int
    kind: str
    message: str
    traceback: str
    exception: BaseException | None = None

    @property
    def is_victim(self) -> bool:
        """True when the rank most likely failed because a peer vanished."""
        return self.kind in ("RuntimeError", "DistBackendError", "DistNetworkError") and any(
            sign in self.message for sign in _VICTIM_SIGNS
        )


class RanksFailed(Exception):
    """At least one rank of a `run_ranks` call failed. `failures` is ordered, first real cause first."""

    def __init__(self, failures: list[RankFailure]):
        self.failures = failures
        super().__init__("\n".join(f"rank {f.rank}: {f.kind}: {f.message}\n{f.traceback}" for f in failures))


def run_ranks(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    fresh: bool = False,
    backend: str = BACKEND,
    imports: tuple[str, ...] = (),
) -> list[Any]:
    """Call `function(*args)` on `world` ranks; return their results by rank.

    `function` is module-level and finds its rank by `torch.distributed.get_rank()`; arguments and results are pickled.
    What ranks print is printed here, prefixed by rank. fresh: no earlier call has run in these processes, for tests of
    memory and for what cannot be undone. backend: shm or gloo. imports: modules that ranks then need not import
    themselves. Raises RanksFailed.
    """
    request = {
        "world": world,
        "module": function.__module__,
        "file": getattr(sys.modules[function.__module__], "__file__", None),
        "name": function.__qualname__,
        "args": pickle.dumps(args),
        "timeout": timeout,
        "fresh": fresh,
        "test file": os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0],
        "backend": backend,
        "imports": imports,
        "path": list(sys.path),
    }
    reply = _ask(pickle.dumps(request), timeout + 60)
    for rank, text in enumerate(reply["output"]):
        for line in text.splitlines():
            print(f"[rank {rank}] {line}")
    if reply["failures"]:
        failures = [_failure(*fields) for fields in reply["failures"]]
        raise RanksFailed(sorted(failures, key=lambda failure: failure.is_victim))
    return [pickle.loads(result) for result in reply["results"]]


def _failure(rank: int, kind: str, message: str, traceback: str, exception: bytes | None) -> RankFailure:
    try:
        return RankFailure(rank, kind, message, traceback, pickle.loads(exception) if exception else None)
    except Exception:  # an exception whose constructor does not survive pickling: its text is enough
        return RankFailure(rank, kind, message, traceback)


_current: socket.socket | None = None  # one per session: this is what makes it cheap


def _ask(request: bytes, timeout: float) -> dict[str, Any]:
    """Let the process that forks ranks answer; they talk by length-prefixed pickles."""
    global _current
    if _current is None or _current.fileno() < 0:
        _current = servant("tests.pool_helper")
    _current.settimeout(timeout + 120)  # the first call waits for imports too
    try:
        send_message(_current, request)
        reply: dict[str, Any] = pickle.loads(receive_message(_current))
        return reply
    except BaseException:
        _current.close()  # the helper sees it, kills its ranks and leaves
        raise


def send_message(connection: socket.socket, payload: bytes) -> None:
    """Write one length-prefixed message."""
    connection.sendall(struct.pack("!Q", len(payload)) + payload)


def receive_message(connection: socket.socket) -> bytes:
    """Read one length-prefixed message; EOFError when the other side is gone."""
    (length,) = struct.unpack("!Q", _receive_exactly(connection, 8))
    return _receive_exactly(connection, length)


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = connection.recv(min(1 << 20, count - len(data)))
        if not part:
            raise EOFError("the other side is gone")
        data += part
    return bytes(data)
