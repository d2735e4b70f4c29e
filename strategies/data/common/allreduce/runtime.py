"""All-reduce by rounds of point-to-point messages, which are counted like all communication.

    all_reduce(buffer, group, "gradients", rounds, async_op=True).wait()

On gloo a thread per process group runs the all-reduces in order; messages are cut into pieces, so that one piece is
forwarded while the next one arrives and is added. On CUDA the rounds are enqueued on a separate stream.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from parallelrun.distributed import comm, torch_private
from parallelrun.distributed.comm import Waitable
from parallelrun.distributed.mesh import Group

from .rounds import ALL_GATHER, SCATTER_REDUCE, PeerMessage, Rounds, piece_elements

# A thread or a stream belongs to its process group and ends with it; callers know only the group.
_lanes: WeakKeyDictionary[dist.ProcessGroup, tuple[Queue, _Scratch]] = WeakKeyDictionary()
_streams: WeakKeyDictionary[dist.ProcessGroup, torch.cuda.Stream] = WeakKeyDictionary()


def all_reduce(tensor: Tensor, group: Group, purpose: str, rounds: Rounds, async_op: bool = False) -> Waitable | None:
    """Sum the contiguous `tensor` over the group, in place; every member ends with the same bits.

    rounds: this rank's; empty: the backend's own all-reduce. async_op: return the started exchange (None on a group of
    one). Calls run in their order, which must be the same on all members.
    """
    if not rounds or group.size == 1:
        return comm.all_reduce(tensor, group, purpose, async_op=async_op)
    assert tensor.is_contiguous(), "its flat view is sent"
    rounds = tuple(turn for turn in rounds if turn.send or turn.receive)
    started = (_on_stream if tensor.is_cuda else _on_thread)(tensor.view(-1), rounds, group, purpose)
    if async_op:
        return started
    started.wait()
    return None


class AllReduceJob:
    """A function in a Queue. `wait` returns when it has run, or raises its exception."""

    def __init__(self, run: Callable[[], None]):
        self._run: Callable[[], None] | None = run
        self._modes = torch_private.current_dispatch_modes()
        self._done = threading.Event()
        self._error: BaseException | None = None

    def carry_out(self) -> None:
        """Run the job; called once, by the queue's thread."""
        assert self._run is not None, "a job runs once"
        try:
            with torch_private.dispatch_modes(self._modes):
                self._run()
        except BaseException as error:  # every exception must reach the waiting thread
            self._error = error
        self._run = None  # it references the tensor and the process group that owns the queue
        self._modes = []
        self._done.set()

    def wait(self) -> None:
        """Wait until the job has run."""
        torch_private.timed(self._done.wait)
        if self._error is not None:
            raise self._error


class Queue:
    """Runs jobs one after the other. The thread ends with the Queue and never keeps a process alive."""

    def __init__(self, name: str):
        self._jobs: SimpleQueue[AllReduceJob | None] = SimpleQueue()
        threading.Thread(target=_carry_out_all, args=(self._jobs,), name=name, daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def put(self, run: Callable[[], None]) -> AllReduceJob:
        """Run `run` after all jobs that were put before; return at once."""
        job = AllReduceJob(run)
        self._jobs.put(job)
        return job


def _carry_out_all(jobs: SimpleQueue[Any]) -> None:
    while (job := jobs.get()) is not None:
        job.carry_out()
        del job  # or the last one would live until the next comes


def _on_thread(flat: Tensor, rounds: Rounds, group: Group, purpose: str) -> Waitable:
    assert group.process_group is not None
    if group.process_group not in _lanes:
        _lanes[group.process_group] = Queue(f"all-reduce over {group.axis}"), _Scratch()
    queue, scratch = _lanes[group.process_group]
    return queue.put(_Pieces(flat, rounds, group, purpose, scratch).run)


class _Scratch:
    """The receive buffer of the thread. It is kept because fresh memory costs as much as the sum."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def rows(self, numel: int, like: Tensor) -> Tensor:
        """Return (2, numel) of like's dtype, uninitialised."""
        num_bytes = 2 * numel * like.element_size()
        if self._buffer.numel() < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8)
        return self._buffer[:num_bytes].view(like.dtype).view(2, numel)


