"""Whether the ranks that another launcher has started belong to one run: command line, code, torch, config. Torch-free.

Each rank tells what it was started with when it joins (`meeting.Member`); rank 0 compares, and refuses before a
process group exists. Words are compared by digest, so that no rank sends the secrets of its command line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import parallelrun
from parallelrun.errors import Problem
from parallelrun.launch import directory
from parallelrun.plan.structure import Plan

if TYPE_CHECKING:
    from parallelrun.launch.meeting import Member

MAX_NAMED = 8  # ranks or groups of ranks that a message names
_OF_ONE_RANK = ("-v", "--verbose")  # change what a rank prints, not what it computes
_NOT_GIVEN = "not given"


def command_line(words: Sequence[str]) -> dict[str, tuple[str, str]]:
    """`{key: (its words without secrets, digest of the words)}`: equal for command lines that mean the same.

    The order of different keys does not count; the order in which one key is given several times does.
    """
    by_key: dict[str, list[str]] = {}
    for word in words:
        if word not in _OF_ONE_RANK:
            by_key.setdefault(word.partition("=")[0].lstrip("+"), []).append(word)
    by_key.pop("run", None)  # the default verb
    shown = {key: " ".join(map(directory.redact, given)) for key, given in by_key.items()}
    return {key: (shown[key], sha256(json.dumps(given).encode()).hexdigest()) for key, given in by_key.items()}


def code(model_source: str | None) -> dict[str, str]:
    """What this rank computes with, by name: versions and hashes of files. model_source: the key `model.source`."""
    found = {"parallelrun's code": directory.code_fingerprint(), "torch": metadata.version("torch")}
    file = Path((model_source or "").rpartition(":")[0]).expanduser()
    if file.is_file():
        found[f"the file of model.source={model_source}"] = sha256(file.read_bytes()).hexdigest()
    return found


def code_version() -> str:
    """The installed version and the git commit, for people: `version 0.5.0, commit 1234567 with changes`."""
    state = directory.git_state()
    commit = f", commit {state['sha'][:7]}{' with changes' if state['dirty'] else ''}" if state else ""
    return f"version {parallelrun.__version__}{commit}"


def differences(members: Sequence[Member], plan: Plan) -> list[Problem]:
    """What keeps these ranks from running `plan` together."""
    return [
        *_command_lines(members),
        *_code(members),
        *_config(members),
        *_directories(members),
        *_gpus(members, plan),
    ]


def _command_lines(members: Sequence[Member]) -> list[Problem]:
    """Name the ranks whose command line is not rank 0's, and each word in which it differs."""
    groups: dict[str, list[Member]] = {}
    for member in members:
        if found := _other_words(members[0].words, member.words):
            groups.setdefault(found, []).append(member)
    problems = [
        Problem(
            f"{named(odd)} got another command line than rank 0: {found}",
            where="command line",
            command="start every rank with the same words",
        )
        for found, odd in list(groups.items())[:MAX_NAMED]
    ]
    if len(groups) > MAX_NAMED:
        problems.append(Problem(f"{len(groups) - MAX_NAMED} other command lines differ from rank 0's too"))
    return problems


def _other_words(expected: Mapping[str, Sequence[str]], given: Mapping[str, Sequence[str]]) -> str:
    """`model.layers=3 (rank 0: not given)` for each key whose words differ."""
    parts = []
    for key in sorted({*expected, *given}):
        (ours, our_digest), (theirs, their_digest) = expected.get(key, ("", "")), given.get(key, ("", ""))
        if our_digest != their_digest:
            theirs = theirs or f"{key} {_NOT_GIVEN}"
            same = " (a hidden value differs)" if theirs == ours else f" (rank 0: {ours or _NOT_GIVEN})"
            parts.append(theirs + same)
    return ", ".join(parts)


def _code(members: Sequence[Member]) -> list[Problem]:
    problems = []
    for name in dict.fromkeys(name for member in members for name in member.code):
        odd = [member for member in members if member.code.get(name) != members[0].code.get(name)]
        if odd:
            table = "; ".join(_shown(member, name) for member in (members[0], *odd[:MAX_NAMED]))
            more = f"; and {len(odd) - MAX_NAMED} more" if len(odd) > MAX_NAMED else ""
            what = f"{name} differs between ranks: {table}{more}"
            problems.append(Problem(what, name, command="install the same versions on all hosts"))
    return problems


def _shown(member: Member, name: str) -> str:
    value = member.code.get(name, "absent")
    return f"rank {member.rank} on {member.host}: {value[:12] if len(value) == 64 else value} ({member.code_version})"


def _config(members: Sequence[Member]) -> list[Problem]:
    odd = [member for member in members if member.config != members[0].config]
    if not odd:
        return []
    return [Problem(f"the frozen config reached {named(odd)} damaged: its hash is not rank 0's", "config")]


def _directories(members: Sequence[Member]) -> list[Problem]:
    unseen = sorted({member.host for member in members if not member.directory_seen})
    if not unseen:
        return []
    what = f"the run directory is not visible on {', '.join(unseen)}"
    return [Problem(what, "runs", "runs=<a folder on a file system all hosts share>")]


def _gpus(members: Sequence[Member], plan: Plan) -> list[Problem]:
    """Each worker needs a GPU of its own, whichever of its host's GPUs its launcher lets it see."""
    if plan.device != "cuda":
        return []
    workers = [member for member in members if plan.role(member.rank) == "worker"]
    without = [member for member in workers if not member.gpu]
    problems = [Problem(f"device=cuda, and {named(without)} sees no GPU", "device", "device=cpu")] if without else []
    sharing: dict[tuple[str, str], list[Member]] = {}
    for member in workers:
        sharing.setdefault((member.host, member.gpu), []).append(member)
    shared = [group for (_, gpu), group in sharing.items() if gpu and len(group) > 1]
    if shared:
        groups = "; ".join(named(group) for group in shared[:MAX_NAMED])
        visible = ", ".join(f"rank {member.rank} sees {member.visible_gpus}" for member in shared[0][:MAX_NAMED])
        what = f"several ranks would share one GPU: {groups} ({visible})"
        fix = "one rank for each GPU of a host: torchrun --nproc-per-node=<GPUs>, srun --gpus-per-task=1"
        problems.append(Problem(what, "world", command=fix))
    return problems


def named(members: Sequence[Member]) -> str:
    """`rank 1 on a`, or `ranks 1, 3 on a, b`: at most MAX_NAMED ranks, then a count."""
    ranks = ", ".join(str(member.rank) for member in members[:MAX_NAMED])
    more = f" and {len(members) - MAX_NAMED} more" if len(members) > MAX_NAMED else ""
    hosts = ", ".join(dict.fromkeys(member.host for member in members[:MAX_NAMED]))
    return f"rank{'s' * (len(members) > 1)} {ranks}{more} on {hosts}"
