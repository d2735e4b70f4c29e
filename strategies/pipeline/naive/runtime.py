"""Naive model parallelism: GPipe with one microbatch, on torch's ScheduleGPipe."""

from __future__ import annotations

from typing import Any

from torch.distributed.pipelining import ScheduleGPipe

from parallelrun.mesh import Mesh
from parallelrun.models.network import Network
from parallelrun.plan.structure import Plan

from ..engine import ScheduleEngine


def build(parts: list[Network], plan: Plan, mesh: Mesh, data: Any) -> ScheduleEngine:
    """The engine of this rank's stages, by stage index."""
    return ScheduleEngine(parts, plan, mesh, ScheduleGPipe)
