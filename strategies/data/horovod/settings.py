"""Horovod's resolved settings and its process sets, which the runtime reads. Predictions are in plan.py."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from parallelrun.planner.contract.plan import Plan

from ..common.allreduce.rounds import SumsByMessages

ADASUM = "adasum"
PROCESS_SET = "process_set"  # the name of their groups among the axes


@dataclass(frozen=True)
class HorovodSettings(SumsByMessages):
    """reduction: average | adasum. worker_batches: the number of batches of each worker (dp coordinate); (): enough.

    divides_by_active: sums are divided by the number of workers that have not joined. process_sets: dp coordinates that
    average among themselves, each worker in one set; (): all together. stall_warn_s: 0: never.
    """

    reduction: str = "average"
    timeline: bool = False
    stall_warn_s: float = 60.0
    worker_batches: tuple[int, ...] = ()
    divides_by_active: bool = False
    process_sets: tuple[tuple[int, ...], ...] = ()

    @property
    @abstractmethod
    def sum_name(self) -> str | None:
        """The name of the all-reduce algorithm; None: the backend's own."""

    @abstractmethod
    def update_dtype(self, plan: Plan) -> str:
        """The dtype in which adasum sends updates."""

    @property
    def independent(self) -> bool:
        """Adasum combines updates, so gradients stay each worker's own; process sets train apart."""
        return self.reduction == ADASUM or bool(self.process_sets)

    def meets(self, step: int) -> bool:
        """Adasum gives all workers the same weights in every step; process sets never meet."""
        return not self.process_sets

    @property
    def in_step(self) -> bool:
        """A worker that has joined takes part in gradients only."""
        return not self.independent and not self.worker_batches

    @property
    def shares_statistics(self) -> bool:
        return not self.independent

    def axis(self, worker: int) -> str:
        """The name of the groups over which a worker reduces; process sets of different sizes have different names."""
        if not self.process_sets:
            return "dp"
        sizes = {len(members) for members in self.process_sets if len(members) > 1}
        return PROCESS_SET if len(sizes) < 2 else f"{PROCESS_SET}_{len(self.process_set(worker))}"

    def group_size(self, axis: str) -> int | None:
        """The workers of the process sets of that name."""
        sizes = {self.axis(members[0]): len(members) for members in self.process_sets if len(members) > 1}
        return sizes.get(axis)

    def members(self, axis: str, worker: int) -> tuple[int, ...] | None:
        """The process set of a worker; None for another axis."""
        return self.process_set(worker) if self.process_sets and axis == self.axis(worker) else None

    def has_batch(self, step: int, worker: int) -> bool:
        """Whether a worker has not joined yet."""
        return not self.worker_batches or step <= self.worker_batches[worker]

    def num_counted(self, step: int, num_workers: int) -> int:
        """The number of workers that a mean gradient is divided by."""
        if not self.divides_by_active:
            return num_workers
        return sum(self.has_batch(step, worker) for worker in range(num_workers))

    def process_set(self, worker: int) -> tuple[int, ...]:
        """The workers of the process set of `worker`, itself among them."""
        return next(members for members in self.process_sets if worker in members)

    def rank_groups(self, plan: Plan) -> list[tuple[int, ...]]:
        """The ranks that sum with each other: those of each group of dp, or of each process set in it."""
        everyone = range(plan.mesh.size("dp"))
        sets = self.process_sets or (everyone,)
        return [tuple(ranks[worker] for worker in members) for ranks in plan.mesh.groups("dp") for members in sets]
