"""The plan of a run that torchrun has started again. Torch-free, and without cost for other commands."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parallelrun.config.compose import Composed
    from parallelrun.plan.structure import Plan


def restarted_plan(composed: Composed, world: int | None) -> tuple[Composed, Plan] | None:
    """Return the configuration and plan with which such a run goes on; None for any other.

    world: the number of ranks that another launcher has started, None if we start them.
    """
    if world is None or composed.config.verb != "run":
        return None
    from parallelrun.launch import reattach

    found = reattach.planned(composed.config, world)
    return (replace(composed, config=found[0]), found[1]) if found else None
