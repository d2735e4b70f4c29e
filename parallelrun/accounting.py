"""Counting what is really sent: a dispatch mode over c10d operations, torch's own engines included."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallelrun import comm
from parallelrun.mesh.runtime import Mesh
from parallelrun.plan.structure import Collective

ENGINE = "engine"


def _nbytes(value: Any) -> int:
    """Bytes of a tensor or of every tensor in nested lists."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(_nbytes(item) for item in value) if isinstance(value, list | tuple) else 0


# c10d operation -> (our name, which argument is the full-size buffer; None: nothing is counted here)
_COUNTED: dict[str, tuple[str, int | None]] = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "allgather_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
    "alltoall_": ("all_to_all", 1),
    "send": ("send", 0),
    "recv_": ("recv", None),
    "recv_any_source_": ("recv", None),
    "reduce_": ("reduce", 0),
    "gather_": ("gather", 1),
    "scatter_": ("scatter", 1),
}


def _purpose(operation: str, args: tuple) -> str:
    """Purpose of an unlabelled call: by the tag of a point-to-point message (tensors, group, peer, tag), else none."""
    by_tag = {tag: purpose for purpose, tag in comm.MESSAGE_TAGS.items()}
    return by_tag.get(args[3], ENGINE) if operation in ("send", "recv") and len(args) > 3 else ENGINE


class CommunicationCounter(TorchDispatchMode):
    """Counts calls and payload bytes by (axis, operation, purpose) while it is entered.

    Payload is the full-size buffer of a collective, the tensor of a point-to-point message at its sender. A call inside
    `comm.label` carries that label; any other is named by the axis of its process group, purpose `engine` (messages of
    pipeline schedules: by their tag).
    """

    def __init__(self, mesh: Mesh):
        super().__init__()
        self._axis_of_group = mesh.axis_of_group
        self._calls: dict[tuple[str, str, str], int] = defaultdict(int)
        self._bytes: dict[tuple[str, str, str], int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        namespace, _, name = func.name().partition("::")
        if namespace == "c10d":
            self._count(name.partition(".")[0], args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple) -> None:
        if name not in _COUNTED:
            return
        operation, buffer = _COUNTED[name]
        axis, purpose = comm.current_label() or (self._axis(args), _purpose(operation, args))
        key = (axis, operation, purpose)
        self._calls[key] += 1
        self._bytes[key] += _nbytes(args[buffer]) if buffer is not None else 0

    def _axis(self, args: tuple) -> str:
        for value in args:
            if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
                return self._axis_of_group.get(dist.ProcessGroup.unbox(value).group_name, "other")
        return "other"

    def rows(self) -> list[Collective]:
        """What was counted, sorted by axis, operation and purpose."""
        return [Collective(*key, calls=self._calls[key], payload_bytes=self._bytes[key]) for key in sorted(self._calls)]
