"""The collectives of the project. Each is labelled with its axis and purpose, by which it is counted.

All are no-ops on a group of one rank. None supports autograd: strategies wrap them in operators of their own. With
`async_op` they return at once, and their tensors may not be used before `wait` of the result.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from parallelrun.distributed import torch_private
from parallelrun.distributed.mesh import Group, Mesh
from parallelrun.distributed.shared_memory import carrier, is_ours
from parallelrun.distributed.shared_memory.group import SharedMemoryGroup
from parallelrun.planner.contract.plan import WORLD


class Label(NamedTuple):
    """See `label`."""

    axis: str
    purpose: str
    reduction: str
    operation: str = ""


_known_label = cache(Label)  # a step has the same few hundreds of times
_LABEL: ContextVar[Label | None] = ContextVar("parallelrun_comm_label", default=None)
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
# torch 2.13 renamed these and warns about the old names; 2.11 has only the old ones.
_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_into: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# torch's pipeline schedules send both kinds of messages in one call; the counter distinguishes them by tag.
MESSAGE_TAGS = {"activations": 1, "gradients": 2}


class Waitable(Protocol):
    """torch's Work, or an exchange of ours that ends like one."""

    def wait(self) -> object: ...


class _Done:
    """What has ended already: a collective that blocks, or one of a single rank."""

    def wait(self) -> None:
        pass


_DONE = _Done()


def label(axis: str, purpose: str, reduction: str = "", operation: str = "") -> AbstractContextManager[None]:
    """Label every collective that is issued inside, including those of torch's FSDP2 and pipelines.

    reduction: `sum` or `max`, which cannot be read from torch's call. operation: the operation that the calls implement
    together, if it is not the one that is issued.
    """
    return _Labelled(_known_label(axis, purpose, reduction, operation))


class _Labelled(AbstractContextManager[None]):
    """See `label`. A generator would take several times as long, for every collective."""

    __slots__ = ("_label", "_token")

    def __init__(self, label: Label):
        self._label = label

    def __enter__(self) -> None:
        self._token = _LABEL.set(self._label)

    def __exit__(self, *_: object) -> None:
        _LABEL.reset(self._token)


def _issue(
    function: Any, group: Group, purpose: str, async_op: bool, *arguments: Any, reduction: str = "", **options: Any
) -> Waitable:
    """Call a labelled collective of torch; time it as a wait if it blocks."""
    timed = nullcontext() if async_op else torch_private.in_stream()
    with label(group.axis, purpose, reduction), timed:
        work: Waitable = function(*arguments, group=group.process_group, async_op=async_op, **options) or _DONE
        return work


def backend_of(mesh: Mesh) -> str | None:
    """Return what carries the collectives of all ranks: shm, gloo (several hosts), or the backend that torch names for
    the device, which is nccl for CUDA; None for a single rank."""
    process_group = mesh.group(WORLD).process_group
    if process_group is None:
        return None
    if mesh.device.type != "cpu":
        backend: str = dist.get_default_backend_for_device(mesh.device)
        return backend
    return carrier(process_group)


def current_label() -> Label | None:
    """Return the innermost `label` of this thread."""
    return _LABEL.get()


def all_reduce(tensor: Tensor, group: Group, purpose: str, op: str = "sum", async_op: bool = False) -> Waitable:
    """Reduce `tensor` over the group, in place."""
    if group.size == 1:
        return _DONE
    if isinstance(group.process_group, SharedMemoryGroup):  # torch's checks take longer than a small sum
        with _Labelled(_known_label(group.axis, purpose, op)):
            return group.process_group.all_reduce(tensor, _OPERATIONS[op], async_op) or _DONE
    return _issue(dist.all_reduce, group, purpose, async_op, tensor, reduction=op, op=_OPERATIONS[op])


def all_gather(tensor: Tensor, group: Group, purpose: str, dim: int = 0) -> Tensor:
    """Concatenate the equal parts of all ranks along `dim`: (..., n, ...) -> (..., size * n, ...)."""
    if group.size == 1:
        return tensor
    parts = tensor.new_empty((group.size, *tensor.shape))
    all_gather_into(parts.flatten(0, 1) if tensor.dim() else parts, tensor.contiguous(), group, purpose)
    return parts.movedim(0, dim).flatten(dim, dim + 1)  # a view if `dim` is 0


def reduce_scatter(tensor: Tensor, group: Group, purpose: str, dim: int = 0) -> Tensor:
    """Sum over the group, return this rank's equal part along `dim`: (..., size * n, ...) -> (..., n, ...)."""
    if group.size == 1:
        return tensor
    assert tensor.shape[dim] % group.size == 0, f"dim {dim} of {tuple(tensor.shape)} does not split by {group.size}"
    parts: Tensor = tensor.unflatten(dim, (group.size, -1)).movedim(dim, 0).contiguous()
    mine = torch.empty_like(parts[0])
    reduce_scatter_into(mine, parts.flatten(0, 1) if mine.dim() else parts, group, purpose)
    return mine


