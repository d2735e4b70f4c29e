"""What layers with experts did, in routing.jsonl, and what of it the other files say. Torch-free."""

from __future__ import annotations

import statistics
from collections import deque
from pathlib import Path
from typing import Any

from parallelrun.records import RowFile

FILE = "routing.jsonl"
NUMBERS_WRITTEN = 2e7  # of loads, in one run: about 100 MB; of longer runs not every step is written
STEPS_AVERAGED = 10  # what the summary calls first and last; half of the run where it is shorter than twice that


class RoutingLog:
    """Writes a row a step; keeps only what the summary needs, however long the run is."""

    def __init__(self, directory: Path, steps: int):
        self._rows = RowFile(directory / FILE)
        self._steps = steps
        self._first: list[float] = []  # max_vio of the first steps
        self._window = max(1, min(STEPS_AVERAGED, steps // 2))
        self._recent: deque[dict[str, float]] = deque(maxlen=self._window)
        self._every = 0

    def step(self, step: int, layers: list[dict[str, Any]]) -> dict[str, float]:
        """Write the layers of one step (`train.routing.RoutingUpdater.described`); their means, for metrics.jsonl."""
        means = mean_over_layers(layers)
        if not layers:
            return means
        if not self._every:
            numbers = 2 * len(layers) * len(layers[0]["load"]) * self._steps
            self._every = max(1, -(-numbers // int(NUMBERS_WRITTEN)))
        if len(self._first) < self._window:
            self._first.append(means["max_vio"])
        self._recent.append(means)
        if step % self._every == 0 or len(self._recent) == 1:
            self._rows.append({"step": step, "layers": [_row(layer) for layer in layers]})
        return {name: means[name] for name in ("max_vio", "drop_rate", "aux_loss")}

    def flush(self) -> None:
        """Write the rows for which a full disk had no room. Raises OSError."""
        self._rows.flush()

    def summary(self) -> dict[str, float]:
        """Means over the layers, and over the first and the last steps; empty where there are no experts."""
        if not self._recent:
            return {}
        last = {name: statistics.fmean(one[name] for one in self._recent) for name in self._recent[0]}
        return {
            "first_max_vio": statistics.fmean(self._first),
            "max_vio": last["max_vio"],
            "drop_rate": last["drop_rate"],
            "load_entropy": last["load_entropy"],
        }


def mean_over_layers(layers: list[dict[str, Any]]) -> dict[str, float]:
    """max_vio, drop_rate (part of all assignments that were not kept), aux_loss, load_entropy; empty of no layers."""
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
    """Counts as integers: a third of the bytes."""
    return {**layer, "load": [round(n) for n in layer["load"]], "kept": [round(n) for n in layer["kept"]]}
