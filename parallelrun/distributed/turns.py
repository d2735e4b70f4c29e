"""Two passes of one rank that take turns: one computes while the other waits for communication.

The second pass runs in a thread of its own, because autograd runs a backward pass to its end: only its thread can stop
it half-way without cutting the graph. A pass hands the turn over where it would wait, never by time: so all ranks with
the same modules issue their collectives in the same order, and no two operations of a rank run at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

import torch

from parallelrun.base.background_thread import BackgroundThread
from parallelrun.distributed import torch_private

T = TypeVar("T")


class _Pair:
    """Two passes under way. current: the one whose turn it is. error: what one of them has raised."""

    def __init__(self) -> None:
        self.current, self.both_run = 0, True
        self.error: BaseException | None = None
        self.resume = threading.Semaphore(0), threading.Semaphore(0)  # of each: released when its turn comes

    def hand_over(self) -> None:
        own, self.current = self.current, 1 - self.current
        self.resume[1 - own].release()
        self.resume[own].acquire()
        if self.error is not None:
            raise self.error

    @contextmanager
    def running(self, own: int) -> Iterator[None]:
        """Return a context for a pass. Behind it the other one goes on alone; after an error, to its next turn."""
        try:
            yield
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.both_run, self.current = self.error is not None, 1 - own
            self.resume[1 - own].release()


class Turns:
    """The turns of the two passes that `run` runs at a time. device: on which both compute."""

    def __init__(self, device: torch.device):
        self._device, self._thread = device, BackgroundThread("second pass")
        self._pair: _Pair | None = None

    def hand_over(self) -> bool:
        """Let the other pass compute until it waits or ends; return whether there was one. Raises what it has raised.
        Called in whichever thread runs the pass: on a device, autograd has its own."""
        if self._pair is None or not self._pair.both_run:
            return False
        self._pair.hand_over()
        return True

    def let_other_end(self) -> None:
        """Go on alone."""
        while self.hand_over():
            pass

    def run(self, first: Callable[[], T], second: Callable[[], None]) -> T:
        """Run both passes, `first` in this thread, and return its result when both have ended. Raises what either has
        raised."""
        pair = self._pair = _Pair()
        run_second = partial(self._run_second, second, pair, torch_private.current_dispatch_modes())
        ended = self._thread.run(partial(copy_context().run, run_second))
        with pair.running(0):
            result = first()
        ended.result()
        return result

    def _run_second(self, second: Callable[[], None], pair: _Pair, modes: list[Any]) -> None:
        pair.resume[1].acquire()
        on_device = torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
        if pair.error is None:
            with torch_private.dispatch_modes(modes), on_device, pair.running(1):
                second()