def all_gather_into(output: Tensor, tensor: Tensor, group: Group, purpose: str, async_op: bool = False) -> Waitable:
    """Gather every rank's `tensor` (n, ...) into `output` (size * n, ...), both contiguous."""
    return _issue(_gather_into, group, purpose, async_op, output, tensor)


def reduce_scatter_into(output: Tensor, tensor: Tensor, group: Group, purpose: str, async_op: bool = False) -> Waitable:
    """Set `output` (n, ...) to this rank's part of the sum of `tensor` (size * n, ...)."""
    if tensor.device.type == "cpu" and not is_ours(group.process_group):
        exchange = _ExchangeAndSum(output, tensor, group, purpose)
        if async_op:
            return exchange
        exchange.wait()
        return _DONE
    return _issue(_reduce_into, group, purpose, async_op, output, tensor, reduction="sum")


class _ExchangeAndSum:
    """A reduce-scatter over gloo by an all-to-all; each rank sums its parts in rank order, in at least fp32.

    gloo's own is a complete all-reduce: twice the bytes and three times as slow (measured, 8 MB between two ranks).
    """

    def __init__(self, output: Tensor, tensor: Tensor, group: Group, purpose: str):
        self._output, self._tensor = output, tensor
        self._parts = torch.empty_like(tensor)
        with label(group.axis, purpose, "sum", "reduce_scatter"):
            self._work = dist.all_to_all_single(self._parts, tensor, group=group.process_group, async_op=True)
        self._size = group.size

    def wait(self) -> object:
        """Wait for the exchange and compute the sum."""
        self._work.wait()
        return torch.sum(self._parts.view(self._size, *self._output.shape), 0, out=self._output)


def all_to_all(
    output: Tensor,
    tensor: Tensor,
    group: Group,
    purpose: str,
    output_sizes: Sequence[int] | None = None,
    input_sizes: Sequence[int] | None = None,
    async_op: bool = False,
) -> Waitable:
    """Send parts of `tensor` along dim 0 to the members in turn, and receive theirs into `output` in turn.

    sizes: rows to and from each member, which may be 0; None: equal parts. Both tensors are contiguous.
    """
    assert output.is_contiguous(), "gloo fills a non-contiguous output wrongly, without an error"
    assert tensor.is_contiguous(), "an all-to-all sends contiguous tensors"
    if group.size == 1:
        output.copy_(tensor)
        return _DONE
    arriving, leaving = (None if sizes is None else list(sizes) for sizes in (output_sizes, input_sizes))
    return _issue(dist.all_to_all_single, group, purpose, async_op, output, tensor, arriving, leaving)


def broadcast(tensor: Tensor, group: Group, purpose: str, source: int = 0, async_op: bool = False) -> Waitable:
    """Overwrite `tensor` with that of the group's member number `source`."""
    if group.size == 1:
        return _DONE
    return _issue(dist.broadcast, group, purpose, async_op, tensor, src=group.ranks[source])


def reduce(tensor: Tensor, group: Group, purpose: str, destination: int = 0, async_op: bool = False) -> Waitable:
    """Sum into `tensor` of the group's member number `destination`; the others' tensors are undefined afterwards."""
    if group.size == 1:
        return _DONE
    return _issue(dist.reduce, group, purpose, async_op, tensor, reduction="sum", dst=group.ranks[destination])


def exchange(
    sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], group: Group, purpose: str
) -> list[dist.Work]:
    """Start messages, (tensor, member number) each, as one batch. NCCL needs this if two members send both ways."""
    operations = [(dist.isend, sends), (dist.irecv, receives)]
    batch = [
        dist.P2POp(operation, tensor, group.ranks[peer], group.process_group)
        for operation, messages in operations
        for tensor, peer in messages
    ]
    with label(group.axis, purpose):
        works: list[dist.Work] = dist.batch_isend_irecv(batch)
        return works


def gather_json(value: Any, mesh: Mesh) -> list[Any]:
    """Return the JSON-ready `value` of every rank, by rank, on every rank. Collective over the world.

    The values are JSON text in byte tensors: nothing is unpickled.
    """
    group = mesh.group(WORLD)
    if group.size == 1:
        return [json.loads(json.dumps(value))]
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(mesh.device)
    length = torch.tensor([data.numel()], device=mesh.device)
    lengths = all_gather(length, group, "control").tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=mesh.device)
    padded[: data.numel()] = data
    rows = all_gather(padded, group, "control").view(group.size, -1).cpu()
    return [json.loads(row[:count].numpy().tobytes()) for row, count in zip(rows, lengths)]
