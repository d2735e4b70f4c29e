"""explain(plan): what every strategy of a plan sends, by what the strategies answer. Torch-free."""

from __future__ import annotations

from parallelrun.errors import ConfigError, Problem
from parallelrun.plan.explanation import Explanation, of_rows
from parallelrun.plan.resolve import ways_of
from parallelrun.plan.structure import Collective, Plan

MOST_RANKS = 64  # of a plan that is explained: its messages grow with the square of the ranks


def explain(plan: Plan) -> list[Explanation]:
    """One Explanation per axis on which anything is sent. Raises ConfigError for a plan with too many ranks."""
    if plan.world > MOST_RANKS:
        what = f"explain lists every message, of up to {MOST_RANKS} ranks; this plan has {plan.world}"
        raise ConfigError(Problem(what, "world", "smaller degrees show the same pattern", "parallelrun plan ..."))
    ways = ways_of(plan)
    found: list[Explanation] = []
    for way in (ways.pipeline, ways.tensor, ways.expert, ways.data):
        own = getattr(way, "explain", None)
        if own is not None:
            found.append(own(plan))
        elif way is ways.data:  # the backend's own collectives only
            found.append(of_rows("data", plan.data.kind, plan, lambda rank: _data_rows(rank, plan)))
    return [one for one in found if one.steps or (one.axis == "data" and one.notes)]


def _data_rows(rank: int, plan: Plan) -> list[Collective]:
    """What the data-parallel strategy predicts for one rank."""
    place = plan.mesh.coordinate(rank)
    return ways_of(plan).data.collectives(place["pp"], place, plan)
