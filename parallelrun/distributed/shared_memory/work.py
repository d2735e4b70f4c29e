"""torch's handle of an operation in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallelrun.distributed import torch_private
from parallelrun.distributed.shared_memory.engine import Engine, PendingOperation
from parallelrun.distributed.shared_memory.messages import Message


class SharedMemoryWork(dist.Work):
    """A Work of one or more operations. `results`: the tensors that they fill; `copies`: (target, contiguous stand-in).

    The operations advance while this process waits for any of its own; see `engine`.
    """

    def __init__(
        self,
        engine: Engine,
        operations: Sequence[PendingOperation],
        timeout_s: float,
        results: list[Tensor],
        copies: Sequence[tuple[Tensor, Tensor]] = (),
    ):
        super().__init__()
        self._engine, self._operations, self._timeout_s = engine, operations, timeout_s
        self._results, self._copies = results, copies

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end. Raises RuntimeError if a peer has ended or after `timeout` (None or 0: the group's)."""
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        torch_private.timed(lambda: self._wait(seconds if seconds > 0 else self._timeout_s), self._is_message)
        return True

    def _is_message(self) -> bool:
        return isinstance(self._operations[0], Message) if self._operations else False

    def _wait(self, seconds: float) -> None:
        for operation in self._operations:
            self._engine.wait(operation, seconds)
            if operation.error is not None:
                raise operation.error
        self._copy_out()

    def _copy_out(self) -> None:
        copies, self._copies = self._copies, ()
        for target, stand_in in copies:
            target.copy_(stand_in)

    def is_completed(self) -> bool:
        """Return whether all have ended; advance them first."""
        if not all(operation.done for operation in self._operations):
            with self._engine.lock:
                self._engine.progress()
        done = all(operation.done for operation in self._operations)
        if done and self.exception() is None:
            self._copy_out()
        return done

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        """Return the first error."""
        return next((operation.error for operation in self._operations if operation.error is not None), None)

    def result(self) -> list[Tensor]:
        """Return the tensors that the operation fills."""
        return self._results

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a future that is done: nothing would advance the operation while its owner waits in C++."""
        self.wait()
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._results)
        return future
