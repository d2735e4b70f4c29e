"""Clocks that mark moments of a step: the host's, or a CUDA stream's."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


class HostClock:
    """The host's clock, for devices whose calls are synchronous.

    `mark` returns a moment; the `seconds` between two are known after `resolve` has waited for the last one.
    on_device: its moments are those of a stream, not of the host.
    """

    on_device = False
    mark: Callable[[], Any] = staticmethod(time.perf_counter)  # called about every 100 us: no Python of ours

    def resolve(self, last: Any) -> None:
        """Do nothing: the moment is in the past."""

    def seconds(self, began: Any, ended: Any) -> float:
        return float(ended - began)


class CudaClock(HostClock):
    """Events of the current CUDA stream: a moment is when the stream reaches the event."""

    on_device = True

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def resolve(self, last: torch.cuda.Event) -> None:
        last.synchronize()

    def seconds(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> float:
        return float(began.elapsed_time(ended)) / 1e3


def clock_of(device: torch.device) -> HostClock:
    """Return the clock on which a device's work is timed."""
    return HostClock() if device.type == "cpu" else CudaClock()
