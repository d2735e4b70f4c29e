"""Gradients are collected in buckets during backward, and a full bucket is exchanged under the rest of backward.

torch's DDP is not used: it averages by itself, and works neither under pipeline schedules nor with a split backward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from parallelrun.base import registry
from parallelrun.distributed import comm, torch_private
from parallelrun.distributed.comm import Waitable
from parallelrun.distributed.mesh import Group, Mesh
from parallelrun.planner.contract.parameters import HeldParameter, LocalParameter
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.pieces.expert_axes import inner_axis
from parallelrun.training.loop.data_runtime import DataRuntime, Pair, by_axis, complete_gradients
from parallelrun.training.loop.flat_tensors import bucket_pairs, flat_views

Part = tuple[HeldParameter, Tensor]  # a parameter and its gradient's view into a bucket's buffer
Sum = Callable[[Tensor], Waitable]  # starts summing a flat tensor over the data axis, in place
Kept = list[tuple[str, LocalParameter]]  # (kind, tensor) of what checkpoints keep of a compression


class GradientBucket(ABC):
    """Weights whose gradients are exchanged together. num_arrived: gradients that backward computed in this step."""

    def __init__(self, weights: Sequence[nn.Parameter]):
        self.weights = list(weights)
        self.num_arrived = 0

    def begin(self) -> None:
        """Forget the gradients of the last step."""
        self.num_arrived = 0
        for weight in self.weights:
            weight.grad = None

    def collect(self) -> None:  # noqa: B027
        """Called when a backward pass has computed all gradients of the bucket."""

    @abstractmethod
    def launch(self, number: int) -> None:
        """Start exchange `number` (from 0) of this step. Gradients that backward did not compute are zero."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until all exchanges have ended."""


@dataclass(eq=False)
class Slot:
    """One weight of a bucket. `pieces(gradient)` pairs each part of the buffer with the values to copy there."""

    weight: nn.Parameter
    pieces: Callable[[Tensor], list[tuple[Tensor, Tensor]]]
    filled: bool = False


class FlatBucket(GradientBucket):
    """A bucket with a flat buffer that accumulates the gradients of a step. send: starts the buffer's exchange."""

    def __init__(self, buffer: Tensor, slots: Sequence[Slot], send: Callable[[], Waitable | None]):
        super().__init__([slot.weight for slot in slots])
        self.buffer, self.slots, self._send = buffer, list(slots), send
        self._work: Waitable | None = None

    def begin(self) -> None:
        super().begin()
        for slot in self.slots:
            slot.filled = False

    def collect(self) -> None:
        """Move the weights' gradients into the buffer, added to those of earlier microbatches."""
        new: list[tuple[Tensor, Tensor]] = []
        more: list[tuple[Tensor, Tensor]] = []
        for slot in self.slots:
            gradient = slot.weight.grad
            if gradient is not None:
                (more if slot.filled else new).extend(slot.pieces(gradient))
                slot.filled = True
                slot.weight.grad = None
        with torch.no_grad():
            torch_private.copy_all([target for target, _ in new], [part for _, part in new])
            torch_private.add_all([target for target, _ in more], [part for _, part in more])

    def launch(self, number: int) -> None:
        for slot in self.slots:
            if not slot.filled and slot.weight.grad is None:
                slot.weight.grad = torch.zeros_like(slot.weight)
        self.collect()
        self._work = self._send()

    def wait(self) -> None:
        assert self._work is not None, "the bucket was not launched"
        self._work.wait()
        self._work = None


