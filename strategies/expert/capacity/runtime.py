"""What the capacity way does: `place` cuts the experts and sets how rows get to them."""

from __future__ import annotations

from parallelrun.mesh import Mesh
from parallelrun.models.network import Network
from parallelrun.plan.structure import Plan

from .. import placing
from .dispatch import CapacityDispatch


def place(network: Network, plan: Plan, mesh: Mesh) -> None:
    """See `placing`."""
    placing.place(network, plan, mesh, CapacityDispatch)
