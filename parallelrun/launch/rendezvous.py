"""The rendezvous of ranks that another launcher has started: a store in which they exchange JSON text.

Only rank 0 composes the configuration. It publishes the frozen config, its hash and the run directory. Nothing is
unpickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallelrun.errors import EXIT_HANG, EnvironmentProblem, Problem
from parallelrun.launch.environment import LISTENER, Attached
from parallelrun.launch.processes import start_time
from parallelrun.launch.rank import tcp_store
from parallelrun.records import write_text

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

COMPOSE_S = 120.0  # how long the other ranks wait for rank 0 to compose
JOIN_S = 60.0  # how long rank 0 waits for the other ranks to join
_ADDRESS = "MASTER_ADDR, MASTER_PORT"


@dataclass(frozen=True)
class Member:
    """What a rank reports when it joins. directory_seen: it sees the run directory that rank 0 has created; born: the
    start time of its process (`processes.start_time`); words, code: see `agreement`; gpu: the identity of the GPU that
    it would use, empty for none."""

    rank: int
    host: str
    pid: int
    born: str
    words: dict[str, tuple[str, str]]
    code: dict[str, str]
    code_version: str
    config: str
    directory_seen: bool
    gpu: str = ""
    gpu_bytes: int = 0
    visible_gpus: int = 0


def connect(attached: Attached, timeout_s: float = COMPOSE_S) -> Store:
    """Return the job's store: torchrun's own, else one that rank 0 serves, on loopback if all ranks share the host.

    Raises EnvironmentProblem if the address or the port cannot be used.
    """
    from torch.distributed.distributed_c10d import PrefixStore

    host, port, listener = attached.master_addr, attached.master_port, None
    agent_serves = attached.source == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if attached.rank == 0 and not agent_serves:
        listener = _listen(host, port)
        port = listener.getsockname()[1]
        if attached.master_port == 0:
            contact = {"port": port, "pid": os.getpid(), "born": start_time(os.getpid())}
            write_text(_port_file(attached), json.dumps(contact))
    elif port == 0:
        port = _find_port(attached, timeout_s)
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        problem = Problem(f"MASTER_ADDR={host} cannot be resolved", "MASTER_ADDR", command="unset MASTER_ADDR")
        raise EnvironmentProblem(problem) from error
    try:
        store = tcp_store(host, port, attached.world, listener.detach() if listener else None, timeout_s)
    except (RuntimeError, OSError) as error:  # DistNetworkError is a RuntimeError
        what = f"rank {attached.rank} cannot reach rank 0 at {host}:{port} within {timeout_s:g} s"
        command = "check that rank 0 runs and that the port is open"
        raise EnvironmentProblem(Problem(what, _ADDRESS, command=command)) from error
    return PrefixStore(f"parallelrun/{attached.job}", store)


def put(store: Store, key: str, value: Any) -> None:
    """Publish `value` as JSON under `key`."""
    store.set(key, json.dumps(value))


def get(store: Store, key: str, timeout_s: float) -> Any:
    """Return the value that was published under `key`; None if there is none within `timeout_s`."""
    try:
        store.wait([key], timedelta(seconds=timeout_s))
    except RuntimeError:  # DistStoreError
        return None
    return json.loads(store.get(key))


def gather(store: Store, world: int, timeout_s: float) -> list[Member]:
    """Return all members by rank. Raises EnvironmentProblem (exit 7) naming the ranks that did not join."""
    deadline = time.monotonic() + timeout_s
    joined = [get(store, f"joined/{rank}", max(0.05, deadline - time.monotonic())) for rank in range(world)]
    missing = [str(rank) for rank, fields in enumerate(joined) if fields is None]
    if missing:
        hosts = sorted({fields["host"] for fields in joined if fields is not None})
        shown = ", ".join(missing[:16]) + (", ..." if len(missing) > 16 else "")
        what = f"joined {world - len(missing)} of {world} ranks in {timeout_s:g} s; missing: {shown}"
        problem = Problem(f"{what} (hosts of the others: {', '.join(hosts)})", "world")
        raise EnvironmentProblem(problem, exit_code=EXIT_HANG)
    return [Member(**fields) for fields in joined]


def forget_port(attached: Attached) -> None:
    """Delete rank 0's port file, which nobody needs when all ranks have joined."""
    if attached.master_port == 0 and attached.rank == 0:
        with contextlib.suppress(OSError):
            _port_file(attached).unlink()


def _listen(host: str, port: int) -> socket.socket:
    """Return the socket that our launcher has opened on this host, else one on exactly this address."""
    if descriptor := os.environ.pop(LISTENER, ""):  # removed, so that child processes do not use it
        return socket.socket(fileno=int(descriptor))
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server((str(address[0]), int(address[1])), family=family, backlog=4096)
    except OSError as error:
        what = f"rank 0 cannot listen on {host}:{port}: {error.strerror or error}"
        command = "MASTER_PORT=<a free port>; on one host, unset MASTER_ADDR and MASTER_PORT"
        raise EnvironmentProblem(Problem(what, _ADDRESS, command=command)) from error


def _port_file(attached: Attached) -> Path:
    """Return the private file that the job's ranks on this host share. Raises EnvironmentProblem if it is not ours."""
    folder = Path(tempfile.gettempdir()) / f"parallelrun-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    owner = folder.lstat()
    if owner.st_uid != os.getuid() or stat.S_IMODE(owner.st_mode) & 0o077 or not stat.S_ISDIR(owner.st_mode):
        what = f"{folder} must be a folder that only this user can read"
        raise EnvironmentProblem(Problem(what, "TMPDIR", command=f"ls -ld {folder}"))
    return folder / f"{sha256(attached.job.encode()).hexdigest()[:16]}.port"


def _find_port(attached: Attached, timeout_s: float) -> int:
    """Return the port that rank 0 has announced. A file of a process that has exited is ignored."""
    path, deadline = _port_file(attached), time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError, KeyError):
            contact = json.loads(path.read_text())
            if start_time(contact["pid"]) == contact["born"]:
                return int(contact["port"])
        time.sleep(0.02)
    what = f"rank {attached.rank} has waited {timeout_s:g} s for rank 0 to start"
    raise EnvironmentProblem(Problem(what, "rank 0"), exit_code=EXIT_HANG)
