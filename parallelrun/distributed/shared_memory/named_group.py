"""Methods that torch expects of a process group written in Python: its name, its store and calls of observers.

torch calls the methods of such a group directly, not through its dispatcher. So each tells the observers of
`parallelrun.distributed.torch_private` what it was called with, as torch's dispatcher does for its own groups.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from parallelrun.distributed import torch_private
from parallelrun.distributed.shared_memory.work import SharedMemoryWork

_Result = TypeVar("_Result", bound=SharedMemoryWork | None)
_Method = Callable[..., _Result]


def observed(operation: str) -> Callable[[_Method[_Result]], _Method[_Result]]:
    """Tell observers of a call: torch's name for it, and its arguments in the order of torch's operation."""

    def decorate(method: _Method[_Result]) -> _Method[_Result]:
        @wraps(method)
        def call(self: dist.ProcessGroup, *args: Any, **options: Any) -> _Result:
            if not torch_private.is_observed():
                return method(self, *args, **options)
            with torch_private.observed(operation, _arguments(operation, self, args)):
                return method(self, *args, **options)

        call.operation = operation  # type: ignore[attr-defined]
        return call

    return decorate


def is_operation(method: object) -> bool:
    """Return whether a method is one that `observed` has decorated."""
    return hasattr(method, "operation")


def _arguments(operation: str, group: dist.ProcessGroup, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments in the order of torch's operation: (tensors, group, peer, tag) of messages."""
    if operation in ("send", "recv_"):
        return (args[0], group, *args[1:])
    return (*args, group)


class NamedGroup(dist.ProcessGroup):
    """A process group without C++ backends, in which torch keeps the names of other groups."""

    _group_name = _description = ""

    def __init__(self, store: Any, rank: int, size: int):
        # torch's constructor with a store makes a group that does not call Python methods
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._store = store

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc

    def getGroupName(self) -> str:
        return self._group_name

    def getGroupDesc(self) -> str:
        return self._description

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def getBackendName(self) -> str:
        return "shm"

    def name(self) -> str:
        return "shm"

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def get_group_store(self) -> Any:
        return self._store
