"""ddp at run time: gradients lie in flat buckets (`.grad` of a weight is a view), summed over dp under backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from parallelrun import comm
from parallelrun.mesh.runtime import Group, Mesh
from parallelrun.plan.structure import Plan

from ..bucketed import Bucket, Reducer, Slot
from ..buckets import fill, reduce_bytes
from ..compression.runtime import Part, Waitable, compress
from ..compression.settings import CompressedWay
from ..local import LocalRuntime, Pair, match, trained


def shard(parts: Sequence[nn.Module], plan: Plan, mesh: Mesh) -> None:
    """Nothing: every rank keeps the whole weights."""


def attach(parts: Sequence[nn.Module], plan: Plan, mesh: Mesh) -> LocalRuntime:
    """The DataRuntime over materialised weights."""
    pairs = match(parts, plan, mesh)
    return DdpRuntime(pairs, plan, mesh.group("dp")) if mesh.group("dp").size > 1 else LocalRuntime(pairs)


class DdpRuntime(LocalRuntime):
    """The optimizer updates the weights themselves, by gradients that lie in the buckets."""

    def __init__(self, pairs: Sequence[Pair], plan: Plan, group: Group):
        super().__init__(pairs)
        weights = [parameter for _, parameter in trained(pairs)]
        numels = [weight.numel() for weight in weights]
        filled = fill([numel * reduce_bytes(plan) for numel in numels], plan.data.bucket_bytes)
        self._plan, self._group = plan, group
        self._views: list[tuple[nn.Parameter, Tensor]] = []
        self._reducer = Reducer([self._bucket([trained(pairs)[i] for i in bucket]) for bucket in filled], plan)
        self.flat_gradients = [bucket.buffer for bucket in self._reducer.buckets]

    def begin_step(self) -> None:
        """Gradients are empty and backward passes are counted."""
        self._reducer.begin_step()

    def launch_gradients(self) -> None:
        """Send what is left."""
        self._reducer.launch_rest()

    def finish_gradients(self) -> None:
        """Every weight's gradient is the sum over dp (of losses already divided by the global count: no averaging)."""
        self._reducer.finish()
        for weight, view in self._views:
            weight.grad = view

    def _start_sum(self, tensor: Tensor) -> Waitable:
        """Start summing a flat tensor over dp, in place: what other ways that reduce in buckets do otherwise."""
        work = comm.all_reduce(tensor, self._group, "gradients", async_op=True)
        assert work is not None, "a data axis of degree 1 has nothing to sum"
        return work

    def _bucket(self, pairs: Sequence[Pair]) -> Bucket:
        like = pairs[0][1]
        buffer = torch.zeros(sum(w.numel() for _, w in pairs), dtype=like.dtype, device=like.device)
        slots, parts, start = [], [], 0
        for held, weight in pairs:
            view = buffer[start : start + weight.numel()].view(weight.shape)
            start += weight.numel()
            self._views.append((weight, view))
            slots.append(Slot(weight, partial(_whole, view)))
            parts.append((held, view))
        return Bucket(buffer, slots, self._sender(buffer, parts))

    def _sender(self, buffer: Tensor, parts: Sequence[Part]) -> Callable[[], Waitable]:
        """What starts the exchange of one bucket: of its buffer, with each parameter's view into it."""
        data = self._plan.data
        assert isinstance(data, CompressedWay)
        return compress(data.compression, self._plan, buffer, parts, self._start_sum)


def _whole(view: Tensor, gradient: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(view, gradient)]
