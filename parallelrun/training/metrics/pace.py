"""Tells the launcher how this rank fares, and names a rank that computes more slowly than its like.

Ranks of one pipeline stage do the same work, so that in a synchronous step their computing times agree. Waiting for
other ranks is no part of these times: it is long on every rank but the slow one. A rank is slow if each of 20 steps in
a row took it more than 20 % longer than its like. Ranks that share cores take turns to wait for one, and are not named.
"""

from __future__ import annotations

import os
import socket
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from parallelrun.base.context import Pace, WorkerContext
from parallelrun.base.records import append_jsonl
from parallelrun.distributed import comm
from parallelrun.planner.contract.plan import WORLD
from parallelrun.report.records.find import EVENTS
from parallelrun.training.loop.build import Training
from parallelrun.training.metrics.timing import StepClock

WINDOW = 20  # timed steps, over which a slow rank is slow in each
LONGER = 1.2
LEAST_S = 2e-3  # of difference in a step: below, the host's clock and scheduler decide
_PAGE = os.sysconf("SC_PAGE_SIZE")


class PaceWatch:
    """The pace of one rank. `step` is called on all ranks after each step."""

    def __init__(self, training: Training, context: WorkerContext):
        self._training, self._context = training, context
        self._tokens = training.plan.batch.global_batch * training.tokens_per_sample
        self._times: list[float] = []
        self._slow: dict[int, float] = {}

    def step(self, step: int, clock: StepClock) -> None:
        """Report a step that has ended. Every WINDOW timed steps, compare the ranks: collective."""
        times = clock.times
        mine = self._slow.get(self._training.mesh.rank, 0.0)
        if times.compute_s is not None:
            waiting = (times.comm_exposed_s or 0.0) + (times.bubble_s or 0.0) + times.data_s
            self._times.append(times.compute_s)
            rate = self._tokens / clock.seconds if clock.seconds else 0.0
            pace = Pace(clock.seconds, times.compute_s, waiting, _memory(self._training.mesh.device), rate, mine)
            self._context.report_pace(pace)
        if len(self._times) == WINDOW:
            self._compare(step)
            self._times = []

    def _compare(self, step: int) -> None:
        mesh = self._training.mesh
        group = mesh.group(WORLD)
        if group.size == 1:
            return
        mine = torch.tensor(self._times, dtype=torch.float64, device=mesh.device)
        rows = comm.all_gather(mine, group, "control").view(group.size, -1).tolist()
        by_rank = dict(enumerate(rows))
        slow = slow_ranks(by_rank, _alike(self._training))
        if slow.keys() != self._slow.keys():
            hosts = comm.gather_json(socket.gethostname(), mesh)
            for rank in slow.keys() - self._slow.keys():
                self._report(step, rank, slow[rank], statistics.median(by_rank[rank]), hosts[rank])
            for rank in self._slow.keys() - slow.keys():
                self._say(f"rank {rank} ({hosts[rank]}) computes as fast as its like again, at step {step}")
        self._slow = slow

    def _report(self, step: int, rank: int, ratio: float, own_s: float, host: str) -> None:
        plan = self._training.plan
        coordinate = " ".join(f"{axis}={index}" for axis, index in plan.mesh.coordinate(rank).items())
        message = (
            f"rank {rank} ({coordinate}, {host}) is slow: in each of the last {WINDOW} steps it computed more than "
            f"{LONGER - 1:.0%} longer than its like, {ratio:.2f} times as long in the middle ({own_s * 1e3:.0f} ms)"
        )
        self._say(f"warning: step {step}: {message}")
        if self._context.rank == 0:
            row = {"event": "slow_rank", "step": step, "rank": rank, "host": host, "times": ratio, "what": message}
            with suppress(OSError):  # a full disk must not end a run because of this
                append_jsonl(self._context.directory / EVENTS, row)

    def _say(self, text: str) -> None:
        if self._context.console_owner:
            print(text, flush=True)


def slow_ranks(times: Mapping[int, Sequence[float]], alike: Sequence[Sequence[int]]) -> dict[int, float]:
    """Return the slow ranks, and how many times as long as the median of its like each has computed.

    times: seconds of computing in the same steps, by rank; alike: groups of ranks that do the same work.
    """
    slow = {}
    for ranks in alike:
        for rank in ranks:
            others = [times[other] for other in ranks if other != rank]
            if not others:
                continue
            usual = [statistics.median(step) for step in zip(*others)]
            pairs = list(zip(times[rank], usual))
            if all(own > LONGER * its_like and own - its_like > LEAST_S for own, its_like in pairs):
                slow[rank] = statistics.median(own / its_like for own, its_like in pairs)
    return slow


def _alike(training: Training) -> list[tuple[int, ...]]:
    """The ranks of each pipeline stage."""
    shape = training.plan.mesh
    return list(shape.groups(*(dim for dim in shape.mesh_dim_names if dim not in shape.mesh_dims_of("pp"))))


def _memory(device: torch.device) -> int:
    """Return the bytes that this process holds now: on the GPU, else resident."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    except OSError:  # macOS
        return 0
