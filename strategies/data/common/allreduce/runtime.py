"""All-reduce by rounds of point-to-point messages, which are counted like all communication.

    all_reduce(buffer, group, "gradients", rounds).wait()

On CPU a thread per process group runs the all-reduces in order. On CUDA the rounds are enqueued on a separate stream.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from parallelrun.base.background_thread import BackgroundThread
from parallelrun.distributed import comm, torch_private
from parallelrun.distributed.comm import Waitable
from parallelrun.distributed.mesh import Group

from ..reducer import BucketedRuntime
from .rounds import ALL_GATHER, SCATTER_REDUCE, Rounds

# A thread or a stream belongs to its process group and ends with it; callers know only the group.
_threads: WeakKeyDictionary[dist.ProcessGroup, BackgroundThread] = WeakKeyDictionary()
_streams: WeakKeyDictionary[dist.ProcessGroup, torch.cuda.Stream] = WeakKeyDictionary()


def all_reduce(tensor: Tensor, group: Group, purpose: str, rounds: Rounds) -> Waitable:
    """Start to sum the contiguous `tensor` over the group, in place; every member ends with the same bits.

    rounds: this rank's; empty: the backend's own all-reduce. Calls run in their order, which must be the same on all
    members.
    """
    if not rounds or group.size == 1:
        return comm.all_reduce(tensor, group, purpose, async_op=True)
    assert tensor.is_contiguous(), "its flat view is sent"
    flat, rounds = tensor.view(-1), tuple(turn for turn in rounds if turn.send or turn.receive)
    start = _on_stream if tensor.is_cuda else _on_thread
    return start(lambda: run_rounds(flat, rounds, group, purpose), group, flat)


class AlgorithmRuntime(BucketedRuntime):
    """Sums buckets by the messages of the plan's algorithm."""

    def start_sum(self, tensor: Tensor, group: Group) -> Waitable:
        strategy: Any = self._plan.data  # an `AlgorithmAllReduce`, whose file says more than this one needs
        rounds = strategy.rounds(group.axis, group.size, group.index, tensor.numel(), self._plan)
        return all_reduce(tensor, group, "gradients", rounds)


class SumOnThread:
    """An all-reduce that a thread carries out. `wait` returns when it has ended, or raises its exception."""

    def __init__(self, end: Future[None]):
        self.end = end

    def wait(self) -> None:
        torch_private.timed(self.end.result)


def _on_thread(run: Callable[[], None], group: Group, flat: Tensor) -> Waitable:
    assert group.process_group is not None
    thread = _threads.get(group.process_group)
    if thread is None:
        thread = _threads[group.process_group] = BackgroundThread(f"all-reduce over {group.axis}")
    modes = torch_private.current_dispatch_modes()

    def run_observed() -> None:
        with torch_private.dispatch_modes(modes):
            run()

    return SumOnThread(thread.run(run_observed))


def _on_stream(run: Callable[[], None], group: Group, flat: Tensor) -> Waitable:
    """Enqueue all rounds behind the work of the current stream; `wait` makes that stream wait for them."""
    assert group.process_group is not None
    stream = _streams.get(group.process_group)
    if stream is None:
        stream = _streams[group.process_group] = torch.cuda.Stream(flat.device)
    stream.wait_stream(torch.cuda.current_stream(flat.device))
    flat.record_stream(stream)
    with torch.cuda.stream(stream):
        run()
    done: Waitable = stream.record_event()
    return done


@torch.no_grad()
def run_rounds(flat: Tensor, rounds: Rounds, group: Group, purpose: str) -> None:
    """Run one round after the other, both directions of a round in one batch, as NCCL needs it."""
    for turn in rounds:
        target, receives = None, []
        if turn.receive is not None:
            target = flat[turn.receive.start : turn.receive.stop]
            receives = [(target if turn.phase == ALL_GATHER else torch.empty_like(target), turn.receive.peer)]
        sends = [(flat[turn.send.start : turn.send.stop], turn.send.peer)] if turn.send else []
        for work in comm.exchange(sends, receives, group, purpose):
            work.wait()
        if target is not None and turn.phase == SCATTER_REDUCE:
            target.add_(receives[0][0])