class _Pieces:
    """One all-reduce on gloo.

    Receives are posted one round ahead, because a gloo send completes only when the peer has posted its receive. Sends
    are awaited only at the end: a segment is overwritten only by a sum that contains this rank's contribution, so its
    send has already completed. There is no deadlock, because every rank posts the receives of a round before it waits
    for those of the round before.
    """

    def __init__(self, flat: Tensor, rounds: Rounds, group: Group, purpose: str, scratch: _Scratch):
        self._flat, self._rounds, self._group, self._purpose = flat, rounds, group, purpose
        received = [turn.receive.numel for turn in rounds if turn.phase == SCATTER_REDUCE and turn.receive]
        self._longest, self._scratch = max(received, default=0), scratch
        self._piece = piece_elements(flat.element_size())
        self._sent: list[dist.Work] = []

    @torch.no_grad()
    def run(self) -> None:
        self._buffers = self._scratch.rows(self._longest, self._flat)
        arriving = self._post(0)
        self._send(self._pieces_to_send(0), self._flat.numel())
        for number, turn in enumerate(self._rounds):
            posted, outgoing = self._post(number + 1), self._pieces_to_send(number + 1)
            if turn.receive:
                self._send(outgoing, turn.receive.start)
            for piece, buffer, work in arriving:
                work.wait()
                if turn.phase == SCATTER_REDUCE:
                    self._flat[piece.start : piece.stop].add_(buffer)
                self._send(outgoing, piece.stop)
            self._send(outgoing, self._flat.numel())
            arriving = posted
        for work in self._sent:
            work.wait()

    def _post(self, number: int) -> list[tuple[PeerMessage, Tensor, dist.Work]]:
        """Start the receives of a round: into the tensor, or into the buffer from which they are added."""
        if number >= len(self._rounds) or (message := self._rounds[number].receive) is None:
            return []
        into, offset = self._flat, 0
        if self._rounds[number].phase == SCATTER_REDUCE:
            into, offset = self._buffers[number % 2], message.start
        posted = []
        for piece in message.pieces(self._piece):
            buffer = into[piece.start - offset : piece.stop - offset]
            work = comm.irecv(buffer, piece.peer, self._group, self._purpose, comm.REDUCTION_TAG)
            posted.append((piece, buffer, work))
        return posted

    def _pieces_to_send(self, number: int) -> deque[PeerMessage]:
        message = self._rounds[number].send if number < len(self._rounds) else None
        return deque(message.pieces(self._piece)) if message else deque()

    def _send(self, outgoing: deque[PeerMessage], ready: int) -> None:
        """Start the sends of the pieces before `ready`, which have arrived."""
        while outgoing and outgoing[0].stop <= ready:
            piece = outgoing.popleft()
            part = self._flat[piece.start : piece.stop]
            self._sent.append(comm.isend(part, piece.peer, self._group, self._purpose, comm.REDUCTION_TAG))


def _on_stream(flat: Tensor, rounds: Rounds, group: Group, purpose: str) -> Waitable:
    """Enqueue all rounds behind the work of the current stream; `wait` makes that stream wait for them."""
    assert group.process_group is not None
    stream = _streams.get(group.process_group)
    if stream is None:
        stream = _streams[group.process_group] = torch.cuda.Stream(flat.device)
    stream.wait_stream(torch.cuda.current_stream(flat.device))
    flat.record_stream(stream)
    with torch.cuda.stream(stream), torch.no_grad():
        run_in_batches(flat, rounds, group, purpose)
    done: Waitable = stream.record_event()
    return done


def run_in_batches(flat: Tensor, rounds: Rounds, group: Group, purpose: str) -> None:
    """Run one round at a time with uncut messages and both directions in one batch, as NCCL needs it; also on gloo."""
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
