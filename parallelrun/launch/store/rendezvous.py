"""The rendezvous of ranks that another launcher has started: they join through a store and must agree.

Only rank 0 composes the configuration. It publishes the frozen config, its hash and the run directory. Each rank
reports how it was started (`Member`). Rank 0 compares the reports before a process group exists: command line, code,
torch, config, GPUs. The store holds JSON text, and nothing is unpickled. Command lines are compared by hash, so that no
rank sends the secrets in its command line.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallelrun.base.errors import EXIT_HANG, EnvironmentProblem, Problem
from parallelrun.base.records import redact
from parallelrun.base.version import __version__
from parallelrun.launch.host import directory
from parallelrun.planner.contract.plan import Plan

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_LOOK_S = 0.05
JOIN_S = 60.0  # how long rank 0 waits for the other ranks to join
MAX_NAMED = 8  # ranks or groups of ranks that a message names
_OF_ONE_RANK = ("-v", "--verbose")  # change what a rank prints, not what it computes


@dataclass(frozen=True)
class Member:
    """A rank's report when it joins. born: see `os_process.start_time`; words: see `command_line`; code: see `code`;
    config: its hash; directory_seen: the rank sees the run directory that rank 0 has created; gpu: the identity of the
    GPU that it would use, empty for none; addresses: of its host."""

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
    addresses: Sequence[str] = ()


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
    keys = [f"joined/{rank}" for rank in range(world)]
    while not store.check(keys) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    joined = {rank: Member(**json.loads(store.get(key))) for rank, key in enumerate(keys) if store.check([key])}
    missing = [str(rank) for rank in range(world) if rank not in joined]
    if missing:
        hosts = sorted({member.host for member in joined.values()})
        shown = ", ".join(missing[:16]) + (", ..." if len(missing) > 16 else "")
        message = f"joined {world - len(missing)} of {world} ranks in {timeout_s:g} s; missing: {shown}"
        problem = Problem(f"{message} (hosts of the others: {', '.join(hosts)})", "world")
        raise EnvironmentProblem(problem, exit_code=EXIT_HANG)
    return list(joined.values())


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
        key: (" ".join(map(redact, values)), sha256(json.dumps(values).encode()).hexdigest())
        for key, values in by_key.items()
    }


def code(functions: Mapping[str, str]) -> dict[str, str]:
    """Return versions and file hashes of the code of this rank, by name. functions: the user's, by key."""
    versions = {"parallelrun's code": directory.code_fingerprint(), "torch": metadata.version("torch")}
    for key, source in functions.items():
        file = Path(source.rpartition(":")[0]).expanduser()
        if file.is_file():
            versions[f"the file of {key}={source}"] = sha256(file.read_bytes()).hexdigest()
    return versions


def code_version() -> str:
    """Return the installed version and the git commit for people: `version 0.5.0, commit 1234567 with changes`."""
    state = directory.git_state()
    commit = f", commit {state['sha'][:7]}{' with changes' if state['dirty'] else ''}" if state else ""
    return f"version {__version__}{commit}"


def differences(members: Sequence[Member], plan: Plan) -> list[Problem]:
    """Return the reasons why these ranks cannot run `plan` together."""
    problems = _disagreements(members)
    if damaged := [member for member in members if member.config != members[0].config]:
        message = f"the config arrived damaged at {named(damaged)}: its hash differs from rank 0's"
        problems.append(Problem(message, "config"))
    if unseen := sorted({member.host for member in members if not member.directory_seen}):
        message = f"the run directory is not visible on {', '.join(unseen)}"
        problems.append(Problem(message, "runs", "runs=<a folder on a file system that all hosts share>"))
    return problems + (_gpus(members, plan) if plan.device == "cuda" else [])


def _disagreements(members: Sequence[Member]) -> list[Problem]:
    """Name the ranks whose command lines or code differ from rank 0's, with what differs."""
    first = members[0]
    groups: dict[tuple[str, str], list[Member]] = defaultdict(list)  # (kind, difference) -> ranks
    for member in members:
        if difference := _other_words(first.words, member.words):
            groups["the command line", difference].append(member)
        for name in dict.fromkeys([*first.code, *member.code]):
            theirs, ours = (rank.code.get(name, "absent") for rank in (member, first))
            if theirs != ours:
                difference = f"{theirs[:12]}, {member.code_version} (rank 0: {ours[:12]}, {first.code_version})"
                groups[name, difference].append(member)
    fix = "start every rank with the same words, and install the same versions on all hosts"
    problems = [
        Problem(f"{kind} of {named(odd)} differs from rank 0's: {difference}", "world", command=fix)
        for (kind, difference), odd in list(groups.items())[:MAX_NAMED]
    ]
    if len(groups) > MAX_NAMED:
        problems.append(Problem(f"{len(groups) - MAX_NAMED} other differences from rank 0"))
    return problems


def _other_words(expected: dict[str, tuple[str, str]], words: dict[str, tuple[str, str]]) -> str:
    """Return `model.layers=3 (rank 0: not given)` for each key whose words differ."""
    parts = []
    for key in sorted({*expected, *words}):
        (ours, our_hash), (theirs, their_hash) = expected.get(key, ("", "")), words.get(key, ("", ""))
        if our_hash != their_hash:
            same = " (a hidden value differs)" if theirs == ours else f" (rank 0: {ours or 'not given'})"
            parts.append((theirs or f"{key} not given") + same)
    return ", ".join(parts)


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
        message = f"several ranks would share one GPU: {groups} ({visible})"
        fix = "start one rank per GPU of a host: torchrun --nproc-per-node=<GPUs>, srun --gpus-per-task=1"
        problems.append(Problem(message, "world", command=fix))
    return problems


def named(members: Sequence[Member]) -> str:
    """Return `rank 1 on a`, or `ranks 1, 3 on a, b`: at most MAX_NAMED ranks, then a count."""
    ranks = ", ".join(str(member.rank) for member in members[:MAX_NAMED])
    more = f" and {len(members) - MAX_NAMED} more" if len(members) > MAX_NAMED else ""
    hosts = ", ".join(dict.fromkeys(member.host for member in members[:MAX_NAMED]))
    return f"rank{'s' * (len(members) > 1)} {ranks}{more} on {hosts}"
