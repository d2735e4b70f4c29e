"""Rows of metrics.jsonl that earlier attempts or earlier plans of a run have written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallelrun.report.records import attempts, reshapes
from parallelrun.report.records.read import METRICS, read_rows


@dataclass(frozen=True)
class EarlierRows:
    """The rows of the steps before this attempt and plan; none in a run that had no others."""

    rows: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def of(cls, directory: Path) -> EarlierRows:
        """Read those of a run directory. Raises ParallelrunError for a broken file."""
        went_on = len(attempts.read(directory)) > 1 or reshapes.status(directory)
        return cls(read_rows(directory / METRICS)) if went_on else cls()

    def values(self, key: str) -> list[float]:
        """Return the values of a key, in the order of the steps."""
        return [row[key] for row in self.rows if row.get(key) is not None]

    @property
    def last_step(self) -> int:
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def time_s(self) -> float:
        """The training time of those steps."""
        return float(self.rows[-1].get("time_s") or 0.0) if self.rows else 0.0
