"""A run of a parameter server again, in one process, from its apply log alone: the same updates give the same bits.

Every push of the log is computed again from the weights that it had been computed with: of each server the version that
the log says. Servers are replayed as what they are, stores of shards; a version is kept while somebody still needs it.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parallelrun.config.schema import Config
from parallelrun.data.order import Sampler
from parallelrun.errors import Problem, VerificationError
from parallelrun.plan.structure import Plan
from parallelrun.train import schedule
from parallelrun.train.build import Training, build
from parallelrun.train.reader import Reader
from parallelrun.verify.single_device import single_device as single_device

from .buffers import Buffers
from .log import Applied, Dropped, Push
from .protocol import has_barrier
from .store import ShardStore
from .worker import clip, compute

Who = tuple[int, int]  # (worker, clock) of a push


@dataclass(frozen=True)
class Computed:
    """One push, computed again: a flat gradient per server, loss sum, valid targets, norm before clipping."""

    gradients: tuple[Tensor, ...]
    loss_sum: float
    num_valid: int
    norm: float


class Rerun:
    """What the run did, made again row by row: the stores' weights; losses, norms and gradients by version."""

    def __init__(self, config: Config, plan: Plan, device: torch.device, keep_gradients: bool = False):
        self._config, self._plan = config, plan
        self._barrier = has_barrier(plan.data)
        self.training = _one_worker(config, plan, device)
        self._readers = _readers(self.training, config, plan)
        self._buffers = Buffers(plan, self.training.parameters)
        self.stores = [ShardStore(config, plan, server) for server in range(plan.servers)]
        for store in self.stores:
            store.initialise()
        self.losses: list[float] = []
        self.norms: list[float] = []
        self._squares: dict[int, float] = defaultdict(float)
        self._keeps = keep_gradients
        self._kept: dict[int, list[Tensor]] = {}

    def run(self, rows: Iterable[Applied | Dropped]) -> None:
        """Make every update of the log. Raises VerificationError if the log contradicts itself or has a hole."""
        rows = list(rows)
        pulled = _pulled(rows, len(self.stores))
        self._needs = [Counter(versions[server] for versions in pulled.values()) for server in range(len(self.stores))]
        self._uses = Counter((p.worker, p.clock) for row in rows if isinstance(row, Applied) for p in row.pushes)
        self._counted = {  # pushes whose running statistics the run has kept: worker 0's, for which it speaks
            (p.worker, p.clock)
            for row in rows
            if isinstance(row, Applied) and row.server == 0 and row.applied
            for p in row.pushes
            if p.worker == 0
        }
        self._known: list[dict[int, Tensor]] = [{0: store.weights.clone()} for store in self.stores]
        self._computed: dict[Who, Computed] = {}
        waiting = [deque(r for r in rows if isinstance(r, Applied) and r.server == k) for k in range(len(self.stores))]
        while any(waiting):
            ready = [queue for queue in waiting if queue and self._can_make(queue[0], pulled)]
            if not ready:
                raise VerificationError(Problem("the apply log has a hole: an update needs weights that nobody made"))
            for queue in ready:
                self._make(queue.popleft(), pulled)
        if self._barrier:
            self.norms = [self._squares[version] ** 0.5 for version in sorted(self._squares)]

    def weights(self) -> dict[str, Tensor]:
        """The weights now, by name."""
        return self._buffers.named([store.weights for store in self.stores])

    def gradients(self) -> list[dict[str, Tensor]]:
        """Each version's gradient, by name; with several servers of async their updates of one number together."""
        return [self._buffers.named(self._kept[version]) for version in sorted(self._kept)]

    def load_final(self) -> Training:
        """The one worker, with the weights as they are now: to be evaluated."""
        for pull, store in zip(self._buffers.pulls, self.stores):
            pull.copy_(store.weights)
        self._buffers.unpack()
        return self.training

    def _can_make(self, row: Applied, pulled: dict[Who, list[int]]) -> bool:
        """Are all pushes of the row computed, or can they be now?"""
        return all(
            (push.worker, push.clock) in self._computed
            or all(v <= store.version for v, store in zip(pulled[push.worker, push.clock], self.stores))
            for push in row.pushes
        )

    def _make(self, row: Applied, pulled: dict[Who, list[int]]) -> None:
        store = self.stores[row.server]
        if row.version != store.version + 1:
            said = f"update {row.version} of server {row.server} follows {store.version} in the apply log"
            raise VerificationError(Problem(said))
        found = [self._compute(push, pulled) for push in row.pushes]
        if self._barrier:
            counts = [float(one.num_valid) for one in found]
            counts = counts if sum(counts) else [1.0] * len(counts)
        else:
            counts = [1.0]
        store.mean([one.gradients[row.server] for one in found], counts)
        if self._keeps:
            self._kept.setdefault(row.version, []).append(store.gradient.clone())
        self._squares[row.version] += store.squared_norm()
        if row.server == 0:
            self.losses.append(sum(one.loss_sum for one in found) / (sum(one.num_valid for one in found) or 1))
            self.norms.append(found[0].norm)
        if row.applied:
            lr = schedule.learning_rate(self._config.optimizer, row.clock, self._config.steps)
            store.update(lr, row.coefficient)
        store.version = row.version
        if self._needs[row.server][row.version]:
            self._known[row.server][row.version] = store.weights.clone()
        for push in row.pushes:
            self._used((push.worker, push.clock))

    def _compute(self, push: Push, pulled: dict[Who, list[int]]) -> Computed:
        who = push.worker, push.clock
        if who not in self._computed:
            for server, version in enumerate(pulled[who]):
                self._buffers.pulls[server].copy_(self._known[server][version])
                self._needs[server][version] -= 1
                if not self._needs[server][version]:
                    del self._known[server][version]
            self._buffers.unpack()
            loss_sum, num_valid = compute(self.training, self._readers[push.worker].batch(push.clock))
            self.training.statistics.finish_step(who in self._counted)
            self._buffers.pack()
            norm = 0.0 if self._barrier else clip(self._buffers.pushes, self._config.optimizer.clip)
            flats = tuple(flat.clone() for flat in self._buffers.pushes)
            self._computed[who] = Computed(flats, loss_sum, num_valid, norm)
        return self._computed[who]

    def _used(self, who: Who) -> None:
        self._uses[who] -= 1
        if not self._uses[who]:
            del self._computed[who]


