"""A few bytes shared by the launcher and its ranks: who is where, who has finished, and whether to stop. Torch-free."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time
from dataclasses import dataclass

_HEADER, _SLOT = 64, 512
_NUMBER = struct.Struct("=q")  # the stop flag, then the step of the last failed save
_FAILED_SAVE_AT = 8
_BEAT = struct.Struct("=qqq32s")  # monotonic ns, step, number of beats, phase
_RETURNED_AT = 56
_TOLD = struct.Struct("=qq400s")  # exit code, order, what went wrong
_TOLD_AT = 64
NOT_RETURNED = -1


@dataclass(frozen=True)
class Beat:
    """The last heartbeat of a rank. `time_ns` is CLOCK_MONOTONIC, which all processes of a host share."""

    time_ns: int
    step: int
    count: int
    phase: str

    @property
    def age_s(self) -> float:
        return (time.monotonic_ns() - self.time_ns) / 1e9


class Board:
    """The shared bytes. A rank writes its own slot only, and the stop flag is only ever raised: no lock is needed."""

    def __init__(self, num_ranks: int, descriptor: int | None = None):
        """A new board, or the one behind an inherited `descriptor`."""
        size = _HEADER + num_ranks * _SLOT
        if descriptor is None:
            descriptor = _anonymous_file()
            os.ftruncate(descriptor, size)
        self.descriptor = descriptor
        self.num_ranks = num_ranks
        self._bytes = mmap.mmap(descriptor, size)

    @classmethod
    def fresh(cls, num_ranks: int) -> Board:
        """A new board on which every rank starts now."""
        board = cls(num_ranks)
        for rank in range(num_ranks):
            board.beat(rank, 0, "start")
            _NUMBER.pack_into(board._bytes, _HEADER + rank * _SLOT + _RETURNED_AT, NOT_RETURNED)
        return board

    def beat(self, rank: int, step: int, phase: str) -> None:
        """Rank `rank` is alive, in `phase` of `step`."""
        slot = _HEADER + rank * _SLOT
        count = _BEAT.unpack_from(self._bytes, slot)[2] + 1
        _BEAT.pack_into(self._bytes, slot, time.monotonic_ns(), step, count, phase.encode()[:32])

    def read(self, rank: int) -> Beat:
        """The last heartbeat of `rank`."""
        time_ns, step, count, phase = _BEAT.unpack_from(self._bytes, _HEADER + rank * _SLOT)
        return Beat(time_ns, step, count, phase.rstrip(b"\0").decode(errors="replace"))

    def set_returned(self, rank: int, code: int) -> None:
        """The worker of `rank` returned `code` by itself: its exit is no death."""
        _NUMBER.pack_into(self._bytes, _HEADER + rank * _SLOT + _RETURNED_AT, code)

    def returned(self, rank: int) -> int:
        """What the worker of `rank` returned, or NOT_RETURNED."""
        return _NUMBER.unpack_from(self._bytes, _HEADER + rank * _SLOT + _RETURNED_AT)[0]

    def tell(self, rank: int, exit_code: int, order: int, what: str) -> None:
        """How the worker of `rank` failed, where no file could be written (`failure.Failure`)."""
        text = what.encode(errors="replace")[:400]
        _TOLD.pack_into(self._bytes, _HEADER + rank * _SLOT + _TOLD_AT, exit_code, order, text)

    def told(self, rank: int) -> tuple[int, int, str] | None:
        """(exit code, order, what) of `tell`, or None."""
        exit_code, order, text = _TOLD.unpack_from(self._bytes, _HEADER + rank * _SLOT + _TOLD_AT)
        return (exit_code, order, text.rstrip(b"\0").decode(errors="replace")) if exit_code else None

    def request_stop(self) -> None:
        """Ask every rank to finish its step, save and leave."""
        _NUMBER.pack_into(self._bytes, 0, 1)

    def stop_requested(self) -> bool:
        return bool(_NUMBER.unpack_from(self._bytes, 0)[0])

    def set_failed_save(self, step: int) -> None:
        """The checkpoint of `step` could not be written, and the training goes on."""
        _NUMBER.pack_into(self._bytes, _FAILED_SAVE_AT, step)

    def failed_save(self) -> int:
        """The last step whose checkpoint could not be written; 0 when none failed."""
        return _NUMBER.unpack_from(self._bytes, _FAILED_SAVE_AT)[0]


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("parallelrun-board")
    with tempfile.TemporaryFile() as file:  # macOS; it has no name once open
        return os.dup(file.fileno())
