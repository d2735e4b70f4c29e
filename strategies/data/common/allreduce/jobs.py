"""A thread that runs jobs in order, each under the dispatch modes of the thread that submitted it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from parallelrun import torch_private


class Job:
    """A function in a Queue. `wait` returns when it has run, or raises its exception."""

    def __init__(self, run: Callable[[], None]):
        self._run: Callable[[], None] | None = run
        self._modes = torch_private.current_dispatch_modes()
        self._done = threading.Event()
        self._error: BaseException | None = None

    def carry_out(self) -> None:
        """Run the job; called once, by the queue's thread."""
        assert self._run is not None, "a job runs once"
        try:
            with torch_private.dispatch_modes(self._modes):
                self._run()
        except BaseException as error:  # every exception must reach the waiting thread
            self._error = error
        self._run = None  # it references the tensor and the process group that owns the queue
        self._modes = []
        self._done.set()

    def wait(self) -> None:
        """Wait until the job has run."""
        torch_private.timed(self._done.wait)
        if self._error is not None:
            raise self._error


class Queue:
    """Runs jobs one after the other. The thread ends with the Queue and never keeps a process alive."""

    def __init__(self, name: str):
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        threading.Thread(target=_carry_out_all, args=(self._jobs,), name=name, daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def put(self, run: Callable[[], None]) -> Job:
        """Run `run` after all jobs that were put before; return at once."""
        job = Job(run)
        self._jobs.put(job)
        return job


def _carry_out_all(jobs: SimpleQueue[Any]) -> None:
    while (job := jobs.get()) is not None:
        job.carry_out()
        del job  # or the last one would live until the next comes
