"""Signals that end the program: also those whose exception is dropped."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest

from parallelrun.base import stop_signals
from parallelrun.base.stop_signals import Terminated

EXCEPTION = {signal.SIGTERM: Terminated, signal.SIGUSR1: Terminated, signal.SIGINT: KeyboardInterrupt}
PATIENCE_S = 10.0


class _Dropping:
    """An object in whose destructor, from which Python drops exceptions, a signal arrives."""

    def __init__(self, number: int):
        self._number = number

    def __del__(self) -> None:
        signal.raise_signal(self._number)


@pytest.fixture
def no_handlers_left():
    """Restores the handlers of the test's process, and checks that the code under test has."""
    numbers = (signal.SIGINT, *stop_signals.STOP_SIGNALS)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    assert {number: signal.getsignal(number) for number in numbers} == before


@pytest.mark.parametrize("number", EXCEPTION, ids=lambda number: number.name)
def test_a_dropped_exception_is_raised_again(number, capfd, no_handlers_left):
    with pytest.raises(EXCEPTION[number]), stop_signals.raising():
        _Dropping(number)
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            time.sleep(0.001)
    assert "Exception ignored" not in capfd.readouterr().err


@pytest.mark.parametrize("number", EXCEPTION, ids=lambda number: number.name)
def test_a_swallowed_exception_is_raised_before_signals_are_handled_otherwise(number, no_handlers_left):
    with pytest.raises(EXCEPTION[number]), stop_signals.raising():
        with contextlib.suppress(BaseException):
            signal.raise_signal(number)
        with stop_signals.handlers((number,), lambda *_: None):
            pytest.fail("the signal has been lost")


def test_a_second_stop_signal_does_not_interrupt_the_unwinding(no_handlers_left):
    with pytest.raises(Terminated, match="SIGTERM"), stop_signals.raising():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGUSR1)


def test_a_handled_signal_is_not_raised_and_later_ones_do_not_raise_either(no_handlers_left):
    arrived: list[int] = []
    with stop_signals.raising():
        with stop_signals.handlers((signal.SIGTERM,), lambda number, _: arrived.append(number)):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # the scheduler's second one, while the status is written
        with stop_signals.handlers((signal.SIGTERM,), lambda number, _: arrived.append(number)):
            pass
    assert arrived == [signal.SIGTERM]


def test_a_postponed_signal_is_raised_at_the_end_of_the_block(no_handlers_left):
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt), stop_signals.raising():
        with stop_signals.postponed():
            signal.raise_signal(signal.SIGINT)
            done.append("native code has been imported")
        pytest.fail("the signal has been lost")
    assert done


def test_ignored_signals_stay_ignored(monkeypatch, no_handlers_left):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with stop_signals.raising():
            signal.raise_signal(signal.SIGHUP)
            with stop_signals.handlers((signal.SIGHUP,), lambda *_: pytest.fail("it was to be ignored")):
                signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signals_after_the_last_exit_code_change_nothing():
    pid = os.fork()
    if not pid:
        with stop_signals.raising(ends=True):
            pass
        signal.raise_signal(signal.SIGTERM)
        os._exit(75)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 75
