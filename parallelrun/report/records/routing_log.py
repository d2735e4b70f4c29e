"""Writes routing.jsonl, the statistics of layers with experts, and their means for other files."""

from __future__ import annotations

import statistics
from collections import deque
from pathlib import Path
from typing import Any

from parallelrun.base.records import RowFile

FILE = "routing.jsonl"
NUMBERS_WRITTEN = 2e7  # at most, per run: about 100 MB. Longer runs do not write every step
STEPS_AVERAGED = 10  # for first_max_vio and the last values of the summary; at most half of the run


class RoutingLog:
    """Writes one row per step; keeps only the values for the summary in memory."""

    def __init__(self, directory: Path, steps: int):
        self._rows = RowFile(directory / FILE)
        self._steps = steps
        self._first: list[tuple[int, float]] = []  # (step, max_vio) of the first steps
        self._window = max(1, min(STEPS_AVERAGED, steps // 2))
        self._recent: deque[tuple[int, dict[str, float]]] = deque(maxlen=self._window)
        self._every = 0

    def step(self, step: int, layers: list[dict[str, Any]]) -> dict[str, float]:
        """Write one step's layers (`training.loop.router_step.RoutingUpdater.described`); return their means for
        metrics.jsonl.
        """
        means = mean_over_layers(layers)
        if not layers:
            return means
        if not self._every:
            numbers = 2 * len(layers) * len(layers[0]["load"]) * self._steps
            self._every = max(1, -(-numbers // int(NUMBERS_WRITTEN)))
        if len(self._first) < self._window:
            self._first.append((step, means["max_vio"]))
        self._recent.append((step, means))
        if step % self._every == 0 or len(self._recent) == 1:
            self._rows.append({"step": step, "layers": [_row(layer) for layer in layers]})
        return {name: means[name] for name in ("max_vio", "drop_rate", "aux_loss")}

    def undo(self, step: int) -> None:
        """Remove the rows of all steps after `step`. Raises OSError."""
        self._first = [entry for entry in self._first if entry[0] <= step]
        self._recent = deque((entry for entry in self._recent if entry[0] <= step), maxlen=self._window)
        self._rows.keep(lambda row: row["step"] <= step)

    def flush(self) -> None:
        """Write the rows for which a full disk had no room. Raises OSError."""
        self._rows.flush()

    def summary(self) -> dict[str, float]:
        """Return means over layers and over the first or the last steps; empty without experts."""
        if not self._recent:
            return {}
        recent = [means for _, means in self._recent]
        last = {name: statistics.fmean(means[name] for means in recent) for name in recent[0]}
        return {
            "first_max_vio": statistics.fmean(value for _, value in self._first),
            "max_vio": last["max_vio"],
            "drop_rate": last["drop_rate"],
            "load_entropy": last["load_entropy"],
        }


def mean_over_layers(layers: list[dict[str, Any]]) -> dict[str, float]:
    """Return the means of max_vio, drop_rate (fraction of dropped assignments), aux_loss and load_entropy."""
    if not layers:
        return {}
    dropped = [1 - sum(layer["kept"]) / sum(layer["load"]) if sum(layer["load"]) else 0.0 for layer in layers]
    return {
        "max_vio": statistics.fmean(layer["max_vio"] for layer in layers),
        "drop_rate": statistics.fmean(dropped),
        "aux_loss": statistics.fmean(layer["aux"] for layer in layers),
        "load_entropy": statistics.fmean(layer["load_entropy"] for layer in layers),
    }


def _row(layer: dict[str, Any]) -> dict[str, Any]:
    """Write counts as integers, which take a third of the bytes."""
    return {**layer, "load": [round(n) for n in layer["load"]], "kept": [round(n) for n in layer["kept"]]}
