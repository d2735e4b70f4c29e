"""Where attached ranks meet before there is a process group: a store, and what is said over it, as JSON text.

Only rank 0 composes; it publishes the frozen config, its hash and the run directory. Nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallelrun.errors import EXIT_HANG, EnvironmentProblem, Problem
from parallelrun.launch.environment import LISTENER, Attached
from parallelrun.records import write_text

if TYPE_CHECKING:
    from torch.distributed import Store

COMPOSE_S = 120.0  # how long the others wait for rank 0 to compose
JOIN_S = 60.0  # how long rank 0 waits for the others to join


def connect(attached: Attached, timeout_s: float = COMPOSE_S) -> Store:
    """The job's store: torchrun's own, else one that rank 0 serves, on loopback where all ranks share the host.

    Raises EnvironmentProblem when the address or the port cannot be used.
    """
    import torch.distributed as dist

    host, port, listener = attached.master_addr, attached.master_port, None
    agent_serves = attached.source == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if attached.rank == 0 and not agent_serves:
        listener = _inherited_listener() or _listen(host, port)
        port = listener.getsockname()[1]
        if attached.master_port == 0:
            _announce_port(attached, port)
    elif port == 0:
        port = _find_port(attached, timeout_s)
    _check_resolves(host)
    try:
        store = dist.TCPStore(
            host, port, attached.world, listener is not None, timedelta(seconds=timeout_s), wait_for_workers=False,
            master_listen_fd=listener.detach() if listener else None,
        )  # fmt: skip
    except (RuntimeError, OSError) as error:
        # DistNetworkError is a RuntimeError
        raise EnvironmentProblem(
            Problem(f"rank {attached.rank} cannot reach rank 0 at {host}:{port} within {timeout_s:g} s",
                    where="MASTER_ADDR, MASTER_PORT", command="check that rank 0 runs and that the port is open")
        ) from error  # fmt: skip
    return dist.PrefixStore(f"parallelrun/{attached.job}", store)


def put(store: Store, key: str, value: Any) -> None:
    """Say `value` (JSON) under `key`."""
    store.set(key, json.dumps(value))


def get(store: Store, key: str, timeout_s: float) -> Any:
    """What was said under `key`; None when nothing is said in time."""
    try:
        store.wait([key], timedelta(seconds=timeout_s))
    except RuntimeError:  # DistStoreError
        return None
    return json.loads(store.get(key))


@dataclass(frozen=True)
class Member:
    """What a rank tells when it joins. directory_seen: it can see the run directory that rank 0 has made; born: when
    its process was started, see `birth`; words and code: see `agreement`; gpu: the identity of the GPU it would use,
    empty for none, with that GPU's memory and the number of GPUs that it sees."""

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


@dataclass(frozen=True)
class Peers:
    """Where the ranks live, by rank, as seen from one of them."""

    hosts: tuple[str, ...]
    pids: tuple[int, ...]
    born: tuple[str, ...]
    seen: frozenset[int]

    @classmethod
    def of(cls, rank: int, members: Sequence[Member]) -> Peers:
        """As `rank` sees them at the start: those on its host, unless containers hide their processes."""
        here = members[rank].host
        seen = frozenset(m.rank for m in members if m.host == here and m.born and birth(m.pid) == m.born)
        return cls(tuple(m.host for m in members), tuple(m.pid for m in members), tuple(m.born for m in members), seen)

    def sees(self, rank: int) -> bool:
        """Could this rank see that one's process end?"""
        return rank in self.seen

    def is_gone(self, rank: int) -> bool:
        """True if that rank's process has been seen to have ended."""
        return rank in self.seen and birth(self.pids[rank]) != self.born[rank]


def gather(store: Store, world: int, timeout_s: float) -> list[Member]:
    """All members, by rank. Raises EnvironmentProblem (exit 7) naming the ranks that did not come."""
    deadline = time.monotonic() + timeout_s
    said = [get(store, f"joined/{rank}", max(0.05, deadline - time.monotonic())) for rank in range(world)]
    missing = [rank for rank, fields in enumerate(said) if fields is None]
    if missing:
        hosts = sorted({fields["host"] for fields in said if fields is not None})
        shown = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
        what = f"joined {world - len(missing)} of {world} ranks in {timeout_s:g} s; missing: {shown}"
        raise EnvironmentProblem(Problem(f"{what} (hosts that came: {', '.join(hosts)})", "world"), exit_code=EXIT_HANG)
    return [Member(**fields) for fields in said]


def _inherited_listener() -> socket.socket | None:
    """The socket that our own launcher has opened on this host for the rendezvous. Child processes do not get it."""
    descriptor = os.environ.pop(LISTENER, "")
    return socket.socket(fileno=int(descriptor)) if descriptor else None


def _listen(host: str, port: int) -> socket.socket:
    """A socket on exactly this address (never on all interfaces, if the address is one of this host's)."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=4096)
    except OSError as error:
        command = "MASTER_PORT=<a free port>, or unset MASTER_ADDR and MASTER_PORT on one host"
        what = f"rank 0 cannot listen on {host}:{port}: {error.strerror or error}"
        raise EnvironmentProblem(Problem(what, where="MASTER_ADDR, MASTER_PORT", command=command)) from error


def _check_resolves(host: str) -> None:
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        problem = Problem(f"MASTER_ADDR={host} cannot be resolved", "MASTER_ADDR", command="unset MASTER_ADDR")
        raise EnvironmentProblem(problem) from error


def _port_file(attached: Attached) -> Path:
    """A private file that all ranks of the job on this host can name. Raises EnvironmentProblem if it is not ours."""
    folder = Path(tempfile.gettempdir()) / f"parallelrun-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    owner = folder.lstat()
    if owner.st_uid != os.getuid() or stat.S_IMODE(owner.st_mode) & 0o077 or not stat.S_ISDIR(owner.st_mode):
        raise EnvironmentProblem(
            Problem(f"{folder} is not this user's private folder", "TMPDIR", command=f"ls -ld {folder}")
        )
    return folder / f"{sha256(attached.job.encode()).hexdigest()[:16]}.port"


def _announce_port(attached: Attached, port: int) -> None:
    write_text(_port_file(attached), json.dumps({"port": port, "pid": os.getpid(), "born": birth(os.getpid())}))


def forget_port(attached: Attached) -> None:
    """All ranks have come: the file is not needed any more."""
    if attached.master_port == 0 and attached.rank == 0:
        with contextlib.suppress(OSError):
            _port_file(attached).unlink()


def _find_port(attached: Attached, timeout_s: float) -> int:
    """The port that rank 0 announced; a file left by a process that is gone does not count."""
    path, deadline = _port_file(attached), time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError, KeyError):
            said = json.loads(path.read_text())
            if birth(said["pid"]) == said["born"]:
                return int(said["port"])
        time.sleep(0.02)
    what = f"rank {attached.rank} has waited {timeout_s:g} s for rank 0 to come"
    raise EnvironmentProblem(Problem(what, "rank 0"), exit_code=EXIT_HANG)


def birth(pid: int) -> str:
    """When a process was started: with its number, a name that is never given twice. Empty off Linux.

    One that has ended, and that nobody has asked yet how, has none.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[19] if fields[0] not in "ZX" else f"gone {pid}"
    except OSError:
        return "" if not Path("/proc/self/stat").exists() else f"gone {pid}"
