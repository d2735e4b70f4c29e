"""The rendezvous of ranks that another launcher has started: they join through a store and must agree. Torch-free.

Only rank 0 composes the configuration. It publishes the frozen config, its hash and the run directory. Each rank
reports how it was started (`Member`). Rank 0 compares the reports before a process group exists: command line, code,
torch, config, GPUs. The store holds JSON text, and nothing is unpickled. Command lines are compared by hash, so that no
rank sends the secrets in its command line.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import parallelrun
from parallelrun.errors import EXIT_HANG, EnvironmentProblem, Problem
from parallelrun.launch import directory
from parallelrun.launch.environment import LISTENER, Attached
from parallelrun.launch.processes import start_time
from parallelrun.launch.rank import tcp_store
from parallelrun.plan.structure import Plan
from parallelrun.records import redact, write_text

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

COMPOSE_S = 120.0  # how long the other ranks wait for rank 0 to compose
JOIN_S = 60.0  # how long rank 0 waits for the other ranks to join
_ADDRESS = "MASTER_ADDR, MASTER_PORT"
MAX_NAMED = 8  # ranks or groups of ranks that a message names
_OF_ONE_RANK = ("-v", "--verbose")  # change what a rank prints, not what it computes


@dataclass(frozen=True)
class Member:
    """What a rank reports when it joins. born: see `processes.start_time`; words: see `command_line`; code: see `code`;
    config: its hash; directory_seen: the rank sees the run directory that rank 0 has created; gpu: the identity of the
    GPU that it would use, empty for none."""

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


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on exactly this address. Port 0: on a free port."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server((str(address[0]), int(address[1])), family=family, backlog=4096)


def _listen(host: str, port: int) -> socket.socket:
    """Return the socket that our launcher has opened on this host, else one on exactly this address."""
    if descriptor := os.environ.pop(LISTENER, ""):  # removed, so that child processes do not use it
        return socket.socket(fileno=int(descriptor))
    try:
        return listen(host, port)
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


# -- agreement


def command_line(words: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return `{key: (its words without secrets, hash of the words)}`, equal for command lines with the same meaning.

    The order of different keys does not matter; the order of several values of one key does.
    """
    by_key: dict[str, list[str]] = defaultdict(list)
    for word in words:
        if word not in _OF_ONE_RANK:
            by_key[word.partition("=")[0].lstrip("+")].append(word)
    by_key.pop("run", None)  # the default verb
    return {
        key: (" ".join(map(redact, given)), sha256(json.dumps(given).encode()).hexdigest())
        for key, given in by_key.items()
    }


def code(model_source: str | None) -> dict[str, str]:
    """Return versions and file hashes of the code of this rank, by name. model_source: the key `model.source`."""
    found = {"parallelrun's code": directory.code_fingerprint(), "torch": metadata.version("torch")}
    file = Path((model_source or "").rpartition(":")[0]).expanduser()
    if file.is_file():
        found[f"the file of model.source={model_source}"] = sha256(file.read_bytes()).hexdigest()
    return found


def code_version() -> str:
    """Return the installed version and the git commit for people: `version 0.5.0, commit 1234567 with changes`."""
    state = directory.git_state()
    commit = f", commit {state['sha'][:7]}{' with changes' if state['dirty'] else ''}" if state else ""
    return f"version {parallelrun.__version__}{commit}"


def differences(members: Sequence[Member], plan: Plan) -> list[Problem]:
    """Return the reasons why these ranks cannot run `plan` together."""
    problems = [*_command_lines(members), *_code(members)]
    if damaged := [member for member in members if member.config != members[0].config]:
        what = f"the config arrived damaged at {named(damaged)}: its hash differs from rank 0's"
        problems.append(Problem(what, "config"))
    if unseen := sorted({member.host for member in members if not member.directory_seen}):
        what = f"the run directory is not visible on {', '.join(unseen)}"
        problems.append(Problem(what, "runs", "runs=<a folder on a file system that all hosts share>"))
    return problems + (_gpus(members, plan) if plan.device == "cuda" else [])


