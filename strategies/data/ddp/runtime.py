"""ddp at run time: gradients lie in flat buckets (`.grad` of a weight is a view), summed under backward.

Every bucket is summed over the group of its own axis. What has no copies is left as backward leaves it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from parallelrun import comm
from parallelrun.comm import Waitable
from parallelrun.mesh import Group, Mesh
from parallelrun.plan.structure import Plan
from parallelrun.train.data_runtime import DataRuntime, Pair, by_axis, set_gradient, trained

from ..bucketed import Bucket, Reducer, Slot
from ..buckets import is_summed, partition
from ..compression.runtime import Part, compress
from ..compression.settings import CompressedStrategy, Compression


class DDPRuntime(DataRuntime):
    """The optimizer updates the weights themselves, by gradients that are views into the buckets."""

    def __init__(self, pairs: Sequence[Pair], plan: Plan, mesh: Mesh):
        super().__init__(pairs, plan, mesh)
        pairs = trained(pairs)
        filled = partition([held for held, _ in pairs], [tuple(weight.shape) for _, weight in pairs], plan)
        self._views: list[tuple[nn.Parameter, Tensor]] = []
        self._alone = [weight for held, weight in pairs if not is_summed(held, plan)]
        buckets = [self._bucket([pairs[i] for i in bucket.indices], self.group_of(bucket.axis)) for bucket in filled]
        self._reducer = Reducer(buckets, plan)
        self.flat_gradients = by_axis((one.axis, bucket.buffer) for one, bucket in zip(filled, buckets))

    def group_of(self, axis: str) -> Group:
        """The group that sums over an axis."""
        return self._mesh.group(axis)

    def begin_step(self) -> None:
        """Gradients are empty and backward passes are counted."""
        for weight in self._alone:
            weight.grad = None
        self._reducer.begin_step()

    def launch_gradients(self) -> None:
        """Send what is left."""
        self._reducer.launch_rest()

    def finish_gradients(self) -> None:
        """Every weight's gradient is the sum over its copies (of losses already divided by the global count: no
        averaging)."""
        self._reducer.finish()
        for weight, view in self._views:
            weight.grad = view
        for weight in self._alone:
            set_gradient(weight, weight.grad)

    def _start_sum(self, tensor: Tensor, group: Group) -> Waitable:
        """Start summing a flat tensor over a group, in place: what other ways that reduce in buckets do otherwise."""
        work = comm.all_reduce(tensor, group, "gradients", async_op=True)
        assert work is not None, "what has no copies has nothing to sum"
        return work

    def _bucket(self, pairs: Sequence[Pair], group: Group) -> Bucket:
        like = pairs[0][1]
        buffer = torch.zeros(sum(w.numel() for _, w in pairs), dtype=like.dtype, device=like.device)
        slots, parts, start = [], [], 0
        for held, weight in pairs:
            view = buffer[start : start + weight.numel()].view(weight.shape)
            start += weight.numel()
            self._views.append((weight, view))
            slots.append(Slot(weight, partial(_whole, view)))
            parts.append((held, view))
        return Bucket(buffer, slots, self._sender(buffer, parts, group))

    def _sender(self, buffer: Tensor, parts: Sequence[Part], group: Group) -> Callable[[], Waitable]:
        """What starts the exchange of one bucket: of its buffer, with each parameter's view into it."""
        data = self._plan.data
        compression = data.compression if isinstance(data, CompressedStrategy) else Compression()
        return compress(compression, self._plan, buffer, parts, partial(self._start_sum, group=group))


def _whole(view: Tensor, gradient: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(view, gradient)]


RUNTIME = DDPRuntime
