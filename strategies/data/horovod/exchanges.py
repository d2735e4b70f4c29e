"""The exchange of one bucket, and the moments of its life: what the timeline and the stall warning tell."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from parallelrun.distributed.comm import Waitable


class WatchedExchange:
    """The exchange of one bucket. It starts and waits like the exchange that it wraps, and notes when.

    names: of the bucket's parameters. moments: of this step, in seconds of `perf_counter`: submitted, started, waited
    for, done. Another thread may read them at any time.
    """

    def __init__(self, names: tuple[str, ...], num_bytes: int, send: Callable[[], Waitable]):
        self.names, self.num_bytes, self._send = names, num_bytes, send
        self.moments: list[float] = []

    def start(self) -> Waitable:
        self.moments = [perf_counter()]
        self._work = self._send()
        self.moments.append(perf_counter())
        return self

    def wait(self) -> None:
        """Wait until the exchange has ended."""
        self.moments.append(perf_counter())
        self._work.wait()
        self.moments.append(perf_counter())

    @property
    def is_submitted(self) -> bool:
        return len(self.moments) >= 2

    @property
    def waits_s(self) -> float:
        """Seconds for which this rank has been waiting for the exchange; 0 while it does not wait."""
        moments = self.moments
        return perf_counter() - moments[2] if len(moments) == 3 else 0.0
