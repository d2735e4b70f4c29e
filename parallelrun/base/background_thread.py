"""A thread that runs functions beside its owner, one after another."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue


class BackgroundThread:
    """A thread that runs functions one after another, from the first on. It ends with the process, or with this object.

    A failed rank must not wait for a disk or for peers, so the process does not wait for it. The caller that starts a
    thread waits until it runs, which takes many milliseconds where ranks share cores: so it is started once.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = SimpleQueue()
        self._runs = False

    def run(self, function: Callable[[], None]) -> Future[None]:
        """Run the function beside the caller. Return its end, with what it has raised."""
        if not self._runs:
            self._runs = True
            threading.Thread(target=_run_jobs, args=(self._jobs,), name=self._name, daemon=True).start()
            weakref.finalize(self, self._jobs.put, None)
        future: Future[None] = Future()
        self._jobs.put((function, future))
        return future


def _run_jobs(jobs: SimpleQueue[tuple[Callable[[], None], Future[None]] | None]) -> None:
    while (job := jobs.get()) is not None:
        function, future = job
        try:
            function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        del job, function, future  # while the thread waits, it must not keep what these refer to
