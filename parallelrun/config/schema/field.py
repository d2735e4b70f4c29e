"""A field of a configuration dataclass, with its help and bounds, and the bounds that many fields share."""

from __future__ import annotations

from dataclasses import field
from typing import Any

# Counts that the planner enumerates one by one (samples of a step, layers) are bounded by the time that this takes;
# sizes are bounded far above what any machine can hold.
SAMPLES, LAYERS, COUNT, SIZE, IMAGE = 2**20, 10_000, 2**20, 2**30, 2**16


def key(
    default: Any,
    help: str = "",
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    plausible: tuple[float, float] | None = None,
    unit: str = "",
    choices: tuple[str, ...] = (),
    of_degrees: bool = False,
) -> Any:
    """A field of the configuration; a callable default is a factory.

    Bounds: at least `least`, greater than `above`, at most `most`, less than `below`, one of `choices`. plausible: the
    least and the most that a machine has, in `unit`; a value outside is in another unit (`config.units`). of_degrees: a
    value suits certain degrees only, so a run that continues another under other degrees does not take it over.
    """
    bounds = dict(least=least, above=above, most=most, below=below, choices=choices)
    metadata = dict(help=help, **bounds, plausible=plausible, unit=unit, of_degrees=of_degrees)
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)