class Reducer:
    """Counts the gradients of each bucket and launches the buckets in order, each when it is full.

    The order is the same on every rank whatever order autograd runs in: collectives must match. A parameter's hook
    fires at most once in a backward pass. Where a step exchanges buckets several times, each exchange follows the same
    number of passes.
    """

    def __init__(self, buckets: Sequence[GradientBucket], plan: Plan):
        exchanges = plan.data.num_exchanges(plan)
        self.buckets = list(buckets)
        self._passes = plan.batch.microbatches // exchanges
        self._num_launches = exchanges * len(self.buckets)
        self._num_launched = 0
        self._armed = False
        if not plan.pipeline.splits_backward:  # its hooks fire for half of the parameters: `launch_rest` launches all
            for bucket in self.buckets:
                hook = self._hook(bucket)
                for weight in bucket.weights:
                    weight.register_post_accumulate_grad_hook(hook)

    def begin_step(self) -> None:
        """Forget the last step and count the next backward passes."""
        for bucket in self.buckets:
            bucket.begin()
        self._num_launched = 0
        self._armed = True

    def launch_rest(self) -> None:
        self._armed = False
        while self._num_launched < self._num_launches:
            self._launch_next()

    def finish(self) -> None:
        """Launch what has not been launched, then wait for all exchanges."""
        self.launch_rest()
        for bucket in self.buckets:
            bucket.wait()

    def _hook(self, bucket: GradientBucket) -> Callable[[Tensor], None]:
        num_weights = len(bucket.weights)

        def arrived(_: Tensor) -> None:  # runs for every parameter in every backward pass: it may only count
            if self._armed:
                bucket.num_arrived += 1
                if bucket.num_arrived % num_weights == 0:
                    bucket.collect()
                    self._launch_full()

        return arrived

    def _launch_full(self) -> None:
        while self._num_launched < self._num_launches:
            number, index = divmod(self._num_launched, len(self.buckets))
            bucket = self.buckets[index]
            if bucket.num_arrived < (number + 1) * self._passes * len(bucket.weights):
                return
            self._launch_next()

    def _launch_next(self) -> None:
        number, index = divmod(self._num_launched, len(self.buckets))
        self._num_launched += 1
        self.buckets[index].launch(number)


class BucketedRuntime(DataRuntime):
    """Sums gradients over their copies in buckets. The optimizer updates the weights; `.grad` is a view of a bucket."""

    def __init__(self, pairs: Sequence[Pair], plan: Plan, mesh: Mesh):
        super().__init__(pairs, plan, mesh)
        self.kept: dict[str, list[LocalParameter]] = {}
        buckets, unique = bucket_pairs(pairs, plan)
        self._views: list[tuple[nn.Parameter, Tensor]] = []
        self._buckets = [self._bucket(own, self.group_of(axis)) for axis, own in buckets]
        self._unique = [weight for _, weight in unique]  # have no copies
        self._reducer = Reducer(self._buckets, plan)
        self.flat_gradients = by_axis((axis, bucket.buffer) for (axis, _), bucket in zip(buckets, self._buckets))

    def group_of(self, axis: str) -> Group:
        """The group that sums over an axis."""
        return self._mesh.group(axis)

    def start_sum(self, tensor: Tensor, group: Group) -> Waitable:
        """Start summing a flat tensor over a group, in place. Override this to change the all-reduce algorithm."""
        return comm.all_reduce(tensor, group, "gradients", async_op=True)

    def sender(self, buffer: Tensor, parts: Sequence[Part], group: Group) -> Callable[[], Waitable]:
        """Return a function that starts the exchange of a bucket's buffer: its sum, or compressed messages instead."""
        start_sum: Sum = partial(self.start_sum, group=group)
        compression = self._plan.data.exchange_form(self._plan).compression
        send: Callable[[], Waitable] = partial(start_sum, buffer)
        if compression:
            send, kept = registry.load("compressions", compression).sender(buffer, parts, self._plan, start_sum, self)
            for kind, tensor in kept:
                self.kept.setdefault(kind, []).append(tensor)
        inside = self._mesh.group(inner_axis(parts[0][0].layout, self._plan))
        if inside.size == 1:
            return send

        def sum_worker_first() -> Waitable:
            comm.all_reduce(buffer, inside, "gradients")
            return send()

        return sum_worker_first

    def begin_step(self) -> None:
        for weight in self._unique:
            weight.grad = None
        self.begin_kept()
        self._reducer.begin_step()

    def launch_gradients(self) -> None:
        self._reducer.launch_rest()

    def finish_gradients(self) -> None:
        """Make every gradient the sum over its copies. Losses are divided by the global count: nothing is averaged."""
        self._reducer.finish()
        for weight, view in self._views:
            weight.grad = view
        complete_gradients(self._unique)

    def _bucket(self, pairs: Sequence[Pair], group: Group) -> FlatBucket:
        parameters, weights = zip(*pairs)
        buffer = weights[0].new_zeros(sum(weight.numel() for weight in weights))
        views = flat_views(buffer, [weight.shape for weight in weights])
        self._views += zip(weights, views)
        slots = [
            Slot(weight, lambda gradient, view=view: [(view, gradient)])  # type: ignore[misc]
            for weight, view in zip(weights, views)
        ]
        return FlatBucket(buffer, slots, self.sender(buffer, list(zip(parameters, views)), group))


RUNTIME = BucketedRuntime  # of the strategies without a `runtime.py`
