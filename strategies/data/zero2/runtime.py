"""zero2 at run time: every backward pass reduces its gradients into this rank's shards, and lets the whole ones go.

What is held of gradients is the shards, two buckets on their way, and what backward has not yet filled a bucket with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from parallelrun import comm, torch_private
from parallelrun.mesh import Group, Mesh
from parallelrun.plan.parameters import LocalParameter
from parallelrun.plan.structure import Plan
from parallelrun.train.data_runtime import DataRuntime, Pair, by_axis, set_gradient, trained

from ..chunks import Cut, cut, local_parameter, starts_of
from .plan import UNDER_WAY, reductions, stage_buckets


class Bucket:
    """Weights that are reduced and gathered together. gradients: this rank's shards, padded and flat."""

    def __init__(self, cuts: Sequence[Cut], group: Group):
        self.cuts, self.weights, self._group = list(cuts), [one.weight for one in cuts], group
        self._starts = starts_of(cuts)
        self.gradients = cuts[0].mine.new_zeros(self._starts[-1])
        self.num_arrived = 0
        self.shards = self._own(self.gradients)

    def _own(self, row: Tensor) -> list[Tensor]:
        """Where this rank's chunk of each weight lies in a row."""
        return [one.own(row[start:stop]) for one, start, stop in zip(self.cuts, self._starts, self._starts[1:])]

    def _regions(self, buffer: Tensor) -> list[Tensor]:
        """Where each weight's chunks lie in a full-size buffer: row r holds chunk r of every weight."""
        rows = buffer.view(self._group.size, -1)
        ends = zip(self.cuts, self._starts, self._starts[1:])
        return [one.regions(rows[:, start:stop]) for one, start, stop in ends]

    def reduce(self, first: bool) -> Callable[[], None]:
        """Start summing what backward has left over dp, and let it go. What is returned waits, and adds the sum to the
        shards (on the `first` pass of a step: overwrites them). What backward did not reach is zero."""
        buffer = self.gradients.new_zeros(self._group.size * self.gradients.numel())
        pairs = [
            pair
            for one, regions in zip(self.cuts, self._regions(buffer))
            if one.weight.grad is not None
            for pair in one.pieces(regions, one.weight.grad)
        ]
        with torch.no_grad():
            torch_private.copy_all([place for place, _ in pairs], [part for _, part in pairs])
        for weight in self.weights:
            weight.grad = None
        total = self.gradients if first else torch.empty_like(self.gradients)
        work = comm.reduce_scatter_into(total, buffer, self._group, "gradients", async_op=True)
        assert work is not None

        def finish() -> None:
            work.wait()
            if not first:
                self.gradients.add_(total)

        return finish

    def gather(self) -> Callable[[], None]:
        """Start sharing this rank's updated chunks; what is returned waits and puts everyone's into the weights."""
        row = torch.zeros_like(self.gradients)
        for place, one in zip(self._own(row), self.cuts):
            place.copy_(one.mine)
        buffer = row.new_empty(self._group.size * row.numel())
        work = comm.all_gather_into(buffer, row, self._group, "parameters", async_op=True)
        assert work is not None

        def finish() -> None:
            work.wait()
            for one, regions in zip(self.cuts, self._regions(buffer)):
                for region, part in one.pieces(regions, one.weight.detach()):
                    part.copy_(region)

        return finish


def _bucket(pairs: Sequence[Pair], group: Group, plan: Plan) -> Bucket:
    return Bucket([cut(held, weight, group, plan) for held, weight in pairs], group)


class UnderWay:
    """Exchanges that have been started; at most UNDER_WAY, so that no more buffers than that live."""

    def __init__(self) -> None:
        self._finish: deque[Callable[[], None]] = deque()

    def start(self, start: Callable[[], Callable[[], None]]) -> None:
        """Start one more, after waiting for the oldest where there are enough."""
        if len(self._finish) == UNDER_WAY:
            self._finish.popleft()()
        self._finish.append(start())

    def wait(self) -> None:
        """Until none is left."""
        while self._finish:
            self._finish.popleft()()


