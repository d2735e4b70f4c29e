"""A thread that carries out what it is given, in order, under the dispatch modes of who gave it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from parallelrun import torch_private


class Job:
    """Something that was put into a Queue. `wait` returns when it is done, or raises what it raised."""

    def __init__(self, run: Callable[[], None]):
        self._run: Callable[[], None] | None = run
        self._modes = torch_private.current_dispatch_modes()
        self._done = threading.Event()
        self._error: BaseException | None = None

    def carry_out(self) -> None:
        """Once, by the queue's thread."""
        assert self._run is not None, "a job is carried out once"
        try:
            with torch_private.dispatch_modes(self._modes):
                self._run()
        except BaseException as error:  # whatever it is, who waits must hear of it
            self._error = error
        self._run = None  # it holds the tensor, and the process group that the queue belongs to
        self._modes = []
        self._done.set()

    def wait(self) -> None:
        """Until it is done."""
        torch_private.timed(self._done.wait)
        if self._error is not None:
            raise self._error


class Queue:
    """Jobs are carried out one after the other. The thread ends with the Queue, and never keeps a process alive."""

    def __init__(self, name: str):
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        threading.Thread(target=_carry_out_all, args=(self._jobs,), name=name, daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def put(self, run: Callable[[], None]) -> Job:
        """Have `run` carried out after all that was put before; returns at once."""
        job = Job(run)
        self._jobs.put(job)
        return job


def _carry_out_all(jobs: SimpleQueue[Any]) -> None:
    while (job := jobs.get()) is not None:
        job.carry_out()
        del job  # or the last one would live until the next comes
