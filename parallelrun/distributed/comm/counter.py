"""Observers that count and name all c10d operations, including those of torch's FSDP2 and pipelines."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from parallelrun.distributed import comm, torch_private
from parallelrun.distributed.mesh import Mesh
from parallelrun.distributed.sequences import Lane
from parallelrun.planner.contract.collective import Collective

if TYPE_CHECKING:
    from typing_extensions import Self

ENGINE = "engine"


def _tensors(value: Any) -> list[Tensor]:
    """Return a tensor, or every tensor in nested lists."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, list | tuple) else []


# c10d operation -> (our name, index of the argument that is the full-size buffer, or None if its bytes are not counted,
# index of the argument that the rank sends)
_COUNTED: dict[str, tuple[str, int | None, int]] = {
    "allreduce_": ("all_reduce", 0, 0),
    "allreduce_coalesced_": ("all_reduce", 0, 0),
    "broadcast_": ("broadcast", 0, 0),
    "allgather_": ("all_gather", 0, 1),
    "_allgather_base_": ("all_gather", 0, 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 0, 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1, 1),
    "reduce_scatter_": ("reduce_scatter", 1, 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1, 1),
    "alltoall_base_": ("all_to_all", 1, 1),
    "alltoall_": ("all_to_all", 1, 1),
    "send": ("send", 0, 0),
    "recv_": ("recv", None, 0),
    "recv_any_source_": ("recv", None, 0),
    "reduce_": ("reduce", 0, 0),
    "gather_": ("gather", 1, 1),
    "scatter_": ("scatter", 1, 1),
}
_NO_GROUPS = frozenset((Tensor, list, tuple, int, bool, type(None)))
_PURPOSES = {tag: purpose for purpose, tag in comm.MESSAGE_TAGS.items()}


def _group(args: tuple[Any, ...]) -> dist.ProcessGroup | None:
    """Return the process group among the arguments of a c10d operation."""
    for value in args:
        if type(value) in _NO_GROUPS:  # torch's test of an instance is written in Python
            continue
        if isinstance(value, dist.ProcessGroup):
            return value
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value)
    return None


def _tensor_text(tensors: Sequence[Tensor]) -> str:
    """Describe tensors by dtype, shape and bytes: `float32 4x8 (128 bytes)`.

    A scalar has shape 1, because torch 2.11's pipelines send a scalar that is received as a vector of one element.
    """
    shapes = " + ".join("x".join(map(str, tensor.shape)) or "1" for tensor in tensors)
    dtypes = ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors}))
    return f"{dtypes} {shapes} ({sum(tensor.nbytes for tensor in tensors)} bytes)"


def _purpose(operation: str, args: tuple[Any, ...]) -> str:
    """Return the purpose of an unlabelled call by the tag of a message (tensors, group, peer, tag), else `engine`."""
    return _PURPOSES.get(args[3], ENGINE) if operation in ("send", "recv") and len(args) > 3 else ENGINE


def _peer(key: tuple[str, str, str], args: tuple[Any, ...]) -> int | None:
    """Return the other member of a message (tensors, group, peer, tag); None for a collective."""
    return args[2] if key[1] in ("send", "recv") else None


class _Kernels:
    """The kernels by which torch tells observers of its operations: registered while there is an observer.

    torch frees a removed kernel even while a thread that has entered it waits for the interpreter's lock: then another
    kernel runs, or the process crashes. So whoever lets another thread call c10d holds the kernels until it has ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_observers = 0
        self._remove: Callable[[], None] | None = None

    def acquire(self) -> None:
        """Register them for the first observer or holder."""
        with self._lock:
            self._num_observers += 1
            self._remove = self._remove or torch_private.observe(_COUNTED)

    def release(self) -> None:
        """Remove them after the last observer or holder."""
        with self._lock:
            self._num_observers -= 1
            if not self._num_observers and self._remove:
                self._remove()
                self._remove = None


KERNELS = _Kernels()  # one for the process, as torch's registry is


class _Observer:
    """Calls `_seen` for every c10d operation of its thread while it is entered, by (axis, operation, purpose).

    A call inside `comm.label` has that label. Any other call has the axis of its process group and the purpose `engine`
    (messages of pipeline schedules: the purpose of their tag).
    """

    def __init__(self, mesh: Mesh):
        self._axis_of_group, self._rank = mesh.axis_of_group, mesh.rank

    def __enter__(self) -> Self:
        KERNELS.acquire()
        torch_private.observers.set((*torch_private.observers.get(), self))
        return self

    def __exit__(self, *_: object) -> None:
        torch_private.observers.set(torch_private.observers.get()[:-1])
        KERNELS.release()

    def collective(self, name: str, args: tuple[Any, ...]) -> AbstractContextManager[object] | None:
        """See `torch_private.observe` and, for groups in shared memory, `torch_private.observed`."""
        if name not in _COUNTED:
            return None
        label = comm.current_label()
        operation = (label and label.operation) or _COUNTED[name][0]
        axis, purpose = label[:2] if label else (self._axis(_group(args)), _purpose(operation, args))
        return self._seen(name, (axis, operation, purpose), args)

    def _seen(
        self, name: str, key: tuple[str, str, str], args: tuple[Any, ...]
    ) -> AbstractContextManager[object] | None:
        """Return a context to enter around torch's operation `name`, if there is one. Called before it."""
        raise NotImplementedError

    def _lane(
        self, name: str, key: tuple[str, str, str], group: dist.ProcessGroup | None, peer: int | None
    ) -> Lane | None:
        """Return the lane of a call, whose n-th calls on its members belong together; None if it has none."""
        if group is None or name == "recv_any_source_":
            return None
        axis, ranks = self._axis(group), tuple(dist.get_process_group_ranks(group))
        if peer is None:
            return Lane(axis, ranks)
        pair = (self._rank, ranks[peer]) if key[1] == "send" else (ranks[peer], self._rank)
        return Lane(axis, pair, key[2])

    def _axis(self, group: dist.ProcessGroup | None) -> str:
        return self._axis_of_group.get(group.group_name, "other") if group is not None else "other"


