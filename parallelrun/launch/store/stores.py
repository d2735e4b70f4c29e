"""The stores in which ranks meet, and the processes that can reach them.

Ranks of one host share a file without a name: it is opened through the process that made it, which the kernel allows
its user only, so that nothing listens. Ranks of several hosts meet at a server in rank 0, which answers only ranks
that know the run's token (`store_server`). Under torchrun the store is torchrun's own, which answers every process.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import tempfile
import time
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from parallelrun.base import stop_signals
from parallelrun.base.errors import EXIT_HANG, EnvironmentProblem, Problem
from parallelrun.base.records import write_text
from parallelrun.base.wording import print_note
from parallelrun.launch.host import interfaces
from parallelrun.launch.host.environment import TOKEN, Attached
from parallelrun.launch.host.heartbeat import anonymous_file, file_store
from parallelrun.launch.host.os_process import start_time
from parallelrun.launch.store import store_server

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

CONNECT_S = 120.0  # how long the other ranks wait for rank 0 to compose
NUM_PORTS = 8  # that rank 0 tries, from the one that is asked for
_ADDRESS = "MASTER_ADDR, MASTER_PORT"


def connect(attached: Attached, timeout_s: float = CONNECT_S) -> Store:
    """Return the job's store; rank 0 makes it, unless it is torchrun's. Keep it while a process group uses it.

    Raises EnvironmentProblem if the address, the ports or the interface cannot be used, or rank 0 does not come.
    """
    with stop_signals.postponed():  # torch is imported
        from torch.distributed import TCPStore  # type: ignore[attr-defined]
        from torch.distributed.distributed_c10d import PrefixStore

    if message := interfaces.missing(os.environ):
        raise EnvironmentProblem(Problem(message, "GLOO_SOCKET_IFNAME", command="unset GLOO_SOCKET_IFNAME"))
    prefix = f"parallelrun/{attached.job}"
    if attached.master_port == 0:
        return PrefixStore(prefix, file_store(_shared_file(attached, timeout_s)))
    try:
        socket.getaddrinfo(attached.master_addr, None)
    except OSError as error:
        message = f"MASTER_ADDR={attached.master_addr} cannot be resolved"
        raise EnvironmentProblem(Problem(message, "MASTER_ADDR", command="unset MASTER_ADDR")) from error
    agent_serves = attached.source == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        if agent_serves:
            patience = timedelta(seconds=timeout_s)
            address = (attached.master_addr, attached.master_port)
            return PrefixStore(prefix, TCPStore(*address, timeout=patience, wait_for_workers=False))
        return _token_store(attached, timeout_s, f"{prefix}/")
    except (RuntimeError, OSError) as error:  # DistNetworkError is a RuntimeError
        where = f"{attached.master_addr}:{attached.master_port}"
        message = f"rank {attached.rank} cannot reach rank 0 at {where} within {timeout_s:g} s ({error})"
        command = f"check that rank 0 runs, that the port is open, and that all ranks have the same {TOKEN}, or none"
        raise EnvironmentProblem(Problem(message.splitlines()[0], _ADDRESS, command=command)) from error


# -- on several hosts


def _token_store(attached: Attached, timeout_s: float, prefix: str) -> Store:
    from parallelrun.launch.store.token_store import TokenStore

    host, port = attached.master_addr, attached.master_port
    token = os.environ.get(TOKEN, "")
    # without a secret, the job's name keeps other jobs out, if not strangers
    secret = token or f"{attached.job} {attached.world}"
    if attached.rank == 0:
        listener = _listen(host, port)
        address, port = listener.getsockname()[:2]
        if warning := exposure(str(address), port, token):
            print_note(f"warning: {warning}")
        store_server.serve(listener, secret)
        return TokenStore([(str(address), port)], secret, timeout_s, prefix)
    ports = range(port, min(port + NUM_PORTS, 65536))
    return TokenStore([(host, candidate) for candidate in ports], secret, timeout_s, prefix)


def exposure(address: str, port: int, token: str) -> str:
    """Return what strangers could do to a run that meets at this address; empty if they cannot."""
    if token or address.startswith("127.") or address == "::1":
        return ""
    message = f"rank 0 listens on {address}:{port} without a token: any process that reaches this port can end the run"
    return f"{message} (set {TOKEN} to a secret, the same on all ranks)"


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on exactly this address, at the first free port."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    problem: OSError | None = None
    for candidate in range(port, min(port + NUM_PORTS, 65536)):
        try:
            return socket.create_server((str(address[0]), candidate), family=family, backlog=4096)
        except OSError as error:
            problem = problem or error
    assert problem is not None
    message = f"rank 0 cannot listen on {host}:{port} or the ports after it: {problem.strerror or problem}"
    command = "MASTER_PORT=<a free port>; on one host, unset MASTER_ADDR and MASTER_PORT"
    raise EnvironmentProblem(Problem(message, _ADDRESS, command=command)) from problem


# -- on one host


def _shared_file(attached: Attached, timeout_s: float) -> int:
    """Return a descriptor of the file that rank 0 has made, and announced in a private file named after the job."""
    note = _note(attached)
    if attached.rank == 0:
        descriptor = anonymous_file("store")
        contact = {"descriptor": descriptor, "pid": os.getpid(), "born": start_time(os.getpid())}
        write_text(note, json.dumps(contact))
        return descriptor
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError, KeyError):
            contact = json.loads(note.read_text())
            if start_time(contact["pid"]) == contact["born"]:  # else that of a process that has exited
                return os.open(f"/proc/{contact['pid']}/fd/{contact['descriptor']}", os.O_RDWR)
        time.sleep(0.02)
    message = f"rank {attached.rank} has waited {timeout_s:g} s for rank 0 to start"
    raise EnvironmentProblem(Problem(message, "rank 0"), exit_code=EXIT_HANG)


def forget(attached: Attached) -> None:
    """Delete rank 0's note, which no rank needs after all have joined."""
    if attached.master_port == 0 and attached.rank == 0:
        with contextlib.suppress(OSError):
            _note(attached).unlink()


def _note(attached: Attached) -> Path:
    """Return the private file that the job's ranks on this host share. Raises EnvironmentProblem if it is not ours."""
    folder = Path(tempfile.gettempdir()) / f"parallelrun-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    owner = folder.lstat()
    if owner.st_uid != os.getuid() or stat.S_IMODE(owner.st_mode) & 0o077 or not stat.S_ISDIR(owner.st_mode):
        message = f"{folder} must be a folder that only this user can read"
        raise EnvironmentProblem(Problem(message, "TMPDIR", command=f"ls -ld {folder}"))
    return folder / f"{sha256(attached.job.encode()).hexdigest()[:16]}.json"
