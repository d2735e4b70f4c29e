"""What a point of a sweep answers to Hydra's sweeper: the number that a sweeper with a search of its own optimizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from parallelrun.errors import ConfigError, Problem
from parallelrun.report.sweep import FINISHED
from parallelrun.wording import did_you_mean

DEFAULTS = {"run": "val_loss", "bench": "median_s", "verify": "max_error.params", "plan": "step_time_predicted_s"}


class Pruned(Exception):
    """A point without an objective. Sweepers count an exception as a failed trial, learn nothing from it and go on."""


def objective(row: Mapping[str, Any], key: str | None, verb: str) -> float:
    """The number that `key` (None: the verb's own) names in a finished point's row.

    Raises Pruned for a point that was refused, failed or gave no finite number, ConfigError for a key no row has.
    """
    if row["state"] not in FINISHED:
        raise Pruned(f"point {row['point']} was {row['state']}: {row.get('reason', '')}")
    key = key or DEFAULTS[verb]
    value = row.get(key)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    if key in row and value is None:
        raise Pruned(f"point {row['point']} has no finite {key}")
    numbers = [name for name, found in row.items() if isinstance(found, (int, float)) and not isinstance(found, bool)]
    what = f"sweep.objective={key}: the summary of a {verb} has no number of that name"
    raise ConfigError(Problem(what, "sweep.objective", did_you_mean(key, numbers)))
