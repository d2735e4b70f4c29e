"""The measurements of a calibration: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sample:
    """Seconds, and their spread: interquartile range over median."""

    seconds: float
    spread: float = 0.0


@dataclass(frozen=True)
class TimedProduct:
    """A matrix product: rows x inner times inner x columns. On CPUs by one thread, while every core does one."""

    rows: int
    inner: int
    columns: int
    sample: Sample
    precision: str = "fp32"

    @property
    def flops_s(self) -> float:
        """FLOP/s."""
        return 2.0 * self.rows * self.inner * self.columns / self.sample.seconds


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
    """Everything that was measured. peaks: FLOP/s by precision.

    facts: date, host, versions and device. memory_bytes_s: the fastest copy, in caches too.
    skipped: what there was no time for, or what failed.
    """

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
