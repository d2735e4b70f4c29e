"""Refuse rates and sizes that no machine has: they are in another unit."""

from __future__ import annotations

from parallelrun.base.errors import Problem
from parallelrun.config.keys import Key

# For a unit, the units that are written instead of it by mistake, each with its size in the right unit. The first one
# that makes a value plausible is suggested.
CONFUSED = {
    "GB": (("MB", 1e-3), ("B", 1e-9), ("TB", 1e3)),
    "GB/s": (("Gb/s", 1 / 8), ("MB/s", 1e-3), ("Mb/s", 1e-3 / 8), ("B/s", 1e-9), ("TB/s", 1e3)),
    "TFLOP/s": (("GFLOP/s", 1e-3), ("FLOP/s", 1e-12), ("PFLOP/s", 1e3)),
    "us": (("ns", 1e-3), ("ms", 1e3), ("s", 1e6)),
    "hours": (("seconds", 1 / 3600), ("years", 8766.0)),
    "seconds": (("ms", 1e-3), ("hours", 3600.0)),
}


def plausible_range(key: Key) -> str:
    """A clause with the plausible range of a key that has one, and what the key means."""
    assert key.plausible is not None, "asked only of keys that have a range"
    low, high = key.plausible
    return f"{low:g} to {high:g} {key.unit} are plausible ({key.help})"


def implausible(key: Key, name: str, value: float) -> list[Problem]:
    """The violation of the plausible range of `key` (called `name` in the message) by `value`, with the likely fix."""
    if key.plausible is None:
        return []
    low, high = key.plausible
    if low <= value <= high or (value == 0 and key.least == 0):
        return []
    cause = f"{name}={value:g}: {plausible_range(key)}"
    for unit, size in CONFUSED.get(key.unit, ()):
        right = float(f"{value * size:.4g}")
        if low <= right <= high:
            meant = f"{value:g} {unit} {'is' if value == 1 else 'are'} {right:g} {key.unit}"
            return [Problem(f"{cause}; {meant}", name, f"{name}={right:g}")]
    return [Problem(cause, name, f"{name}={low if value < low else high:g}")]
