"""Running as a rank that torchrun, srun or mpirun has started.

Rank 0 composes and resolves, then calls `lead`: it publishes the config and the run directory in the store. The other
ranks call `follow`: they report how they were started, and rank 0 checks that all ranks agree. Then all ranks run the
same worker. If rank 0 cannot compose, it calls `abandon`, and all ranks exit with its code.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from parallelrun.base.errors import EXIT_HANG, EXIT_INTERRUPTED, EnvironmentProblem, ParallelrunError, Problem
from parallelrun.base.records import write_json
from parallelrun.base.stop_signals import STOP_SIGNALS, raise_pending
from parallelrun.base.wording import print_note
from parallelrun.config.keys import named_code
from parallelrun.launch.failures import failure, guard, hang, reach
from parallelrun.launch.failures.failure import GRACE_S, LOST_PEER, TIMED_OUT, Failure
from parallelrun.launch.failures.outcome import Outcome, conclude
from parallelrun.launch.failures.peers import Peers, is_recorded
from parallelrun.launch.failures.reach import LAUNCHER_LOST, Reach
from parallelrun.launch.failures.watchdog import Watchdog
from parallelrun.launch.host import environment, interfaces, output, preflight
from parallelrun.launch.host.directory import Status
from parallelrun.launch.host.environment import Attached
from parallelrun.launch.host.heartbeat import HeartbeatFile
from parallelrun.launch.host.job import ConsoleOptions, Job, RankSettings
from parallelrun.launch.host.os_process import start_time
from parallelrun.launch.ranks import rank
from parallelrun.launch.store import rendezvous, stores
from parallelrun.launch.store.live import GatheredStatus, LiveFile
from parallelrun.launch.store.rendezvous import Member
from parallelrun.planner.resolve.freeze import digest, load_frozen
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.report.records import attempts

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


def abandon(attached: Attached, exit_code: int) -> None:
    """As rank 0, which could not create a run: let the other ranks exit with its code at once. Never raises."""
    if attached.rank or attached.world == 1:
        return
    try:
        store = stores.connect(attached, 30.0)
        rendezvous.put(store, "run", {"failed": exit_code})
        deadline = time.monotonic() + rendezvous.JOIN_S  # this process serves the store until all have read it
        while store.add("exit codes read", 0) < attached.world - 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        stores.forget(attached)
    except (ParallelrunError, RuntimeError, OSError):
        return  # the launcher will end the other ranks


def lead(attached: Attached, job: Job, argv: Sequence[str]) -> int:
    """As rank 0: publish the run, check that all ranks have joined and agree, run the worker. Return the exit code.

    argv: this process's command line, which must be that of the other ranks, too. Missing or disagreeing ranks are
    reported here and to the other ranks; nothing is raised.
    """
    with guard.status_of(job.directory, guard.RANKS_GONE):
        return _lead(attached, job, argv)


def _lead(attached: Attached, job: Job, argv: Sequence[str]) -> int:
    store = stores.connect(attached)
    status = Status(job.directory)
    status.running()
    run: dict[str, Any] = {
        "config": job.config_file.read_text(),
        "directory": str(job.directory),
        "worker": job.worker,
        "attempt": job.attempt,
        "code": named_code(job.config),
        "num_gpus": job.plan.num_workers if job.plan.device == "cuda" else 0,  # the first ranks use one each
        "options": asdict(job.options),  # any rank may print how to resume
    }
    rendezvous.put(store, "run", run)
    rendezvous.put(store, "joined/0", _member(attached, run, argv))
    try:
        members = rendezvous.gather(store, attached.world, rendezvous.JOIN_S)
        if problems := rendezvous.differences(members, job.plan):
            raise EnvironmentProblem(*problems)
        if job.plan.device == "cuda":
            smallest = min(member.gpu_bytes for member in members[: job.plan.num_workers])
            for note in preflight.check_memory(job.config, job.plan, smallest, per_rank=True):
                print_note(f"note: {note}")
    except EnvironmentProblem as error:
        rendezvous.put(store, "go", {"failed": error.exit_code})
        status.ended(error.exit_code, str(error))
        print("\n".join(line for p in error.problems for line in p.lines()), file=sys.stderr, flush=True)
        time.sleep(GRACE_S)  # this process serves the store
        return error.exit_code
    finally:
        stores.forget(attached)
    path = job.directory / "manifest.json"  # written before the other ranks joined, so it lacks their hosts
    write_json(path, {**json.loads(path.read_text()), "hosts": sorted({member.host for member in members})})
    members = [replace(member, words={}, code={}) for member in members]  # already compared
    rendezvous.put(store, "go", {"members": [asdict(member) for member in members]})
    return _serve(attached, job, store, members)


def follow(argv: Sequence[str]) -> int:
    """As any other rank: wait for rank 0's run, join, run the worker. Return the exit code.

    argv must have the same meaning as rank 0's. Raises EnvironmentProblem if rank 0 does not publish a run.
    """
    attached = environment.detect(os.environ)
    assert attached is not None and attached.rank > 0, "follow() is for ranks that another launcher has started"
    store = stores.connect(attached)
    run = rendezvous.get(store, "run", stores.CONNECT_S)
    if run is None:
        message = f"rank {attached.rank} has waited {stores.CONNECT_S:g} s for rank 0 to compose"
        raise EnvironmentProblem(Problem(message, "rank 0"), exit_code=EXIT_HANG)
    if "failed" in run:
        store.add("exit codes read", 1)
        return int(run["failed"])
    directory = Path(run["directory"])
    rendezvous.put(store, f"joined/{attached.rank}", _member(attached, run, argv))
    go = rendezvous.get(store, "go", rendezvous.JOIN_S + 30)
    if go is None or "failed" in go:
        if go is None and not is_recorded(directory):
            Status(directory).ended(EXIT_HANG, "rank 0 exited before the run began", 0)
        return int(go["failed"]) if go else EXIT_HANG
    config = load_frozen(run["config"])
    options = ConsoleOptions(**run["options"])
    job = Job(config, resolve(config), directory, run["worker"], options, run["attempt"])
    return _serve(attached, job, store, [Member(**fields) for fields in go["members"]])


def _member(attached: Attached, run: dict[str, Any], argv: Sequence[str]) -> dict[str, Any]:
    """Return this rank's report, made before it loads the config: with other code it may be unable to load it."""
    gpu = preflight.gpu_of_rank(attached.local_rank) if attached.rank < run["num_gpus"] else preflight.Gpu()
    member = Member(
        rank=attached.rank,
        host=os.uname().nodename,
        pid=os.getpid(),
        born=start_time(os.getpid()),
        words=rendezvous.command_line(argv),
        code=rendezvous.code(run["code"]),
        code_version=rendezvous.code_version(),
        config=digest(run["config"]),
        directory_seen=(Path(run["directory"]) / "config.yaml").exists(),
        gpu=gpu.identity,
        gpu_bytes=gpu.num_bytes,
        visible_gpus=gpu.num_visible,
        addresses=interfaces.addresses(),
    )
    return asdict(member)


