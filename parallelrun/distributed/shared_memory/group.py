"""The process group of torch whose operations go through shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallelrun.base.context import PendingCollective
from parallelrun.distributed import torch_private
from parallelrun.distributed.shared_memory.channel import CollectiveChannel
from parallelrun.distributed.shared_memory.collectives import Collectives
from parallelrun.distributed.shared_memory.engine import Engine
from parallelrun.distributed.shared_memory.messages import Message, MessageChannel
from parallelrun.distributed.shared_memory.named_group import NamedGroup, observed
from parallelrun.distributed.shared_memory.reductions import reduction_of
from parallelrun.distributed.shared_memory.shared_collective import SharedCollective
from parallelrun.distributed.shared_memory.tensors import Outputs, as_list, plain
from parallelrun.distributed.shared_memory.work import SharedMemoryWork

_LEAVE_S = 10.0  # a group that is destroyed waits so long for operations that its peers may still need


class SharedMemoryGroup(NamedGroup):
    """A group of ranks of one host. Its methods are those of torch.distributed's groups on CPU tensors.

    options: torch's `_DistributedBackendOptions`. make: the collectives that `channel` issues.
    """

    def __init__(
        self, options: Any, engine: Engine, make: Collectives, channel: CollectiveChannel, messages: MessageChannel
    ):
        super().__init__(options.store, options.group_rank, options.group_size)
        self._engine, self._size, self._number = engine, options.group_size, options.group_rank
        self._timeout_s = options.timeout.total_seconds()
        self._make, self._channel, self._messages = make, channel, messages
        self._open = True
        self._coalesced: list[SharedMemoryWork] | None = None

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def shutdown(self) -> None:
        """Leave the group, when what was issued has ended."""
        if self._open:
            self._engine.finish(_LEAVE_S)
        self.abort()

    def abort(self) -> None:
        """Leave the group at once."""
        if self._open:
            self._open = False
            with self._engine.mutex:
                self._channel.close()

    @property
    def num_issued(self) -> int:
        """Return how many collectives this member has issued."""
        return self._channel.num_issued

    def pending(self, ranks: tuple[int, ...]) -> PendingCollective | None:
        """Return the operation for which a thread of this process waits in this group, if one does. ranks: of the
        group."""
        for operation in tuple(self._engine.awaited):
            outstanding = self._channel.outstanding(operation)
            if isinstance(operation, Message) and self._messages.holds(operation):
                outstanding = 0, (operation.peer,)
            if outstanding is not None:
                number, missing = outstanding
                by_rank = tuple(ranks[member] for member in missing)
                return PendingCollective(self._group_name, ranks, operation.name, number, operation.num_bytes, by_rank)
        return None

    # collectives

    @observed("barrier")
    def barrier(self, opts: Any = None) -> SharedMemoryWork:
        return self._issue([self._make.barrier()], opts, Outputs([]))

    @observed("allreduce_")
    def allreduce(self, tensors: Any, opts: Any = None) -> SharedMemoryWork:
        return self._all_reduce(tensors, opts.reduceOp if opts is not None else dist.ReduceOp.SUM, opts)

    @observed("allreduce_")
    def all_reduce(self, tensor: Tensor, op: Any, async_op: bool) -> SharedMemoryWork | None:
        """Reduce a tensor in place, as `torch.distributed.all_reduce` does. With async_op, return the Work."""
        values = tensor.data
        if not values.is_contiguous():
            work = self._all_reduce(tensor, op)
            return work if async_op or not work.wait() else None
        collective = self._make.all_reduce(values, reduction_of(op, values.dtype))
        if async_op:
            with self._engine.mutex:
                self._channel.issue(collective)
            return SharedMemoryWork(self._engine, (collective,), self._timeout_s, [tensor])
        torch_private.timed(partial(self._complete, collective))
        return None

    def _complete(self, collective: SharedCollective) -> None:
        with self._engine.mutex:
            self._channel.issue(collective)
        self._engine.wait(collective, self._timeout_s)
        if collective.error is not None:
            raise collective.error

    @observed("allreduce_coalesced_")
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> SharedMemoryWork:
        return self._all_reduce(tensors, opts.reduceOp if opts is not None else dist.ReduceOp.SUM, opts)

    def _all_reduce(self, tensors: Any, op: Any, opts: Any = None) -> SharedMemoryWork:
        results = Outputs(as_list(tensors))
        buffers = results.contiguous(filled=True)
        sums = [self._make.all_reduce(buffer, reduction_of(op, buffer.dtype)) for buffer in buffers]
        return self._issue(sums, opts, results)

    @observed("broadcast_")
    def broadcast(self, tensors: Any, opts: Any = None) -> SharedMemoryWork:
        root = opts.rootRank if opts is not None else 0
        results = Outputs(as_list(tensors))
        buffers = results.contiguous(filled=root == self._number)
        return self._issue([self._make.broadcast(buffer, root) for buffer in buffers], opts, results)

    @observed("reduce_")
    def reduce(self, tensors: Any, opts: Any = None) -> SharedMemoryWork:
        results = Outputs(as_list(tensors))
        reduction, root = partial(reduction_of, opts.reduceOp), opts.rootRank
        buffers = results.contiguous(filled=True)
        return self._issue([self._make.reduce(x, root, reduction(x.dtype)) for x in buffers], opts, results)

    @observed("allgather_")
    def allgather(self, outputs: Any, tensors: Any, opts: Any = None) -> SharedMemoryWork:
        """outputs: for each tensor, one for each rank."""
        results = Outputs([buffer for row in outputs for buffer in row])
        parts = iter(results.contiguous(filled=False))
        gathers = [
            self._make.all_gather([next(parts) for _ in row], plain(tensor)) for row, tensor in zip(outputs, tensors)
        ]
        return self._issue(gathers, opts, results)

    @observed("_allgather_base_")
    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> SharedMemoryWork:
        return self._gather_into([output], [tensor], opts)

    @observed("allgather_into_tensor_coalesced_")
    def all_gather_single_coalesced(self, outputs: Any, tensors: Any, opts: Any = None) -> SharedMemoryWork:
        return self._gather_into(outputs, tensors, opts)

    def _gather_into(self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], opts: Any) -> SharedMemoryWork:
        results = Outputs(outputs)
        buffers = results.contiguous(filled=False)
        gathers = [self._make.all_gather(self._split(x), plain(tensor)) for x, tensor in zip(buffers, tensors)]
        return self._issue(gathers, opts, results)

    @observed("gather_")
    def gather(self, outputs: Any, tensors: Any, opts: Any = None) -> SharedMemoryWork:
        results, root, part = Outputs(outputs[0] if outputs else []), opts.rootRank, plain(tensors[0])
        arriving = results.contiguous(filled=False) or [part[:0]] * self._size
        leaving = [part if number == root else part[:0] for number in range(self._size)]
        return self._issue([self._make.all_to_all(arriving, leaving, "gather")], opts, results)

    @observed("scatter_")
    def scatter(self, outputs: Any, tensors: Any, opts: Any = None) -> SharedMemoryWork:
        results, root = Outputs(outputs), opts.rootRank
        (part,) = results.contiguous(filled=False)
        leaving = [plain(tensor) for tensor in tensors[0]] if tensors else [part[:0]] * self._size
        arriving = [part if number == root else part[:0] for number in range(self._size)]
        return self._issue([self._make.all_to_all(arriving, leaving, "scatter")], opts, results)

    @observed("reduce_scatter_")
    def reduce_scatter(self, outputs: Any, tensors: Any, opts: Any = None) -> SharedMemoryWork:
        return self._reduce_scatter(outputs, [[plain(tensor) for tensor in row] for row in tensors], opts)

    @observed("_reduce_scatter_base_")
    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> SharedMemoryWork:
        return self._reduce_scatter([output], [self._split(plain(tensor))], opts)

    @observed("reduce_scatter_tensor_coalesced_")
    def reduce_scatter_single_coalesced(self, outputs: Any, tensors: Any, opts: Any = None) -> SharedMemoryWork:
        return self._reduce_scatter(outputs, [self._split(plain(tensor)) for tensor in tensors], opts)

    def _reduce_scatter(self, outputs: Any, rows: list[list[Tensor]], opts: Any) -> SharedMemoryWork:
        results = Outputs(outputs)
        reduction = partial(reduction_of, opts.reduceOp if opts is not None else dist.ReduceOp.SUM)
        buffers = results.contiguous(filled=False)
        sums = [self._make.reduce_scatter(x, row, reduction(x.dtype)) for x, row in zip(buffers, rows)]
        return self._issue(sums, opts, results)

    @observed("alltoall_base_")
    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_sizes: Any = (), input_sizes: Any = (), opts: Any = None
    ) -> SharedMemoryWork:
        results = Outputs([output])
        (target,), source = results.contiguous(filled=False), plain(tensor)
        arriving = list(target.split(list(output_sizes))) if output_sizes else self._split(target)
        leaving = list(source.split(list(input_sizes))) if input_sizes else self._split(source)
        return self._issue([self._make.all_to_all(arriving, leaving)], opts, results)

    @observed("alltoall_")
    def alltoall(self, outputs: Any, tensors: Any, opts: Any = None) -> SharedMemoryWork:
        results = Outputs(outputs)
        parts = [plain(tensor) for tensor in tensors]
        return self._issue([self._make.all_to_all(results.contiguous(filled=False), parts)], opts, results)

    # messages

    @observed("send")
    def send(self, tensors: Any, peer: int, tag: int = 0) -> SharedMemoryWork:
        with self._engine.mutex:
            sent = [self._messages.send(plain(tensor), self._other(peer), tag) for tensor in tensors]
        return self._work(sent, None, Outputs(tensors))

    @observed("recv_")
    def recv(self, tensors: Any, peer: int, tag: int = 0) -> SharedMemoryWork:
        results, source = Outputs(as_list(tensors)), self._other(peer)
        with self._engine.mutex:
            received = [self._messages.receive(buffer, source, tag) for buffer in results.contiguous(filled=False)]
        return self._work(received, None, results)

    def _other(self, peer: int) -> int:
        if not 0 <= peer < self._size or peer == self._number:
            raise RuntimeError(f"[shared memory] rank {self._number} of {self._size} has no other rank {peer}")
        return peer

    # the names of torch 2.11

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device | None = None) -> SharedMemoryWork:
        works, self._coalesced = self._coalesced or [], None
        operations = [operation for work in works for operation in work._operations]
        copies = [pair for work in works for pair in work._copies]
        tensors = [tensor for work in works for tensor in work.result()]
        return SharedMemoryWork(self._engine, operations, self._timeout_s, tensors, copies)

    def _split(self, tensor: Tensor) -> list[Tensor]:
        """Return the equal parts of a contiguous tensor, flat, one per rank."""
        if tensor.numel() % self._size:
            raise RuntimeError(f"[shared memory] {tuple(tensor.shape)} does not split into {self._size} equal parts")
        return list(tensor.view(self._size, -1).unbind()) if tensor.numel() else [tensor.view(-1)] * self._size

    def _issue(self, collectives: Sequence[SharedCollective], opts: Any, results: Outputs) -> SharedMemoryWork:
        with self._engine.mutex:
            for collective in collectives:
                self._channel.issue(collective)
        return self._work(collectives, opts, results)

    def _work(self, operations: Any, opts: Any, results: Outputs) -> SharedMemoryWork:
        timeout = opts.timeout if opts is not None else None
        timeout_s = timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else self._timeout_s
        work = SharedMemoryWork(self._engine, operations, timeout_s, results.tensors, results.copies)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work
