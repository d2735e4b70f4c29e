"""How much of the full matrix a run of the suite covers: a choice that takes minutes, or all with `--matrix=full`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, TypeVar

import pytest

FULL = os.environ.get("PARALLELRUN_FULL_MATRIX") == "1"  # set by `tests/conftest.py`; helper processes inherit it
Cell = TypeVar("Cell")

# Of cells whose subject keeps something from one step for the next (`tests.parity`).
TWO_STEPS: dict[str, Any] = {} if FULL else {"verify.steps": 2}


def examples(count: int) -> int:
    """How many random examples a property is tried with, of the `count` that the full matrix takes."""
    return count if FULL else max(1, count // 10)


def every(step: int, cells: Iterable[Cell]) -> list[Cell]:
    """All cells of the full matrix, else every `step`th one: of cells whose neighbours show the same."""
    return list(cells)[:: 1 if FULL else step]


def shared(cells: Iterable[Any]) -> list[Any]:
    """Half of the cells for every run, and the others for the stage `slow` of `.ci/run`: of a matrix whose neighbours
    show much the same."""
    every_cell = list(cells)
    return sparing(every_cell, every_cell[1::2])


def sparing(cells: Iterable[Any], slow: Iterable[Any]) -> list[Any]:
    """All cells, of which `slow` are for the stage `slow` of `.ci/run`, and for the full matrix."""
    marked = [] if FULL else list(slow)
    return [pytest.param(cell, marks=[pytest.mark.slow] * (cell in marked)) for cell in cells]


def pairs(settings: Mapping[str, object]) -> set[tuple[object, object]]:
    """All pairs of values of two different settings."""
    return set(combinations(sorted(settings.items(), key=lambda item: item[0]), 2))


def covering(
    cells: Sequence[Cell], settings: Callable[[Cell], Mapping[str, object]], cost: Callable[[Cell], float]
) -> list[Cell]:
    """Cheap cells in which every pair of settings that stands in any of `cells` stands at least once.

    Greedy: always the cell with the most new pairs for its cost, the earliest of equals.
    """
    missing = set().union(*(pairs(settings(cell)) for cell in cells))
    chosen: list[Cell] = []
    while missing:
        best = max(cells, key=lambda cell: len(missing & pairs(settings(cell))) / cost(cell))
        missing -= pairs(settings(best))
        chosen.append(best)
    return [cell for cell in cells if cell in chosen]
