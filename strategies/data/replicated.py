"""What the data ways have in common whose ranks hold whole copies of everything. Torch-free."""

from __future__ import annotations

from parallelrun.layout import Layout
from parallelrun.models.spec import ParameterSpec
from parallelrun.plan.structure import Plan
from parallelrun.plan.ways import Request


class Replicated:
    """Weights, gradients and optimizer state are whole on every rank of dp."""

    def leaves(self, request: Request) -> tuple[tuple[tuple[str, int], ...], tuple[tuple[str, tuple[str, ...]], ...]]:
        return (("dp", request.dp),), ()

    def weight_layout(self, parameter: ParameterSpec, tensor_layout: Layout, plan: Plan) -> Layout:
        return tensor_layout

    def state_layout(self, parameter: ParameterSpec, tensor_layout: Layout, plan: Plan) -> Layout:
        return tensor_layout

    def gradient_layout(self, parameter: ParameterSpec, tensor_layout: Layout, plan: Plan) -> Layout:
        return tensor_layout