class StageReducer:
    """The buckets of one stage, reduced in order once in every backward pass, each when all its gradients are there.

    The order (pass by pass, bucket by bucket) is the same on every rank whatever order autograd runs in. The passes of
    two stages of a rank come in the schedule's order, which is that of all replicas.
    """

    def __init__(self, buckets: Sequence[Bucket], under_way: UnderWay, plan: Plan):
        self.buckets = list(buckets)
        self._under_way = under_way
        self._num_reductions = reductions(plan) * len(self.buckets)
        self._num_started = 0
        self._armed = False
        if not plan.pipeline.splits_backward:
            for bucket in self.buckets:
                hook = self._hook(bucket)
                for weight in bucket.weights:
                    weight.register_post_accumulate_grad_hook(hook)

    def begin_step(self) -> None:
        """Forget the last step; the next backward passes are counted."""
        self._num_started = 0
        self._armed = True
        for bucket in self.buckets:
            bucket.num_arrived = 0
            for weight in bucket.weights:
                weight.grad = None

    def finish(self) -> None:
        """Start what is left: what passes have not filled."""
        self._armed = False
        while self._num_started < self._num_reductions:
            self._start()

    def _hook(self, bucket: Bucket) -> Callable[[Tensor], None]:
        num_weights = len(bucket.weights)

        def arrived(_: Tensor) -> None:
            if self._armed:
                bucket.num_arrived += 1
                if bucket.num_arrived % num_weights == 0:
                    self._start_full()

        return arrived

    def _start_full(self) -> None:
        while self._num_started < self._num_reductions:
            passed, index = divmod(self._num_started, len(self.buckets))
            bucket = self.buckets[index]
            if bucket.num_arrived < (passed + 1) * len(bucket.weights):
                return
            self._start()

    def _start(self) -> None:
        passed, index = divmod(self._num_started, len(self.buckets))
        bucket = self.buckets[index]
        self._num_started += 1
        self._under_way.start(lambda: bucket.reduce(first=passed == 0))


class ZeRO2Runtime(DataRuntime):
    """The optimizer updates this rank's chunks in place in the module's own weights, and what has no copies whole."""

    def __init__(self, pairs: Sequence[Pair], plan: Plan, mesh: Mesh):
        super().__init__(pairs, plan, mesh)
        pairs = trained(pairs)
        held, weights = [one for one, _ in pairs], [weight for _, weight in pairs]
        filled = stage_buckets(held, [tuple(weight.shape) for weight in weights], plan)
        self._under_way = UnderWay()
        self._reducers = []
        self.parameters: list[LocalParameter] = []
        shards: dict[int, tuple[Tensor, Tensor]] = {}
        flat = []
        for of_stage in filled:
            buckets = [_bucket([pairs[i] for i in one.indices], mesh.group(one.axis), plan) for one in of_stage]
            self._reducers.append(StageReducer(buckets, self._under_way, plan))
            for one, bucket in zip(of_stage, buckets):
                shards.update(zip(one.indices, zip([each.mine for each in bucket.cuts], bucket.shards)))
                flat.append((one.axis, bucket.gradients))
        self._shards = list(shards.values())
        self._alone = [weight for index, weight in enumerate(weights) if index not in shards]
        mine = [shards[index][0] if index in shards else weight for index, weight in enumerate(weights)]
        self.parameters = [local_parameter(one, part, plan) for one, part in zip(held, mine)]
        self.flat_gradients = by_axis(flat)

    @property
    def _buckets(self) -> list[Bucket]:
        return [bucket for reducer in self._reducers for bucket in reducer.buckets]

    def begin_step(self) -> None:
        """Gradients are empty and backward passes are counted."""
        for parameter in self.parameters:
            parameter.tensor.grad = None
        for reducer in self._reducers:
            reducer.begin_step()

    def finish_gradients(self) -> None:
        """Every chunk's gradient is its part of the sum over the parameter's copies."""
        for reducer in self._reducers:
            reducer.finish()
        self._under_way.wait()
        for mine, gradient in self._shards:
            mine.grad = gradient
        for weight in self._alone:
            set_gradient(weight, weight.grad)

    @torch.no_grad()
    def finish_update(self) -> None:
        """Every rank's updated chunks are in everyone's weights."""
        for bucket in self._buckets:
            self._under_way.start(bucket.gather)
        self._under_way.wait()


RUNTIME = ZeRO2Runtime