def _pulled(rows: Iterable[Applied | Dropped], num_servers: int) -> dict[Who, list[int]]:
    """Per push the version of every server's weights that it was computed with."""
    found: dict[Who, dict[int, int]] = {}
    used: set[Who] = set()
    for row in rows:
        for push in row.pushes if isinstance(row, Applied) else (row,):
            found.setdefault((push.worker, push.clock), {})[row.server] = push.pulled
            if isinstance(row, Applied):
                used.add((push.worker, push.clock))
    for (worker, clock), versions in found.items():
        if (worker, clock) in used and len(versions) < num_servers:
            said = f"the push of worker {worker}, clock {clock}, reached {len(versions)} of {num_servers} servers"
            raise VerificationError(Problem(f"{said}: it was lost on its way, and so cannot be computed again"))
    return {who: [versions[server] for server in sorted(versions)] for who, versions in found.items() if who in used}


def _one_worker(config: Config, plan: Plan, device: torch.device) -> Training:
    """A training of one device that computes as one worker does, in microbatches of the same size."""
    alone, alone_plan = single_device(config, plan)
    alone = replace(alone, recompute=config.recompute)
    return build(alone, replace(alone_plan, batch=plan.batch, recompute=plan.recompute), device)


def _readers(training: Training, config: Config, plan: Plan) -> list[Reader]:
    split = training.dataset.train
    sampler = Sampler(len(split), plan.batch.global_batch, config.seed)
    return [Reader(split, sampler, training.plan, training.mesh, worker) for worker in range(plan.num_workers)]
