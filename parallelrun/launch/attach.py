"""Running as a rank that torchrun, srun or mpirun has started.

Rank 0 composes and resolves, then `lead`s: config and run directory go through the store. The others `follow`: they
tell what they were started with, rank 0 checks that it is the same everywhere, and all run the same worker. If rank 0
cannot compose, it `abandon`s and all leave with its code.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from parallelrun.errors import (
    EXIT_HANG,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_PREEMPTED,
    EnvironmentProblem,
    ParallelrunError,
    Problem,
)
from parallelrun.launch import agreement, environment, failure, gpus, meeting, output, preflight, rank, survivors
from parallelrun.launch.board import Board
from parallelrun.launch.environment import Attached
from parallelrun.launch.failure import Failure
from parallelrun.launch.meeting import Member, Peers
from parallelrun.launch.processes import Job
from parallelrun.launch.status import Status
from parallelrun.launch.watchdog import Watchdog
from parallelrun.plan.freeze import digest, load_frozen
from parallelrun.records import write_json

if TYPE_CHECKING:
    from torch.distributed import Store

GRACE_S = 1.0  # after a failure: time for other ranks to write theirs


@dataclass(frozen=True)
class Voice:
    """How an attached rank talks to the user."""

    overrides: tuple[str, ...] = ()
    verbose: bool = False


def abandon(attached: Attached, exit_code: int) -> None:
    """Rank 0 could not make a run: the others leave with its code, at once. Never raises."""
    if attached.rank or attached.world == 1:
        return
    try:
        store = meeting.connect(attached, 30.0)
        meeting.put(store, "run", {"failed": exit_code})
        deadline = time.monotonic() + meeting.JOIN_S  # we serve the store: stay until they have read it
        while store.add("told", 0) < attached.world - 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        meeting.forget_port(attached)
    except (ParallelrunError, RuntimeError, OSError):
        return  # the launcher will end the others


def lead(
    attached: Attached, job: Job, argv: Sequence[str], overrides: Sequence[str] = (), verbose: bool = False
) -> int:
    """Rank 0's part: publish the run, see that all have come and agree, run the worker. Returns the exit code.

    argv: this process's command line, which must be the others' too.

    When ranks are missing or disagree, that is said here and to the others, and nothing is raised: nobody is left who
    would have to be told.
    """
    store = meeting.connect(attached)
    text = (job.directory / "config.yaml").read_text()
    status = Status(job.directory)
    status.running()
    run: dict[str, Any] = {
        "config": text,
        "directory": str(job.directory),
        "worker": job.worker,
        "source": job.config.model.source,
        "num_gpus": job.plan.num_workers if job.plan.device == "cuda" else 0,  # the first ranks use one each
        "overrides": list(overrides),  # any rank may say how to resume
        "verbose": verbose,
    }
    meeting.put(store, "run", run)
    meeting.put(store, "joined/0", _member(attached, run, argv))
    try:
        members = meeting.gather(store, attached.world, meeting.JOIN_S)
        if problems := agreement.differences(members, job.plan):
            raise EnvironmentProblem(*problems)
        if job.plan.device == "cuda":
            smallest = min(member.gpu_bytes for member in members[: job.plan.num_workers])
            for note in preflight.check_gpu_memory(job.plan, smallest):
                print(f"note: {note}", file=sys.stderr)
    except EnvironmentProblem as error:
        meeting.put(store, "go", {"failed": error.exit_code})
        status.ended(error.exit_code, str(error))
        print("\n".join(failure.problem_lines(error.problems)), file=sys.stderr, flush=True)
        time.sleep(GRACE_S)  # we serve the store
        return error.exit_code
    finally:
        meeting.forget_port(attached)
    _complete_manifest(job.directory, sorted({member.host for member in members}))
    members = [replace(member, words={}, code={}) for member in members]  # compared, and needed by nobody else
    meeting.put(store, "go", {"members": [asdict(member) for member in members]})
    return _serve(attached, job, store, members, Voice(tuple(overrides), verbose))


def follow(argv: Sequence[str]) -> int:
    """Every other rank's part: wait for rank 0's run, join, run the worker. Returns the exit code.

    argv must mean what rank 0's means; rank 0 composes. Raises EnvironmentProblem when rank 0 does not come.
    """
    attached = environment.detect(os.environ)
    assert attached is not None and attached.rank > 0, "follow() is for ranks that another launcher has started"
    store = meeting.connect(attached)
    run = meeting.get(store, "run", meeting.COMPOSE_S)
    if run is None:
        problem = Problem(f"rank {attached.rank} has waited {meeting.COMPOSE_S:g} s for rank 0 to compose", "rank 0")
        raise EnvironmentProblem(problem, exit_code=EXIT_HANG)
    if "failed" in run:
        store.add("told", 1)
        return int(run["failed"])
    folder = Path(run["directory"])
    meeting.put(store, f"joined/{attached.rank}", _member(attached, run, argv))
    go = meeting.get(store, "go", meeting.JOIN_S + 30)
    if go is None or "failed" in go:
        return int(go["failed"]) if go else survivors.leader_left_early(folder)
    config = load_frozen(run["config"])
    from parallelrun.plan.resolve import resolve

    job = Job(config, resolve(config), folder, run["worker"])
    members = [Member(**fields) for fields in go["members"]]
    return _serve(attached, job, store, members, Voice(tuple(run["overrides"]), run["verbose"]))


def _member(attached: Attached, run: Mapping[str, Any], argv: Sequence[str]) -> dict:
    """What this rank says of itself, before it reads the config: with other code it may not be able to."""
    gpu = gpus.of_rank(attached.local_rank) if attached.rank < run["num_gpus"] else gpus.Gpu()
    member = Member(
        rank=attached.rank,
        host=os.uname().nodename,
        pid=os.getpid(),
        born=meeting.birth(os.getpid()),
        words=agreement.command_line(argv),
        code=agreement.code(run["source"]),
        code_version=agreement.code_version(),
        config=digest(run["config"]),
        directory_seen=(Path(run["directory"]) / "config.yaml").exists(),
        gpu=gpu.identity,
        gpu_bytes=gpu.num_bytes,
        visible_gpus=gpu.num_visible,
    )
    return asdict(member)


def _complete_manifest(folder: Path, hosts: list[str]) -> None:
    """The manifest, written before the others came, gets all hosts."""
    import json

    fields = json.loads((folder / "manifest.json").read_text())
    write_json(folder / "manifest.json", {**fields, "hosts": hosts})


def _serve(attached: Attached, job: Job, store: Store, members: list[Member], voice: Voice) -> int:
    """Run this rank's worker, watched; a failure is told on the screen by the rank that caused it."""
    hosts = [member.host for member in members]
    local_world = hosts.count(hosts[attached.rank])
    if len(set(hosts)) == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", environment.loopback_interface())
    bound = environment.num_cores() < environment.host_cores()  # mpirun and srun may give each rank cores of its own
    threads = environment.threads_per_rank(os.environ, 1 if bound else local_world)
    place = rank.Place(
        attached.rank, attached.world, attached.local_rank, 0, job.directory, job.worker, threads, attached.rank == 0
    )
    terminal = os.fdopen(os.dup(2), "w", buffering=1)
    output.redirect(job.directory, attached.rank, place.keeps_terminal)
    board = Board.fresh(1)
    _take_signals(board)
    peers = Peers.of(attached.rank, members)
    tell = _teller(attached, job, voice, terminal, peers)
    status = Status(job.directory) if attached.rank == 0 else None
    if attached.rank:
        survivors.watch(
            attached.rank, job.directory, peers, lambda: tell(survivors.blocked(attached.rank, board.read(0)))
        )
    with Watchdog(board, attached.rank, job.config.timeout_s, sys.stderr, tell, status):
        code = rank.serve(place, job.config, job.plan, board, lambda: store)
    if code in (EXIT_OK, EXIT_PREEMPTED) or board.returned(0) == code:
        if status is not None:
            status.step, status.failed_save_step = board.read(0).step, board.failed_save()
            status.ended(code)
        if status is not None and code == EXIT_PREEMPTED:
            print("\n".join(["preempted", *failure.how_to_resume(job.directory, voice.overrides)]), file=terminal)
        return code
    if code == EXIT_INTERRUPTED:
        if status is not None:
            status.ended(code, "interrupted")
    elif (cause := failure.read(job.directory, attached.rank)) is not None:
        code = tell(cause)
    terminal.flush()
    rank.end(code)
    raise AssertionError("unreachable")


