"""SIGINT and the signals that ask the program to stop. None is lost, whenever it arrives.

An exception that a signal handler raises may be dropped: Python does so in the hooks of `os.fork`, in destructors and
in callbacks of native code, and an interrupted import may raise, or catch, anything. So a dropped one is raised again
soon, and `handlers`, which begins each phase that handles signals itself, raises what has not ended the program.

Imports only the smallest modules of the standard library: a scheduler may send a signal in a job's first second.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType
    from typing import Any

    Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None

STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # Slurm announces preemption by SIGTERM or SIGUSR1
AGAIN_S = 0.02  # until a dropped exception is raised again: a fork's hooks take a tenth of it
_raised: list[int] = []  # signals whose exception should end the program
_handled: list[int] = []  # signals that a phase of the program has handled itself


class Terminated(BaseException):
    """A stop signal came while no other code handled it."""


@contextlib.contextmanager
def raising(ends: bool = False) -> Iterator[None]:
    """Let SIGINT and the stop signals unwind the stack. Ignored signals (nohup) stay ignored.

    Every SIGINT does, but of stop signals only the first, so that a second one does not interrupt the unwinding.
    ends: the process ends after the block, with the exit code that is known then: later signals are ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _raised.clear()
    _handled.clear()
    before: dict[int, Handler] = {}
    hook = sys.unraisablehook

    def dropped(unraisable: sys.UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, (KeyboardInterrupt, Terminated)):
            error = unraisable.exc_value or unraisable.exc_type()
            signal.signal(signal.SIGALRM, lambda *_: _raise_again(error))
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        elif not _raised:  # else it follows from the one that was dropped
            hook(unraisable)

    sys.unraisablehook = dropped
    try:
        _set((signal.SIGINT, *STOP_SIGNALS), _raise, before)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = hook
        for number, old in before.items():
            if signal.getsignal(number) != signal.SIG_IGN:  # a rank ignores them when its exit code is known
                signal.signal(number, signal.SIG_IGN if ends else old)


@contextlib.contextmanager
def handlers(numbers: Iterable[int], handler: Callable[[int, object], None]) -> Iterator[None]:
    """Handle signals by `handler` for a while, except those that nohup or a shell has set to be ignored.

    Only the main thread has handlers; parallel Hydra launchers run jobs in other threads.
    """
    if threading.current_thread() is not threading.main_thread():
        numbers = ()

    def handle(number: int, frame: object) -> None:
        _handled.append(number)
        handler(number, frame)

    before: dict[int, Handler] = {}
    try:
        _set(numbers, handle, before)
        raise_pending()
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextlib.contextmanager
def postponed() -> Iterator[None]:
    """Handle signals at the end of the block: an exception inside the import of native code may abort the process."""
    arrived: list[int] = []
    before: dict[int, Handler] = {}
    if threading.current_thread() is threading.main_thread():
        _set((signal.SIGINT, *STOP_SIGNALS), lambda number, _: arrived.append(number), before)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
        for number in arrived:
            signal.raise_signal(number)


def raise_pending() -> None:
    """Raise the exception of the first signal that has come and has not ended the program."""
    if pending := pending_name():
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise _exception(signal.Signals[pending])


def pending_name() -> str | None:
    """Return the name of the first signal whose exception should end the program; None if none has come."""
    return signal.Signals(_raised[0]).name if _raised else None


def _set(numbers: Iterable[int], handler: Callable[[int, object], None], before: dict[int, Handler]) -> None:
    """Set the handler of all signals that are not ignored. before: gets the handlers that they had."""
    for number in numbers:
        if (old := signal.getsignal(number)) != signal.SIG_IGN:
            before[number] = old
            signal.signal(number, handler)


def _raise(number: int, _frame: object) -> None:
    is_first = not (_raised or _handled)
    if is_first or number == signal.SIGINT:
        _raised.append(number)
        raise _exception(number)


def _raise_again(error: BaseException) -> None:
    raise error.with_traceback(None)


def _exception(number: int) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else Terminated(signal.Signals(number).name)