class CollectiveNames(_Observer):
    """Names every collective by its axis and purpose in a trace of torch's profiler."""

    def _seen(self, name: str, key: tuple[str, str, str], args: tuple[Any, ...]) -> AbstractContextManager[object]:
        axis, operation, purpose = key
        return record_function(f"{axis} {purpose}: {operation}")


class _Call(NamedTuple):
    """The entry of a collective or message in the records. lane: None if the call is counted only."""

    lane: Lane | None
    text: str
    num_bytes: int


class CommunicationCounter(_Observer):
    """Counts calls and payload bytes by (axis, operation, purpose) while it is entered.

    The payload is the full-size buffer of a collective, or the tensor of a message at its sender. note: called with a
    description of each call before it is issued, which is the same on all participating ranks (for `sequences`).
    """

    def __init__(self, mesh: Mesh, note: Callable[[Lane, str], None] | None = None):
        super().__init__(mesh)
        self._note = note
        self._calls: dict[tuple[str, str, str], int] = defaultdict(int)
        self._bytes: dict[tuple[str, str, str], int] = defaultdict(int)
        self._known: dict[tuple[Any, ...], _Call] = {}  # a step issues the same few again and again
        self._lock = threading.Lock()  # a data strategy may send from a thread of its own

    def _seen(self, name: str, key: tuple[str, str, str], args: tuple[Any, ...]) -> None:
        group, label = _group(args), comm.current_label()
        tensors = _tensors(args[_COUNTED[name][1] or 0])
        peer = _peer(key, args)
        reduction = label.reduction if label else ""
        shapes = tuple([(tensor.dtype, tensor.shape) for tensor in tensors])
        signature = (name, key, group and group.group_name, peer, reduction, shapes)
        with self._lock:
            call = self._known.get(signature)
            if call is None:
                call = self._known[signature] = self._described(name, key, group, peer, reduction, tensors)
            if self._note and call.lane is not None:
                self._note(call.lane, call.text)
            self._calls[key] += 1
            self._bytes[key] += call.num_bytes

    def _described(
        self,
        name: str,
        key: tuple[str, str, str],
        group: dist.ProcessGroup | None,
        peer: int | None,
        reduction: str,
        tensors: Sequence[Tensor],
    ) -> _Call:
        """Describe a call without tensors that may differ between its members. tensors: those of its buffer."""
        _, operation, purpose = key
        is_counted = _COUNTED[name][1] is not None
        num_bytes = sum(tensor.nbytes for tensor in tensors) if is_counted else 0
        lane = self._lane(name, key, group, peer)
        if lane is None:
            return _Call(None, "", num_bytes)
        if peer is not None:
            return _Call(lane, f"a message of {_tensor_text(tensors)}, {purpose}", num_bytes)
        same = operation not in ("all_to_all", "reduce", "gather", "scatter") and is_counted
        how = f" ({reduction})" if reduction else ""
        of = f" of {_tensor_text(tensors)}" if same else ""
        return _Call(lane, f"{operation}{how}{of}, {purpose}", num_bytes)

    def rows(self) -> list[Collective]:
        """Return the counts, sorted by axis, operation and purpose."""
        return [Collective(*key, calls=self._calls[key], payload_bytes=self._bytes[key]) for key in sorted(self._calls)]


class Contributions(_Observer):
    """Records what this rank contributes to each collective and message while it is entered, in their order.

    contributions: (lane, `measure` of each tensor that the rank sends), before the collective begins. A rank that
    receives a message sends nothing. Control traffic is left out: its numbers differ from step to step.
    """

    def __init__(self, mesh: Mesh, measure: Callable[[Sequence[Tensor]], Tensor]):
        super().__init__(mesh)
        self._measure = measure
        self._lock = threading.Lock()
        self.contributions: list[tuple[Lane, Tensor]] = []

    def _seen(self, name: str, key: tuple[str, str, str], args: tuple[Any, ...]) -> None:
        lane = self._lane(name, key, _group(args), _peer(key, args))
        if lane is None or key[2] == "control":
            return
        measured = self._measure([] if key[1] == "recv" else _tensors(args[_COUNTED[name][2]]))
        with self._lock:
            self.contributions.append((lane, measured))
