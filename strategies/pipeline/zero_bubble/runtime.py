"""Zero bubble (ZB1P), on torch's ScheduleInterleavedZeroBubble."""

from __future__ import annotations

from typing import Any

from torch.distributed.pipelining import ScheduleInterleavedZeroBubble

from parallelrun.mesh import Mesh
from parallelrun.models.network import Network
from parallelrun.plan.structure import Plan

from ..engine import ScheduleEngine, prepare_for_split_backward


def build(parts: list[Network], plan: Plan, mesh: Mesh, data: Any) -> ScheduleEngine:
    """The engine of this rank's stages, by stage index."""
    prepare_for_split_backward(parts)
    return ScheduleEngine(parts, plan, mesh, ScheduleInterleavedZeroBubble)
