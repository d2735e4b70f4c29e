"""Two passes of one rank that take turns: one computes while the other waits for communication.

The second pass runs in a thread of its own, because autograd runs a backward pass to its end: only its thread can stop
it half-way without cutting the graph. A pass hands the turn over where it would wait, never by time: so all ranks with
the same modules issue their collectives in the same order, and no two operations of a rank run at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
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
        self.current = 0
        self.error: BaseException | None = None
        self.resume = threading.Semaphore(0), threading.Semaphore(0)  # of each: released when its turn comes
        self.both_run = True

    def hand_over(self) -> None:
        own = self.current
        self.current = 1 - own
        self.resume[1 - own].release()
        self.resume[own].acquire()
        if self.error is not None:
            raise self.error

    def end(self, own: int, error: BaseException | None = None) -> None:
        """A pass has ended: the other one goes on alone, or ends at its next turn if this one has failed."""
        self.error, self.both_run, self.current = error or self.error, error is not None, 1 - own
        self.resume[1 - own].release()


class Turns:
    """The turns of the two passes that `run` runs at a time. device: on which both compute."""

    def __init__(self, device: torch.device):
        self._device, self._thread = device, BackgroundThread("second pass")
        self._pair: _Pair | None = None

    def hand_over(self) -> None:
        """Let the other pass compute until it waits or ends. Does nothing where no other pass runs. Raises what it has
        raised. Called in whichever thread runs the pass: on a device, autograd has its own."""
        if self._pair is not None and self._pair.both_run:
            self._pair.hand_over()

    def let_other_end(self) -> None:
        """Hand over until no other pass runs."""
        while self._pair is not None and self._pair.both_run:
            self._pair.hand_over()

    def run(self, first: Callable[[], T], second: Callable[[], None]) -> T:
        """Run both passes, `first` in this thread, and return its result when both have ended. Raises what either has
        raised."""
        pair = self._pair = _Pair()
        run_second = partial(self._run_second, second, pair, torch_private.current_dispatch_modes())
        ended = self._thread.run(partial(copy_context().run, run_second))
        try:
            result = first()
        except BaseException as error:
            pair.end(0, error)
            raise
        pair.end(0)
        ended.result()
        return result

    def _run_second(self, second: Callable[[], None], pair: _Pair, modes: list[Any]) -> None:
        pair.resume[1].acquire()
        if pair.error is not None:
            return
        on_device = torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
        with torch_private.dispatch_modes(modes), on_device:
            try:
                second()
            except BaseException as error:
                pair.end(1, error)
                raise
        pair.end(1)
