"""The objective of a sweep's point: the number that an optimizing sweeper (hydra/sweeper=optuna) gets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.base.wording import did_you_mean
from parallelrun.report.sweeps.sweep_rows import FINISHED

DEFAULTS = {"run": "val_loss", "bench": "median_s", "verify": "max_error.params", "plan": "step_time_predicted_s"}


class Pruned(Exception):
    """A point without an objective. Sweepers count the exception as a failed trial and continue."""


def objective(row: Mapping[str, Any], key: str | None, verb: str) -> float:
    """The number under `key` (None: the verb's default) in a finished point's row.

    Raises Pruned if the point was refused, failed or has no finite number; ConfigError for an unknown key.
    """
    if row["state"] not in FINISHED:
        raise Pruned(f"point {row['point']} was {row['state']}: {row.get('reason', '')}")
    key = key or DEFAULTS[verb]
    value = row.get(key)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    if key in row and value is None:
        raise Pruned(f"point {row['point']} has no finite {key}")
    numbers = [name for name, value in row.items() if isinstance(value, (int, float)) and not isinstance(value, bool)]
    cause = f"sweep.objective={key}: a {verb} records no number with this name"
    raise ConfigError(Problem(cause, "sweep.objective", did_you_mean(key, numbers)))
