"""How much of the whole matrix a run of the suite goes through: a choice that fits ten minutes, or all of it."""

from __future__ import annotations

import os

FULL = os.environ.get("PARALLELRUN_FULL_MATRIX") == "1"


def examples(count: int) -> int:
    """How many random examples a property is tried with, of the `count` that the full matrix takes."""
    return count if FULL else count // 3
