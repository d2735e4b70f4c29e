"""The proof of a parameter server: `verify` against one device if the workers are in step, else against a replay.

The replay recomputes every push from the weights that the worker had used (of each server, the version that the log
names) and applies the updates in the logged order to the same `ShardStore`s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallelrun.base.context import WorkerContext
from parallelrun.base.errors import Problem, VerificationError
from parallelrun.config.schema.run_schema import Config
from parallelrun.data.order import make_sampler
from parallelrun.planner.contract.plan import Plan
from parallelrun.training.loop.build import Training, build
from parallelrun.training.loop.reader import Reader
from parallelrun.training.loop.schedules import learning_rate
from parallelrun.training.loop.step import measure
from parallelrun.training.verify.checked import checked_config, checked_plan, single_device
from parallelrun.training.verify.replay import weights_of
from parallelrun.training.verify.run import conclude, judge, reference_trace
from parallelrun.training.verify.trace import Trace, gather_weights

from .apply_log import AppliedUpdate, LogRow, Push, read_log
from .client import ShardBuffers, by_name
from .plan import ParameterServer, sharding, worker_batch
from .store import ShardStore
from .worker import Worker, clip, compute, evaluate_locally

PushKey = tuple[int, int]  # (worker, clock)


def checked(config: Config, plan: Plan) -> tuple[Config, Plan]:
    """Return what is run in order to verify: verify's precision, optimizer and number of steps."""
    config = checked_config(config)
    return replace(config, steps=config.verify.steps), checked_plan(config, plan)


def verify(config: Config, plan: Plan, context: WorkerContext) -> int:
    """Train as a rank of a worker; rank 0 compares, writes and shows verify.json. Return EXIT_MISMATCH if unequal."""
    training = build(config, plan, context.device)
    in_step = ParameterServer.of(plan).in_step
    trace = _record(training, context, in_step)
    document: dict[str, Any] = {}
    if context.rank == 0:
        context.heartbeat(config.steps, "reference")
        if in_step:
            document = judge(trace, reference_trace(config, plan, context.device), config, plan)
        else:
            document = judge(trace, _replay(config, plan, context), config, plan)
            document["against"] = "its own apply log, replayed in one process"
            document["bit_for_bit"] = all(error == 0 for error in document["max_error"].values())
            # Elsewhere kernels may add in another order, as the ranks of a worker do.
            if plan.device == "cpu" and not config.compile and not plan.worker_ranks:
                document["passed"] = document["passed"] and (document["bit_for_bit"] or document["reports_only"])
    return conclude(document, training, context)


def _record(training: Training, context: WorkerContext, in_step: bool) -> Trace:
    """Train `config.steps` steps. Rank 0's trace is complete: one entry per step, or per update if not in step."""
    worker, trace = Worker(training, context), Trace()
    if not in_step:  # later, other workers may have pushed already
        trace.initial = gather_weights(training, trace)
    clock = worker.begin()
    if in_step:
        trace.initial = gather_weights(training, trace)
    while clock < training.config.steps:
        context.heartbeat(clock + 1, "step")
        clock, _ = worker.step(clock + 1, False)
    worker.end(clock)
    trace.final = gather_weights(training, trace)
    if not in_step:  # running statistics are each worker's own
        frozen = {p.name for p in training.plan.spec.parameters.values() if p.frozen}
        trace.disagreeing = [name for name in trace.disagreeing if name not in frozen]
    if context.rank == 0:
        rows = [r for r in read_log(context.directory) if isinstance(r, AppliedUpdate) and r.server == 0]
        trace.losses, trace.grad_norms = [row.loss for row in rows], [row.norm for row in rows]
        trace.gradients = [_with_frozen(worker.client.read_gradient(row.version), training) for row in rows]
    if in_step:
        trace.val_loss = measure(training).loss
    elif worker.is_chief:
        trace.val_loss = worker.evaluate().loss
    worker.client.leave()
    return trace


def _replay(config: Config, plan: Plan, context: WorkerContext) -> Trace:
    """Return the trace of a replay of this run's apply log."""
    replay = LogReplay(config, plan, context.device)
    trace = Trace(initial=weights_of(replay.training))
    replay.run(read_log(context.directory))
    training = replay.load_final()
    trace.losses, trace.grad_norms = replay.losses, replay.norms
    trace.gradients = [_with_frozen(gradients, training) for gradients in replay.gradients()]
    trace.final = weights_of(training)
    trace.val_loss = evaluate_locally(training, lambda n: context.heartbeat(n, "evaluate")).loss
    return trace


def _with_frozen(gradients: dict[str, Tensor], training: Training) -> dict[str, Tensor]:
    """Add zeros for the frozen parameters, as in every other trace."""
    spec, dtype = training.plan.spec, getattr(torch, training.plan.precision.stored)
    return {
        name: gradients[name] if name in gradients else torch.zeros(p.shape, dtype=dtype)
        for name, p in spec.parameters.items()
    }


class RecomputedPush(NamedTuple):
    """One flat gradient per server, loss sum, number of valid targets, and norm before clipping."""

    gradients: list[Tensor]
    loss_sum: float
    num_valid: float
    norm: float


