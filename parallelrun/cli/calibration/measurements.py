"""The measurements of a calibration: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WALL, CPU = "wall", "cpu"


@dataclass(frozen=True)
class Sample:
    """Seconds on the wall, CPU seconds of all ranks over the cores they can use, and the spread of the wall time:
    interquartile range over median."""

    wall_s: float
    cpu_s: float
    spread: float = 0.0

    def seconds(self, clock: str) -> float:
        """By one of the two clocks."""
        return self.cpu_s if clock == CPU else self.wall_s


@dataclass(frozen=True)
class TimedProduct:
    """A matrix product: rows x inner times inner x columns. On CPUs by one thread, while every core does one."""

    rows: int
    inner: int
    columns: int
    sample: Sample
    precision: str = "fp32"

    def flops_s(self, clock: str) -> float:
        """FLOP/s by one of the two clocks."""
        return 2.0 * self.rows * self.inner * self.columns / self.sample.seconds(clock)


@dataclass(frozen=True)
class TimedExchange:
    """One call of a collective over `ranks` ranks. num_bytes: payload, as `plan.structure.Collective` counts it."""

    operation: str
    num_bytes: int
    ranks: int
    sample: Sample


@dataclass(frozen=True)
class TimedStep:
    """A training step. config: the frozen configuration of its run."""

    name: str
    config: str
    sample: Sample


@dataclass(frozen=True)
class Measurements:
    """Everything that was measured. clock: wall, or cpu on a machine that others use too. peaks: FLOP/s by precision.

    facts: date, host, versions and device.
    busy_share: the part of the wall time in which ranks had a core. memory_bytes_s: the fastest copy, in caches too.
    skipped: what there was no time for, or what failed.
    """

    clock: str
    device: str
    cores: int
    facts: Mapping[str, Any]
    peaks: Mapping[str, float]
    memory_bytes_s: float
    multiprocessors: int = 0
    memory_bytes: float = 0.0
    products: tuple[TimedProduct, ...] = ()
    exchanges: tuple[TimedExchange, ...] = ()
    steps: tuple[TimedStep, ...] = ()
    skipped: tuple[str, ...] = ()
    seconds: float = 0.0
    busy_share: float = 1.0