def _serve(attached: Attached, job: Job, store: Store, members: list[Member]) -> int:
    """Run this rank's worker under a watchdog. The rank that causes a failure reports it on the terminal."""
    hosts = [member.host for member in members]
    if len(set(hosts)) == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", environment.LOOPBACK)
    else:
        os.environ.update(interfaces.socket_variables(os.environ, attached.master_addr))
    # mpirun and srun may bind each rank to cores of its own
    sharing = 1 if environment.num_cores() < environment.host_cores() else hosts.count(hosts[attached.rank])
    threads = environment.threads_per_rank(os.environ, sharing)
    terminal = os.fdopen(os.dup(2), "w", buffering=1)
    output.redirect(job.directory, attached.rank)
    heartbeats = HeartbeatFile(1, first_rank=attached.rank)
    faulthandler.unregister(signal.SIGUSR1)  # Slurm may send it to every rank; a closed terminal sends SIGHUP
    rank.take_signals(heartbeats, [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN])
    raise_pending()
    peers = Peers.of(attached.rank, job.directory, members)
    lost_host = Reach(attached.rank, members).lost_host
    loss = partial(reach.find_loss, lost_host, reach.launcher(attached, os.environ), heartbeats, attached.rank)
    report = _reporter(attached, job, terminal, peers, loss, heartbeats)
    status: GatheredStatus | LiveFile = LiveFile(job.directory, attached.rank, attached.world)
    if attached.rank == 0:
        status = GatheredStatus(job.directory, members=members)
        status.begin()
    if attached.rank:
        peers.watch_leader(heartbeats, report)
    settings = RankSettings(attached.rank, attached.local_rank, threads=threads)
    on_loss = partial(_conclude_loss, attached, job, terminal, peers, report)
    with (
        guard.of_stopped_ranks(peers),
        Watchdog(heartbeats, attached.rank, job.config.timeout_s, sys.stderr, report, status, loss, on_loss),
    ):
        code = rank.serve(job, settings, heartbeats, lambda: store)
    for number in STOP_SIGNALS:  # `srun --kill-on-bad-exit` sends SIGTERM as soon as the first rank exits with 75
        signal.signal(number, signal.SIG_IGN)
    cause = failure.recorded(job.directory, heartbeats, attached.rank, os.getpid())
    if cause is not None:
        code = report(cause)
    elif attached.rank == 0:
        note = "interrupted" if code == EXIT_INTERRUPTED else ""
        step, failed_save_step = heartbeats.read(0).step, heartbeats.failed_save()
        conclude(Outcome(code, None, note, step, failed_save_step), job, terminal)
    status.remove()  # last: until then, rank 0's guard sees that this rank may still report
    if heartbeats.returned(attached.rank) == code:
        return code
    terminal.flush()
    rank.end(code)