class LogReplay:
    """Replays an apply log row by row. Results: the stores' weights; losses, norms and gradients by version.

    Keeps every version of the weights and every gradient: for the few steps of `verify`.
    """

    def __init__(self, config: Config, plan: Plan, device: torch.device):
        self._config, self._synchronous = config, ParameterServer.of(plan).synchronous
        self.training = _one_worker(config, plan, device)
        split = self.training.dataset.train
        sampler = make_sampler(len(split), plan.batch.global_batch, config.seed, split.shares)
        own_plan, mesh = self.training.plan, self.training.mesh
        self._readers = [Reader(split, sampler, own_plan, mesh, worker) for worker in range(plan.num_replicas)]
        self._of_server = sharding(plan).of_server
        self._buffers = ShardBuffers(self._of_server, self.training)
        self.stores = [ShardStore(config, plan, server) for server in range(plan.servers)]
        for store in self.stores:
            store.initialise()
        self._versions = [[store.weights.clone()] for store in self.stores]  # every version of every server's weights
        self._recomputed: dict[PushKey, RecomputedPush] = {}
        self.losses: list[float] = []
        self.norms: list[float] = []
        self._squares: dict[int, float] = defaultdict(float)  # by version
        self._gradients: dict[int, dict[int, Tensor]] = defaultdict(dict)  # by version and server

    def run(self, rows: Sequence[LogRow]) -> None:
        """Apply every update in the order of the log: the weights that a push used were logged before its update.

        Raises VerificationError if rows are missing or contradict each other.
        """
        updates = [row for row in rows if isinstance(row, AppliedUpdate)]
        self._pulled = _pulled_versions(rows, len(self.stores))
        # A run saves the running statistics of worker 0 only.
        first = [row for row in updates if row.server == 0 and row.applied]
        self._with_statistics = {(p.worker, p.clock) for row in first for p in row.pushes if p.worker == 0}
        for row in updates:
            self._apply(row)
        if self._synchronous:
            self.norms = [self._squares[version] ** 0.5 for version in sorted(self._squares)]

    def gradients(self) -> list[dict[str, Tensor]]:
        """Return each version's gradient by name; of several async servers, their updates of equal number together."""
        versions = [by_server for _, by_server in sorted(self._gradients.items())]
        return [by_name(self._of_server, [flat for _, flat in sorted(version.items())]) for version in versions]

    def load_final(self) -> Training:
        """Return the training with the current weights, to be evaluated."""
        self._load([store.weights for store in self.stores])
        return self.training

    def _load(self, flats: Sequence[Tensor]) -> None:
        for pull, flat in zip(self._buffers.pulls, flats):
            pull.copy_(flat)
        self._buffers.unpack()

    def _apply(self, row: AppliedUpdate) -> None:
        store = self.stores[row.server]
        if row.version != store.version + 1:
            message = f"update {row.version} of server {row.server} follows update {store.version} in the apply log"
            raise VerificationError(Problem(message))
        pushes = [self._recompute(push) for push in row.pushes]
        num_valid = sum(push.num_valid for push in pushes)
        counts = [float(push.num_valid) if self._synchronous and num_valid else 1.0 for push in pushes]
        store.mean([[(store.gradient, push.gradients[row.server])] for push in pushes], counts)
        self._gradients[row.version][row.server] = store.gradient.clone()
        self._squares[row.version] += store.squared_norm()
        if row.server == 0:
            self.losses.append(sum(push.loss_sum for push in pushes) / (num_valid or 1))
            self.norms.append(pushes[0].norm)
        if row.applied:
            store.update(learning_rate(self._config.optimizer, row.clock, self._config.steps), row.coefficient)
        store.version = row.version
        self._versions[row.server].append(store.weights.clone())

    def _recompute(self, push: Push) -> RecomputedPush:
        key = push.worker, push.clock
        if key not in self._recomputed:
            if any(pulled > store.version for pulled, store in zip(self._pulled[key], self.stores)):
                raise VerificationError(Problem("the apply log lacks rows: an update needs weights that no row makes"))
            self._load([versions[pulled] for versions, pulled in zip(self._versions, self._pulled[key])])
            loss_sum, num_valid = compute(self.training, self._readers[push.worker].batch(push.clock))
            self.training.statistics.finish_step(key in self._with_statistics)
            self._buffers.pack()
            norm = 0.0 if self._synchronous else clip(self._buffers.pushes, self.training)
            gradients = [flat.clone() for flat in self._buffers.pushes]
            self._recomputed[key] = RecomputedPush(gradients, loss_sum, num_valid, norm)
        return self._recomputed[key]


def _pulled_versions(rows: Sequence[LogRow], num_servers: int) -> dict[PushKey, list[int]]:
    """For each applied push, the version of every server's weights that it used."""
    versions: dict[PushKey, dict[int, int]] = defaultdict(dict)
    applied: set[PushKey] = set()
    for row in rows:
        for push in row.pushes if isinstance(row, AppliedUpdate) else (row,):
            versions[push.worker, push.clock][row.server] = push.pulled
            if isinstance(row, AppliedUpdate):
                applied.add((push.worker, push.clock))
    for worker, clock in sorted(applied):
        if (reached := len(versions[worker, clock])) < num_servers:
            said = f"the push of worker {worker}, clock {clock}, reached only {reached} of {num_servers} servers"
            raise VerificationError(Problem(f"{said}, so it cannot be recomputed"))
    return {key: [versions[key][server] for server in range(num_servers)] for key in applied}


def _one_worker(config: Config, plan: Plan, device: torch.device) -> Training:
    """A training on one device that computes like one worker, in microbatches of the same size."""
    own_config, own_plan = single_device(config, plan)
    batch = replace(plan.batch, microbatches=worker_batch(plan) // plan.batch.micro_batch)
    own_plan = replace(own_plan, batch=batch, recompute=plan.recompute)
    return build(replace(own_config, recompute=config.recompute), own_plan, device)
