"""Runs horovod: broadcasts the initial weights, sums gradients in fused buffers during backward.

With adasum the buffers carry updates instead: each worker's optimizer steps by its own gradient, and then the changes
of the weights are combined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallelrun.base.context import WorkerContext
from parallelrun.base.layout import Layout
from parallelrun.distributed import comm, torch_private
from parallelrun.distributed.comm import Waitable
from parallelrun.distributed.mesh import Group, Mesh
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.pieces.expert_axes import replica_axis
from parallelrun.training.loop.build import Training
from parallelrun.training.loop.data_runtime import DataRuntime, Pair, match
from parallelrun.training.loop.flat_tensors import flatten, unflatten

from ..common.allreduce.runtime import AlgorithmRuntime
from ..common.reducer import Part
from ..common.worker_runtime import WorkerRuntime
from .adasum import all_combine
from .plan import Horovod
from .timeline import Timeline, WatchedExchange


class HorovodRuntime(AlgorithmRuntime):
    """Sums gradients over dp, or averages them within a process set, and may record each exchange."""

    @classmethod
    def attach(cls, parts: Sequence[nn.Module], plan: Plan, mesh: Mesh) -> DataRuntime:
        """Return the runtime, after broadcasting the weights of worker 0."""
        if plan.num_data_ranks == 1:
            return super().attach(parts, plan, mesh)
        pairs, strategy = match(parts, plan, mesh), Horovod.of(plan)
        broadcast([(parameter.layout, weight.detach()) for parameter, weight in pairs], plan, mesh)
        runtime = AdasumRuntime if strategy.combines_updates(plan) else HorovodRuntime
        return runtime(pairs, plan, mesh, make_group(strategy, plan, mesh))

    def __init__(self, pairs: Sequence[Pair], plan: Plan, mesh: Mesh, group: Group):
        self._group = group
        self._exchanges: list[WatchedExchange] = []
        self._timeline: Timeline | None = None
        super().__init__(pairs, plan, mesh)

    def sender(self, buffer: Tensor, parts: Sequence[Part], group: Group) -> Callable[[], Waitable]:
        send = super().sender(buffer, parts, group)
        if not Horovod.of(self._plan).timeline:
            return send
        exchange = WatchedExchange(tuple(parameter.name for parameter, _ in parts), buffer.nbytes, send)
        self._exchanges.append(exchange)
        return exchange.start

    def group_of(self, axis: str) -> Group:
        """The process set, or the group over experts' copies."""
        return self._group if axis == self._plan.data_axis else super().group_of(axis)

    def begin_run(self, training: Training, context: WorkerContext, start: int) -> None:
        """Broadcast the weights and the optimizer's state of worker 0 after a resume, and open the timeline."""
        if start and not self._plan.data.independent:
            state = [
                (p.layout, value)
                for p in training.parameters
                for _, value in sorted(training.optimizer.state(p.name).items())
            ]
            weights = [(p.layout, p.tensor.detach()) for p in training.held]
            broadcast([*weights, *state], self._plan, self._mesh)
        if Horovod.of(self._plan).timeline and context.rank == 0:
            self._timeline = Timeline(context.directory, self._exchanges, self.parameters, self._plan, start)

    def begin_step(self) -> None:
        if self._timeline:
            self._timeline.begin_step()
        super().begin_step()

    def launch_gradients(self) -> None:
        if self._timeline:
            self._timeline.backward_is_over()
        super().launch_gradients()

    def finish_gradients(self) -> None:
        """Make every gradient the sum over dp, or the mean over its process set."""
        super().finish_gradients()
        if self._timeline:
            self._timeline.step_is_summed()
        if self._plan.data.independent:
            for buffers in self.flat_gradients.values():
                torch_private.multiply(list(buffers), 1 / self._group.size)


@torch.no_grad()
def broadcast(tensors: Sequence[tuple[Layout, Tensor]], plan: Plan, mesh: Mesh) -> None:
    """Overwrite each tensor with that of the first of its copies, in one message per axis of copies and dtype."""
    by_kind: dict[tuple[str, torch.dtype], list[Tensor]] = {}
    for layout, tensor in tensors:
        axis = replica_axis(layout, plan)
        if plan.mesh.size(axis) > 1:
            by_kind.setdefault((axis, tensor.dtype), []).append(tensor)
    for (axis, _), own in by_kind.items():
        flat = flatten(own)
        comm.broadcast(flat, mesh.group(axis), "control")
        unflatten(flat, own)


def make_group(strategy: Horovod, plan: Plan, mesh: Mesh) -> Group:
    """Return this rank's process set (Horovod's static process sets), or all of the data axis if there are no sets.

    Every rank creates the groups of all sets, in the same order.
    """
    if not strategy.process_sets:
        return mesh.group(plan.data_axis)
    for ranks in strategy.rank_groups(plan):
        process_group = dist.new_group(list(ranks)) if len(ranks) > 1 else None
        if mesh.rank in ranks:
            axis = strategy.group_axis(plan.worker_axis, mesh.coordinate[plan.worker_axis])
            own = Group(axis, ranks, ranks.index(mesh.rank), process_group)
    return own


class AdasumRuntime(WorkerRuntime):
    """Every worker updates its weights by its own gradient; then the updates are combined, and all are equal."""

    def __init__(self, pairs: Sequence[Pair], plan: Plan, mesh: Mesh, group: Group):
        super().__init__(pairs, plan, mesh)
        self._group = group
        self._weights = [[weight.detach() for _, weight in own] for own in self._buckets]
        self._before = [flatten(bucket) for bucket in self._weights]
        self._dtype = getattr(torch, Horovod.of(plan).update_dtype(plan))
        self._stepping = False

    def begin_step(self) -> None:
        """Keep a copy of the weights before the update."""
        super().begin_step()
        for before, weights in zip(self._before, self._weights):
            before.copy_(flatten(weights))
        self._stepping = True

    def drop_step(self) -> None:
        super().begin_step()
        self._stepping = False

    @torch.no_grad()
    def finish_update(self) -> None:
        """Make the weights those before the step plus the combination of all workers' updates."""
        if not self._stepping:  # a checkpoint was loaded
            return
        self._stepping = False
        for before, weights in zip(self._before, self._weights):
            update = flatten(weights).sub_(before).to(self._dtype)
            all_combine(update, [weight.numel() for weight in weights], self._group)
            unflatten(before.add_(update.to(before.dtype)), weights)


RUNTIME = HorovodRuntime
