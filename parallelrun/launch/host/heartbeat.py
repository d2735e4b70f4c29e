"""Files in memory that a launcher and its ranks share; nothing listens, and only their user can open them.

The heartbeat file reports progress and failures; in the other the ranks of one host meet.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, fields
from typing import TYPE_CHECKING, Any

from parallelrun.base.context import Pace

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

NOT_RETURNED = -1


@dataclass(frozen=True)
class Heartbeat:
    """The last sign of progress of a rank. `time_ns` is CLOCK_MONOTONIC, which all processes of a host share."""

    time_ns: int
    step: int
    phase: str

    @property
    def age_s(self) -> float:
        return (time.monotonic_ns() - self.time_ns) / 1e9


class _Slot(ctypes.Structure):
    _fields_ = [
        ("time_ns", ctypes.c_int64),
        ("step", ctypes.c_int64),
        ("phase", ctypes.c_char * 32),
        ("pace", ctypes.c_double * len(fields(Pace))),
        ("returned", ctypes.c_int64),
        ("exit_code", ctypes.c_int64),  # of a reported failure, else 0
        ("order", ctypes.c_int64),
        ("what", ctypes.c_char * 400),
    ]


class _Header(ctypes.Structure):
    _fields_ = [("stop", ctypes.c_int64), ("failed_save", ctypes.c_int64)]


class HeartbeatFile:
    """A header and one slot per rank. No lock is needed: a rank writes only its own slot, and `stop` is only set."""

    def __init__(self, num_ranks: int, descriptor: int | None = None, first_rank: int = 0):
        """Map the file behind the inherited `descriptor`, or a new file in which every rank starts now.

        The ranks are `first_rank` and the following.
        """
        size = ctypes.sizeof(_Header) + num_ranks * ctypes.sizeof(_Slot)
        self.descriptor = anonymous_file("heartbeats", size) if descriptor is None else descriptor
        memory = mmap.mmap(self.descriptor, size)
        self._header = _Header.from_buffer(memory)
        slots = (_Slot * num_ranks).from_buffer(memory, ctypes.sizeof(_Header))
        self._slots = dict(enumerate(slots, first_rank))
        if descriptor is None:
            for rank in self._slots:
                self._slots[rank].returned = NOT_RETURNED
                self.beat(rank, 0, "start")

    def beat(self, rank: int, step: int, phase: str) -> None:
        """Record that `rank` has reached `phase` of `step` now."""
        slot = self._slots[rank]
        slot.time_ns, slot.step, slot.phase = time.monotonic_ns(), step, phase.encode()[:32]

    def read(self, rank: int) -> Heartbeat:
        """Return the last heartbeat of `rank`."""
        slot = self._slots[rank]
        return Heartbeat(slot.time_ns, slot.step, slot.phase.decode(errors="replace"))

    def has_begun(self, rank: int) -> bool:
        """Return whether `rank` has imported its modules and built its model."""
        return self.read(rank).phase not in ("start", "build")

    def set_pace(self, rank: int, pace: Pace) -> None:
        """Record the pace of `rank`."""
        self._slots[rank].pace[:] = astuple(pace)

    def rows(self, pids: Mapping[int, int]) -> list[dict[str, Any]]:
        """Return what each rank of `pids` last reported, as rows of status.json, by rank."""
        rows = []
        for rank, pid in sorted(pids.items()):
            heartbeat = self.read(rank)
            row = {"rank": rank, "pid": pid, "host": socket.gethostname(), "step": heartbeat.step}
            row |= {"phase": heartbeat.phase, "silent_s": round(heartbeat.age_s, 3)}
            rows.append({**row, **asdict(Pace(*self._slots[rank].pace))})
        return rows

    def set_returned(self, rank: int, code: int) -> None:
        """Record that the worker of `rank` has returned `code`, so that its process may exit."""
        self._slots[rank].returned = code

    def returned(self, rank: int) -> int:
        """Return the code that the worker of `rank` has returned, or NOT_RETURNED."""
        return int(self._slots[rank].returned)

    def report_failure(self, rank: int, exit_code: int, order: int, message: str) -> None:
        """Record the `failure.Failure` of `rank` here, because it could not be written to a file."""
        slot = self._slots[rank]
        slot.exit_code, slot.order, slot.what = exit_code, order, message.encode(errors="replace")[:400]

    def reported_failure(self, rank: int) -> tuple[int, int, str] | None:
        """Return (exit code, order, what) of `report_failure`, or None."""
        slot = self._slots[rank]
        return (slot.exit_code, slot.order, slot.what.decode(errors="replace")) if slot.exit_code else None

    def request_stop(self) -> None:
        """Ask every rank to finish its step, save and exit."""
        self._header.stop = 1

    def stop_requested(self) -> bool:
        """Return whether the ranks were asked to stop."""
        return bool(self._header.stop)

    def set_failed_save(self, step: int) -> None:
        """Record that the checkpoint of `step` could not be written and that training continues."""
        self._header.failed_save = step

    def failed_save(self) -> int:
        """Return the last step whose checkpoint could not be written; 0 if none failed."""
        return int(self._header.failed_save)


def file_store(descriptor: int) -> Store:
    """Return the store in an `anonymous_file`. A rank that waits for a key looks every 10 ms."""
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    store: Store = FileStore(f"/proc/self/fd/{descriptor}")
    return store


def anonymous_file(name: str, size: int = 0) -> int:
    """Return the descriptor of a new file of zeros in memory, for this process and those that inherit it."""
    descriptor = os.memfd_create(f"parallelrun-{name}")
    os.ftruncate(descriptor, size)
    return descriptor