def _conclude_loss(
    attached: Attached, job: Job, terminal: TextIO, peers: Peers, report: Callable[[Failure], int], cause: Failure
) -> None:
    """Write the final status as the lowest rank that is told why the run has failed; those of the lost host go last."""
    if cause.what == LAUNCHER_LOST:
        report(cause)
        return
    if cause.host == os.uname().nodename:
        peers.wait_recorded()
    if not is_recorded(job.directory) and peers.is_first_to_report():
        conclude(Outcome(cause.exit_code, cause), job, terminal)
    if attached.source == "mpirun":  # it notices a cut only by connections over which nothing is sent, such as an exit
        time.sleep(reach.MPIRUN_S)


def _reporter(
    attached: Attached,
    job: Job,
    terminal: TextIO,
    peers: Peers,
    loss: Callable[[], Failure | None],
    heartbeats: HeartbeatFile,
) -> Callable[[Failure], int]:
    """Return the function that a failing rank calls with its own failure; it returns the exit code.

    The rank that is the cause tells the user. Rank 0, or the lowest remaining rank, waits for the failures of the
    others and then writes the status. loss: see `reach.find_loss`.
    """

    def report(own: Failure) -> int:
        history = attempts.read(job.directory)
        if history and history[-1].number > job.attempt:  # this host was cut off, and the run goes on without it
            return own.exit_code
        return tell(replace(own, lost=peers.lost()))

    def must_end() -> bool:
        return attached.source == "mpirun" and heartbeats.stop_requested()

    def tell(own: Failure) -> int:
        if attached.rank:
            if own.order < TIMED_OUT and own.exit_code != EXIT_HANG:  # whoever records a hang knows more
                print("\n".join(failure.message(own, job.plan, job.directory, job.options)), file=terminal, flush=True)
            with contextlib.suppress(OSError):  # a full disk
                failure.write_failure(job.directory, own)
        if own.order == LOST_PEER and job.plan.device == "cpu":
            reach.hang_up()  # else a rank that waits for this one notices nothing until it exits, and so on
        if attached.rank:
            if not peers.must_report(own, must_end):
                return own.exit_code
        elif own.order:
            time.sleep(2 * GRACE_S if own.exit_code == EXIT_HANG else GRACE_S)
        if is_recorded(job.directory):
            return own.exit_code
        cause = hang.explained(failure.explained(peers.cause(own), job.directory), own, peers, job)
        if own.order and failure.read_failure(job.directory, cause.rank) is None:  # it has no words of its own
            cause = loss() or cause
        if is_recorded(job.directory):  # meanwhile, by a rank that was told
            return own.exit_code
        conclude(Outcome(cause.exit_code, cause), job, terminal)
        return own.exit_code if attached.rank else cause.exit_code

    return report