def _command_lines(members: Sequence[Member]) -> list[Problem]:
    """Name the ranks whose command lines differ from rank 0's, with the words that differ."""
    groups: dict[str, list[Member]] = defaultdict(list)
    for member in members:
        if found := _other_words(members[0].words, member.words):
            groups[found].append(member)
    fix = "start every rank with the same words"
    problems = [
        Problem(f"the command line of {named(odd)} differs from rank 0's: {found}", "command line", command=fix)
        for found, odd in list(groups.items())[:MAX_NAMED]
    ]
    if len(groups) > MAX_NAMED:
        problems.append(Problem(f"{len(groups) - MAX_NAMED} other command lines differ from rank 0's too"))
    return problems


def _other_words(expected: dict[str, tuple[str, str]], given: dict[str, tuple[str, str]]) -> str:
    """Return `model.layers=3 (rank 0: not given)` for each key whose words differ."""
    parts = []
    for key in sorted({*expected, *given}):
        (ours, our_hash), (theirs, their_hash) = expected.get(key, ("", "")), given.get(key, ("", ""))
        if our_hash != their_hash:
            same = " (a hidden value differs)" if theirs == ours else f" (rank 0: {ours or 'not given'})"
            parts.append((theirs or f"{key} not given") + same)
    return ", ".join(parts)


def _code(members: Sequence[Member]) -> list[Problem]:
    problems = []
    for name in dict.fromkeys(name for member in members for name in member.code):
        if odd := [member for member in members if member.code.get(name) != members[0].code.get(name)]:
            table = "; ".join(_shown(member, name) for member in (members[0], *odd[:MAX_NAMED]))
            more = f"; and {len(odd) - MAX_NAMED} more" if len(odd) > MAX_NAMED else ""
            what = f"{name} differs between ranks: {table}{more}"
            problems.append(Problem(what, name, command="install the same versions on all hosts"))
    return problems


def _shown(member: Member, name: str) -> str:
    value = member.code.get(name, "absent")
    return f"rank {member.rank} on {member.host}: {value[:12] if len(value) == 64 else value} ({member.code_version})"


def _gpus(members: Sequence[Member], plan: Plan) -> list[Problem]:
    """Check that each worker has its own GPU among those that its launcher lets it see."""
    workers = [member for member in members if plan.role(member.rank) == "worker"]
    without = [member for member in workers if not member.gpu]
    problems = [Problem(f"device=cuda, and {named(without)} sees no GPU", "device", "device=cpu")] if without else []
    sharing: dict[tuple[str, str], list[Member]] = defaultdict(list)
    for member in workers:
        sharing[member.host, member.gpu].append(member)
    if shared := [group for (_, gpu), group in sharing.items() if gpu and len(group) > 1]:
        groups = "; ".join(map(named, shared[:MAX_NAMED]))
        visible = ", ".join(f"rank {member.rank} sees {member.visible_gpus}" for member in shared[0][:MAX_NAMED])
        what = f"several ranks would share one GPU: {groups} ({visible})"
        fix = "start one rank per GPU of a host: torchrun --nproc-per-node=<GPUs>, srun --gpus-per-task=1"
        problems.append(Problem(what, "world", command=fix))
    return problems


def named(members: Sequence[Member]) -> str:
    """Return `rank 1 on a`, or `ranks 1, 3 on a, b`: at most MAX_NAMED ranks, then a count."""
    ranks = ", ".join(str(member.rank) for member in members[:MAX_NAMED])
    more = f" and {len(members) - MAX_NAMED} more" if len(members) > MAX_NAMED else ""
    hosts = ", ".join(dict.fromkeys(member.host for member in members[:MAX_NAMED]))
    return f"rank{'s' * (len(members) > 1)} {ranks}{more} on {hosts}"
