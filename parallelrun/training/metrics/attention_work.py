"""How evenly the cp ranks shared the work of attention: counted where it was computed, beside what `plan` expects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parallelrun.models.masked_layers import AttentionProduct
from parallelrun.planner.contract.context_order import imbalance_of
from parallelrun.planner.pieces.packing import with_packing
from parallelrun.training.loop.build import Training


def of_rank(training: Training) -> list[list[int]]:
    """The pairs of a query and a key in this rank's last calls of attention over cp, by step of the ring."""
    for part in training.model_parts:
        for module in part.modules():
            if isinstance(module, AttentionProduct) and module.over_ranks is not None:
                return [*module.over_ranks.work]
    return []


def fields(everyone: Mapping[int, dict[str, Any]], training: Training) -> dict[str, float]:
    """Fields of the summary, from every rank's facts; none without cp. The calls of ranks that share a sequence are
    those of the same layers, in the same order."""
    plan = training.plan
    if plan.context is None:
        return {}
    groups = {plan.mesh.group_of(rank, "cp") for rank in everyone}
    complete = [[everyone[rank]["attention"] for rank in group] for group in groups if everyone.keys() >= {*group}]
    measured = imbalance_of(work for ranks in complete for work in zip(*ranks))
    return {
        "imbalance_predicted": plan.context.imbalance(with_packing(plan, training.packing)),
        "imbalance_measured": measured.steps if plan.context.in_turn else measured.ranks,
    }
