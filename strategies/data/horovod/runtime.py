"""horovod at run time: initial weights broadcast, gradients summed in fused buffers under backward, and watched.

With adasum the buffers carry updates instead: each worker's optimizer steps by its own gradient, then what the weights
have changed by is combined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallelrun import comm, torch_private
from parallelrun.comm import Waitable
from parallelrun.context import WorkerContext
from parallelrun.layout import Layout
from parallelrun.mesh import Group, Mesh
from parallelrun.optimizer import Optimizer
from parallelrun.plan.expert_axes import replica_axis
from parallelrun.plan.parameters import LocalParameter
from parallelrun.plan.structure import Plan
from parallelrun.train.build import Training
from parallelrun.train.data_runtime import DataRuntime, Pair, match, trained

from ..common.allreduce.runtime import all_reduce
from ..common.reducer import BucketedRuntime, Part
from .adasum import all_combine
from .checks import ADASUM
from .plan import Horovod
from .stalls import StallWatch
from .submissions import Submissions
from .timeline import Timeline

T = TypeVar("T")


class HorovodRuntime(BucketedRuntime):
    """Gradients are summed, or within a process set averaged, and every exchange is noted for those who watch."""

    @classmethod
    def attach(cls, parts: Sequence[nn.Module], plan: Plan, mesh: Mesh) -> DataRuntime:
        """Return the runtime; the weights are those of worker 0 afterwards."""
        if plan.mesh.size("dp") == 1:
            return super().attach(parts, plan, mesh)
        pairs, strategy = match(parts, plan, mesh), Horovod.of(plan)
        for axis, own in _by_copies([(held.layout, weight) for held, weight in pairs], plan):
            broadcast_weights([weight.detach() for weight in own], mesh.group(axis))
        group = make_group(strategy, plan, mesh)
        runtime = AdasumRuntime if strategy.reduction == ADASUM else HorovodRuntime
        return runtime(pairs, plan, mesh, group)

    def __init__(self, pairs: Sequence[Pair], plan: Plan, mesh: Mesh, group: Group):
        self._submissions, self._group = Submissions(), group
        super().__init__(pairs, plan, mesh)
        self._watch: StallWatch | None = None
        self._timeline: Timeline | None = None

    def group_of(self, axis: str) -> Group:
        """The process set, or the group over experts' copies."""
        return self._group if axis == "dp" else super().group_of(axis)

    def begin_run(self, training: Training, context: WorkerContext, start: int) -> None:
        """Make optimizer states those of worker 0 (after a resume), and start to watch."""
        strategy = Horovod.of(self._plan)
        if start and not strategy.independent:
            for axis, held in _by_copies([(p.layout, p) for p in training.held], self._plan):
                broadcast_weights([p.tensor.detach() for p in held], self._mesh.group(axis))
                updated = [p for p in held if not p.spec.frozen]
                broadcast_optimizer(training.optimizer, updated, self._mesh.group(axis))
        self._submissions.step = start
        if strategy.timeline and context.rank == 0:
            buckets = [(names, bucket.buffer) for names, bucket in zip(self._submissions.names, self._buckets)]
            self._timeline = Timeline(context.directory / "timeline.json", buckets, strategy, self._mesh.device)
            self._timeline.watch(dict(self._named_weights()), self._plan)
            self._submissions.timeline = self._timeline
        if strategy.stall_warn_s:
            self._watch = StallWatch(self._submissions, self._buckets, self._plan, context, strategy.stall_warn_s)
            self._watch.start()

    def end_run(self) -> None:
        """Stop watching; close the timeline."""
        if self._watch:
            self._watch.stop()
        if self._timeline:
            self._timeline.close()

    def begin_step(self) -> None:
        """Gradients are empty and backward passes are counted."""
        self._submissions.begin_step()
        super().begin_step()

    def launch_gradients(self) -> None:
        """Send what backward has not."""
        self._submissions.backward_over()
        super().launch_gradients()

    def finish_gradients(self) -> None:
        """Every weight's gradient is the sum over dp, or the mean over its process set."""
        super().finish_gradients()
        if self._plan.data.independent:
            for buffers in self.flat_gradients.values():
                torch_private.multiply(list(buffers), 1 / self._group.size)

    def _named_weights(self) -> list[tuple[str, nn.Parameter]]:
        slots = [slot for bucket in self._buckets for slot in bucket.slots]
        names = [name for bucket in self._submissions.names for name in bucket]
        return list(zip(names, [slot.weight for slot in slots], strict=True))

    def start_sum(self, tensor: Tensor, group: Group) -> Waitable:
        rounds = Horovod.of(self._plan).rounds(group.axis, group.size, group.index, tensor.numel(), self._plan)
        return all_reduce(tensor, group, "gradients", rounds, async_op=True) or Done()

    def sender(self, buffer: Tensor, parts: Sequence[Part], group: Group) -> Callable[[], Waitable]:
        number = self._submissions.add(tuple(held.name for held, _ in parts))
        send = super().sender(buffer, parts, group)
        return lambda: self._submissions.submit(number, send)


