"""What a plan says of a parameter server beyond any data strategy. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from parallelrun.plan.structure import DataWay
from parallelrun.wording import counted

SYNC, ASYNC, SSP = "sync", "async", "ssp"
CONSISTENCIES = (SYNC, ASYNC, SSP)


@dataclass(frozen=True)
class ParameterServerWay(DataWay):
    """Workers pull weights and push gradients; servers own the weights and the optimizer's state (Li et al. 2014).

    consistency: sync (one update from all workers' gradients), async (one update per push), ssp (async, and nobody is
    more than `staleness` clocks ahead of the slowest, Ho et al. 2013). staleness: of ssp, else None. backup_workers:
    of sync, how many gradients a step does not wait for (Chen et al. 2016). delays: (worker, seconds) added to each of
    its steps, to see what a slow worker does. shard_min_bytes: a tensor is cut into parts of at least so many bytes.
    """

    servers: int = 1
    consistency: str = SYNC
    staleness: int | None = None
    backup_workers: int = 0
    delays: tuple[tuple[int, float], ...] = ()
    shard_min_bytes: int = 256 * 2**10

    @property
    def detail(self) -> str:
        bound = f", staleness {self.staleness}" if self.consistency == SSP else ""
        spare = f", {counted(self.backup_workers, 'backup worker')}" if self.backup_workers else ""
        return f"{self.consistency}{bound}{spare}, {counted(self.servers, 'server')}"

    @property
    def in_step(self) -> bool:
        return self.quorum(2) == 2

    def spare_workers(self, num_workers: int) -> int:
        return num_workers - self.quorum(num_workers)

    def delay(self, worker: int) -> float:
        """Seconds that `worker` waits in each of its steps."""
        return dict(self.delays).get(worker, 0.0)

    def quorum(self, num_workers: int) -> int:
        """Gradients that one update is made of, of that many live workers. With staleness 0 ssp is sync."""
        together = self.consistency == SYNC or self.staleness == 0
        return max(1, num_workers - self.backup_workers) if together else 1