def _teller(attached: Attached, job: Job, voice: Voice, terminal: TextIO, peers: Peers) -> Callable[[Failure], int]:
    """What a failing rank does: the cause tells the user; rank 0, or the lowest rank that is left, writes the status,
    after the others have spoken."""

    def tell(own: Failure) -> int:
        if attached.rank and own.order < 2:
            print("\n".join(failure.block(own, job.plan, job.directory, voice.overrides, voice.verbose)), file=terminal)
        if attached.rank:
            failure.write(job.directory, own)
            if not survivors.must_speak(own, job.directory, peers):
                return own.exit_code
        elif own.order:
            time.sleep(2 * GRACE_S if own.exit_code == EXIT_HANG else GRACE_S)
        cause = failure.explained(survivors.cause(own, job.directory, peers), job.directory)
        status = Status(job.directory, cause.step)
        status.ended(cause.exit_code, cause.what, cause.rank)
        lines = failure.block(cause, job.plan, job.directory, voice.overrides, voice.verbose)
        print("\n".join(lines), file=terminal, flush=True)
        return own.exit_code if attached.rank else cause.exit_code

    return tell


def _take_signals(board: Board) -> None:
    """As under our own launcher; Slurm may tell every rank by SIGUSR1, a closed terminal by SIGHUP."""
    heeds_hangup = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN  # nohup
    rank.take_signals(board)
    faulthandler.unregister(signal.SIGUSR1)
    for number in (signal.SIGUSR1, *([signal.SIGHUP] if heeds_hangup else [])):
        signal.signal(number, lambda *_: board.request_stop())