@torch.no_grad()
def broadcast_weights(weights: Sequence[Tensor], group: Group) -> None:
    """Overwrite `weights` with those of the group's first member, one message per dtype."""
    for dtype in dict.fromkeys(weight.dtype for weight in weights):
        alike = [weight for weight in weights if weight.dtype == dtype]
        flat = torch.cat([weight.flatten() for weight in alike])
        comm.broadcast(flat, group, "control")
        for weight, part in zip(alike, flat.split([weight.numel() for weight in alike])):
            weight.copy_(part.view_as(weight))


def broadcast_optimizer(optimizer: Optimizer, parameters: Sequence[LocalParameter], group: Group) -> None:
    """Overwrite the optimizer's state, which all members have or none, with that of the group's first member."""
    tensors = [value for p in parameters for _, value in sorted(optimizer.state(p.name).items())]
    if tensors:
        broadcast_weights(tensors, group)


def make_group(strategy: Horovod, plan: Plan, mesh: Mesh) -> Group:
    """This rank's process set along dp (Horovod's static process sets); all of dp where there are none.

    Every rank creates the groups of all sets in the same order: by the other axes' coordinates, then by the set.
    """
    everyone = mesh.group("dp")
    if not strategy.process_sets:
        return everyone
    mine: Group | None = None
    others = [(mesh_dim, degree) for mesh_dim, degree in plan.mesh.mesh_dims if mesh_dim != "dp"]
    for place in product(*(range(degree) for _, degree in others)):
        coordinate = dict(zip([mesh_dim for mesh_dim, _ in others], place))
        for members in strategy.process_sets:
            ranks = tuple(plan.mesh.rank(**coordinate, dp=worker) for worker in members)
            made = dist.new_group(list(ranks)) if len(ranks) > 1 else None
            if mesh.rank in ranks:
                mine = Group(strategy.axis(members[0]), ranks, ranks.index(mesh.rank), made)
    assert mine is not None, "every worker belongs to a set"
    return mine


def _by_copies(items: Sequence[tuple[Layout, T]], plan: Plan) -> list[tuple[str, list[T]]]:
    """What has copies, by the axis over which they lie, in the same order on every rank."""
    found: dict[str, list[T]] = {}
    for layout, item in items:
        found.setdefault(replica_axis(layout, plan), []).append(item)
    return [(axis, own) for axis, own in sorted(found.items()) if plan.mesh.size(axis) > 1]


class Done:
    """An exchange of a set of one worker."""

    def wait(self) -> None:
        """It is over."""


class AdasumRuntime(DataRuntime):
    """Every worker updates its weights by its own gradient; then updates are combined, and all weights are alike."""

    def __init__(self, pairs: Sequence[Pair], plan: Plan, mesh: Mesh, group: Group):
        super().__init__(pairs, plan, mesh)
        self._group = group
        weights = [weight.detach() for _, weight in trained(pairs)]
        found = plan.data.buckets([held for held, _ in trained(pairs)], [tuple(one.shape) for one in weights], plan)
        self._weights = [[weights[index] for index in bucket.indices] for bucket in found]
        self._before = [_flat(bucket) for bucket in self._weights]
        self._dtype = getattr(torch, Horovod.of(plan).compression.dtype(plan))
        self._stepping = False

    def begin_step(self) -> None:
        """Remember the weights that the update starts from."""
        super().begin_step()
        for before, weights in zip(self._before, self._weights):
            _fill_flat(before, weights)
        self._stepping = True

    @torch.no_grad()
    def finish_update(self) -> None:
        """Weights are what they were plus the combination of all workers' updates."""
        if not self._stepping:  # a checkpoint was loaded
            return
        self._stepping = False
        for before, weights in zip(self._before, self._weights):
            update = _flat(weights).sub_(before).to(self._dtype)
            all_combine(update, [weight.numel() for weight in weights], self._group)
            before.add_(update.to(before.dtype))
            for weight, part in zip(weights, before.split([weight.numel() for weight in weights])):
                weight.copy_(part.view_as(weight))


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _fill_flat(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    parts = flat.split([tensor.numel() for tensor in tensors])
    torch_private.copy_all([part.view_as(tensor) for part, tensor in zip(parts, tensors)], list(tensors))


RUNTIME = HorovodRuntime
