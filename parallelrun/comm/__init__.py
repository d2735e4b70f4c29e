"""Our own collectives: one place, each labelled with its axis and purpose so that it can be counted.

All of them are no-ops on a group of one. None is autograd-aware: the ways put them into their own operators.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar

import torch
import torch.distributed as dist
from torch import Tensor

from parallelrun import torch_private
from parallelrun.mesh import Group

_LABEL: ContextVar[tuple[str, str, str, str] | None] = ContextVar("parallelrun_comm_label", default=None)
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
# torch 2.13 renamed these and warns about the old names; 2.11 has only the old ones.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Tags by which the counter tells the messages of torch's pipeline schedules apart, which mix both in one call.
MESSAGE_TAGS = {"activations": 1, "gradients": 2}
REDUCTION_TAG = 3  # of the messages of an all-reduce that is written out: no other receive of the group may take them


@contextmanager
def label(axis: str, purpose: str, reduction: str = "", operation: str = "") -> Iterator[None]:
    """Name every collective sent inside, an engine of torch's included, as `purpose` over `axis`.

    reduction: `sum` or `max`, which torch does not let anyone read from a call. operation: what it is a part of, where
    that is not what is sent.
    """
    token = _LABEL.set((axis, purpose, reduction, operation))
    try:
        yield
    finally:
        _LABEL.reset(token)


@contextmanager
def _call(
    group: Group, purpose: str, reduction: str = "", blocks: bool = True, is_message: bool = False
) -> Iterator[None]:
    """`label` around a call of torch, timed as a wait where the caller is blocked (blocks) until it is over."""
    timed = torch_private.in_stream(is_message) if blocks else nullcontext()
    with label(group.axis, purpose, reduction), timed:
        yield


def current_label() -> tuple[str, str] | None:
    """(axis, purpose) of the innermost `label`, for the counter."""
    found = _LABEL.get()
    return found and found[:2]


def current_reduction() -> str:
    """The reduction of the innermost `label`: `sum`, `max`, or empty when nobody has said."""
    found = _LABEL.get()
    return found[2] if found else ""


def current_operation() -> str:
    """The operation that the innermost `label` says is being done; empty: the one that is sent."""
    found = _LABEL.get()
    return found[3] if found else ""


def all_reduce(tensor: Tensor, group: Group, purpose: str, op: str = "sum", async_op: bool = False) -> dist.Work | None:
    """Reduce `tensor` over the group, in place. With async_op the Work to wait for (None on a group of one)."""
    if group.size == 1:
        return None
    with _call(group, purpose, op, blocks=not async_op):
        return dist.all_reduce(tensor, op=_OPERATIONS[op], group=group.process_group, async_op=async_op)


def all_gather(tensor: Tensor, group: Group, purpose: str, dim: int = 0) -> Tensor:
    """Concatenate the equal parts of every rank along `dim`: (..., n, ...) -> (..., size * n, ...)."""
    if group.size == 1:
        return tensor
    parts = tensor.new_empty((group.size, *tensor.shape))
    with _call(group, purpose):
        _gather_into(parts.flatten(0, 1) if tensor.dim() else parts, tensor.contiguous(), group=group.process_group)
    return _join(parts, dim)


def reduce_scatter(tensor: Tensor, group: Group, purpose: str, dim: int = 0) -> Tensor:
    """Sum over the group, keep this rank's equal part along `dim`: (..., size * n, ...) -> (..., n, ...)."""
    if group.size == 1:
        return tensor
    assert tensor.shape[dim] % group.size == 0, f"dim {dim} of {tuple(tensor.shape)} does not split by {group.size}"
    parts = _cut(tensor, dim, group.size)
    mine = torch.empty_like(parts[0])
    reduce_scatter_into(mine, parts.flatten(0, 1) if mine.dim() else parts, group, purpose)
    return mine


def all_gather_into(output: Tensor, tensor: Tensor, group: Group, purpose: str, async_op: bool = False):
    """Raw form: `output` (size * n, ...) from every rank's `tensor` (n, ...), both contiguous. Returns the Work."""
    with _call(group, purpose, blocks=not async_op):
        return _gather_into(output, tensor, group=group.process_group, async_op=async_op)


def reduce_scatter_into(output: Tensor, tensor: Tensor, group: Group, purpose: str, async_op: bool = False):
    """Raw form: `output` (n, ...) is this rank's part of the sum of `tensor` (size * n, ...). Returns what to wait for;
    until then neither may be touched."""
    if dist.get_backend(group.process_group) == "gloo":
        exchange = _ExchangeAndSum(output, tensor, group, purpose)
        return exchange if async_op else exchange.wait()
    with _call(group, purpose, "sum", blocks=not async_op):
        return _reduce_into(output, tensor, group=group.process_group, async_op=async_op)


