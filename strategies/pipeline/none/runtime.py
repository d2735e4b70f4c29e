"""One stage per replica: gradient accumulation."""

from __future__ import annotations

from typing import Any

from parallelrun.mesh import Mesh
from parallelrun.models.network import Network
from parallelrun.plan.structure import Plan

from ..engine import AccumulationEngine


def build(parts: list[Network], plan: Plan, mesh: Mesh, data: Any) -> AccumulationEngine:
    """The engine of the one stage."""
    return AccumulationEngine(parts, plan, mesh)
