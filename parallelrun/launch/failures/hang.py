"""The hang of a run of our own launcher: which ranks have not come, for which operation, and where they are."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from parallelrun.base.errors import EXIT_HANG
from parallelrun.launch.failures import failure, stall
from parallelrun.launch.failures.failure import Failure
from parallelrun.launch.failures.peers import Peers
from parallelrun.launch.host import emulation, os_process, position
from parallelrun.launch.host.heartbeat import HeartbeatFile
from parallelrun.launch.host.job import Job
from parallelrun.launch.host.output import log_path
from parallelrun.launch.host.position import Position

DUMP_S = 0.5  # time for faulthandler to write
POSITIONS_S = 3.0  # at most, for ranks to tell their positions


def find(job: Job, heartbeats: HeartbeatFile, alive: Mapping[int, int]) -> Failure | None:
    """Return the Failure of the rank that blocks the others, if a rank has been silent for `timeout_s`.

    alive: the pids of the ranks that still run, by rank.
    """
    limit = job.config.timeout_s
    silent = [rank for rank in alive if heartbeats.read(rank).age_s > limit]
    if not silent:
        return None
    stopped = {rank for rank, pid in alive.items() if os_process.is_stopped(pid)}
    positions = _positions(job, alive, stopped)
    hosts = {rank: emulation.host_name(job.config, job.plan, rank) for rank in alive}
    stalled = stall.find(positions, job.plan.mesh, job.directory, hosts)
    prefix, suffix = f"hangs: no progress for {limit:g} s", "stacks of all ranks are in the logs"
    if stalled is not None:
        return Failure(stalled.missing[0].rank, f"{prefix}; {stalled.reason}; {suffix}", EXIT_HANG, stall=stalled)
    guilty, why = stall.suspects(positions)
    others = f" (with {', '.join(f'rank {r}' for r in guilty[1:4])})" if len(guilty) > 1 else ""
    why = why or "no rank stands out: compare the stacks in logs/"
    return Failure((guilty or silent)[0], f"{prefix}; {why}{others}; {suffix}", EXIT_HANG)


def explained(cause: Failure, own: Failure, peers: Peers, job: Job) -> Failure:
    """Return the Failure of the rank that has not come to the operation in which the others hang, if their positions
    tell it, else `cause`. For ranks that another launcher has started. own: of this rank."""
    if cause.exit_code != EXIT_HANG or cause.problems:
        return cause
    hosts = {member.rank: member.host for member in peers.members}
    stalled = stall.find(peers.positions(own), job.plan.mesh, job.directory, hosts)
    if stalled is None:
        return cause
    rank = stalled.missing[0].rank
    reason = f"hangs: no progress for {job.config.timeout_s:g} s; {stalled.reason}; the stacks are in the logs"
    if (written := failure.read_failure(job.directory, rank)) is not None:
        return replace(written, what=reason, stall=stalled)
    return replace(own, rank=rank, what=reason, host=hosts[rank], pid=peers.members[rank].pid, stall=stalled)


def _positions(job: Job, alive: Mapping[int, int], stopped: set[int]) -> dict[int, Position]:
    """Let every rank write its threads' stacks to its log and its position to a file. Return the positions, of ranks
    that do not answer from their stacks."""
    logs = {rank: log_path(job.directory, rank) for rank in alive.keys() - stopped}
    sizes = {rank: path.stat().st_size if path.exists() else 0 for rank, path in logs.items()}
    for rank in logs:
        position.path_of(job.directory, rank).unlink(missing_ok=True)
        os_process.kill(alive[rank], position.ASK)
    began = time.monotonic()
    while time.monotonic() < began + POSITIONS_S and any(
        position.read_position(job.directory, rank) is None for rank in logs
    ):
        time.sleep(0.05)
    time.sleep(max(0.0, began + DUMP_S - time.monotonic()))
    positions = {}
    for rank, path in logs.items():
        with open(path, errors="replace") as log:
            log.seek(sizes[rank])
            positions[rank] = position.read_position(job.directory, rank) or position.of_dump(log.read())
    return positions | {rank: Position(position.STOPPED) for rank in stopped}