class _ExchangeAndSum:
    """A reduce-scatter over gloo, whose own is a whole all-reduce: twice the bytes, and three times as long (measured,
    8 MB between two ranks). Parts go straight to their owner, who sums them in rank order, in at least fp32 inside."""

    def __init__(self, output: Tensor, tensor: Tensor, group: Group, purpose: str):
        self._output, self._tensor = output, tensor
        self._parts = torch.empty_like(tensor)
        with label(group.axis, purpose, "sum", "reduce_scatter"):
            self._work = dist.all_to_all_single(self._parts, tensor, group=group.process_group, async_op=True)
        self._size = group.size

    def wait(self) -> None:
        self._work.wait()
        torch.sum(self._parts.view(self._size, *self._output.shape), 0, out=self._output)


def all_to_all(
    output: Tensor,
    tensor: Tensor,
    group: Group,
    purpose: str,
    output_sizes: Sequence[int] | None = None,
    input_sizes: Sequence[int] | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """Raw form: the parts of `tensor` along dim 0 go to the members in turn, theirs come into `output` in turn.

    sizes: rows to and from every member, which may be 0; None: equal parts. Both tensors contiguous; until the Work
    that async_op returns is waited for, neither may be touched.
    """
    assert output.is_contiguous(), "gloo fills a non-contiguous output wrongly without a word"
    assert tensor.is_contiguous(), "an all-to-all sends what is contiguous"
    if group.size == 1:
        output.copy_(tensor)
        return None
    arriving, leaving = (None if sizes is None else list(sizes) for sizes in (output_sizes, input_sizes))
    with _call(group, purpose, blocks=not async_op):
        return dist.all_to_all_single(output, tensor, arriving, leaving, group=group.process_group, async_op=async_op)


def broadcast(tensor: Tensor, group: Group, purpose: str, source: int = 0, async_op: bool = False) -> dist.Work | None:
    """Overwrite `tensor` with that of the group's member number `source`. With async_op the Work to wait for."""
    if group.size == 1:
        return None
    with _call(group, purpose, blocks=not async_op):
        return dist.broadcast(tensor, src=group.ranks[source], group=group.process_group, async_op=async_op)


def reduce(
    tensor: Tensor, group: Group, purpose: str, destination: int = 0, async_op: bool = False
) -> dist.Work | None:
    """Sum into `tensor` of the group's member number `destination`; what the others hold after is undefined."""
    if group.size == 1:
        return None
    with _call(group, purpose, "sum", blocks=not async_op):
        return dist.reduce(tensor, dst=group.ranks[destination], group=group.process_group, async_op=async_op)


def send(tensor: Tensor, destination: int, group: Group, purpose: str) -> None:
    """Blocking send to the group's member number `destination` (rendezvous on gloo: returns when it is received)."""
    with _call(group, purpose, is_message=True):
        dist.send(tensor.contiguous(), dst=group.ranks[destination], group=group.process_group)


def recv(tensor: Tensor, source: int, group: Group, purpose: str) -> None:
    """Blocking receive into the contiguous `tensor` from the group's member number `source`."""
    assert tensor.is_contiguous(), "gloo fills a non-contiguous buffer wrongly without a word"
    with _call(group, purpose, is_message=True):
        dist.recv(tensor, src=group.ranks[source], group=group.process_group)


def isend(tensor: Tensor, destination: int, group: Group, purpose: str, tag: int = 0) -> dist.Work:
    """Start sending the contiguous `tensor` to member number `destination`; it may not change until the Work is done.

    On gloo messages between two members with the same tag arrive in the order in which they were started.
    """
    with label(group.axis, purpose):
        work = dist.isend(tensor, dst=group.ranks[destination], group=group.process_group, tag=tag)
    assert work is not None, "only members of a group send in it"
    return work


def irecv(tensor: Tensor, source: int, group: Group, purpose: str, tag: int = 0) -> dist.Work:
    """Start receiving into the contiguous `tensor`. On gloo the Work never looks completed until it is waited for."""
    assert tensor.is_contiguous(), "gloo fills a non-contiguous buffer wrongly without a word"
    with label(group.axis, purpose):
        work = dist.irecv(tensor, src=group.ranks[source], group=group.process_group, tag=tag)
    assert work is not None, "only members of a group receive in it"
    return work


def exchange(
    sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], group: Group, purpose: str
) -> list[dist.Work]:
    """Start messages as one batch: (tensor, member number) each. What NCCL needs where two members send both ways."""
    operations = [(dist.isend, sends), (dist.irecv, receives)]
    batch = [
        dist.P2POp(operation, tensor, group.ranks[peer], group.process_group)
        for operation, messages in operations
        for tensor, peer in messages
    ]
    with label(group.axis, purpose):
        return dist.batch_isend_irecv(batch)


def barrier(group: Group) -> None:
    """Wait for every member. An all-reduce of one element: works alike on gloo and NCCL."""
    if group.size > 1:
        device = "cuda" if dist.get_backend(group.process_group) == "nccl" else "cpu"
        all_reduce(torch.zeros(1, device=device), group, "control")


def _join(parts: Tensor, dim: int) -> Tensor:
    """(size, ..., n, ...) -> (..., size * n, ...): a view when nothing lies before `dim`."""
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def _cut(tensor: Tensor, dim: int, size: int) -> Tensor:
    """(..., size * n, ...) -> contiguous (size, ..., n, ...)."""
    return tensor.unflatten(dim, (size, -1)).movedim(dim, 0).contiguous()
