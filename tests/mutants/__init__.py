"""Planted bugs: each function breaks parallelrun in this process, the way somebody once broke such a system.

`tests/ranks/test_mutants.py` runs each on every rank of a plan where it matters, and expects `verify` to notice.
"""

from __future__ import annotations

from tests.mutants import adapters, context, general, grid, muon, slices, stages, tensor

MODULES = (general, tensor, grid, context, adapters, stages, slices, muon)


def plant(name: str) -> None:
    """Break this process by the mutant of that name."""
    (mutant,) = [vars(module)[name] for module in MODULES if name in vars(module)]
    mutant()
