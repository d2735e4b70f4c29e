"""What earlier attempts of a restarted run have written to metrics.jsonl: their part of the summary. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallelrun.run_records.read import read_rows


@dataclass(frozen=True)
class EarlierRows:
    """The rows of the steps before this process; none in a run that was not restarted."""

    rows: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def of(cls, path: Path) -> EarlierRows:
        """Read them. Raises ParallelrunError for a broken file."""
        return cls(read_rows(path))

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
