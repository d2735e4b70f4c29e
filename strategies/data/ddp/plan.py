"""Data parallel with whole copies: gradients are summed over dp in buckets, under backward."""

from __future__ import annotations

from parallelrun.errors import Problem
from parallelrun.layout import Layout
from parallelrun.plan.structure import Collective, DataWay, Equivalence, Plan
from parallelrun.plan.ways import Request
from parallelrun.train.parameters import held_parameters

from .. import buckets


class Way:
    """Every rank of dp holds all of its stage's weights, gradients and optimizer state."""

    reads = ("bucket_mb",)

    def check(self, request: Request) -> list[Problem]:
        return []

    def settle(self, request: Request) -> DataWay:
        return buckets.settle(request)

    def leaves(self, request: Request) -> tuple[tuple[tuple[str, int], ...], tuple[tuple[str, tuple[str, ...]], ...]]:
        return (("dp", request.dp),), ()

    def weight_layout(self, tensor_layout: Layout, plan: Plan) -> Layout:
        return tensor_layout

    def state_layout(self, tensor_layout: Layout, plan: Plan) -> Layout:
        return tensor_layout

    def gradient_layout(self, tensor_layout: Layout, plan: Plan) -> Layout:
        return tensor_layout

    def collectives(self, position: int, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
        """One all-reduce per bucket, then what the final gradients need (partial axes, tied copies)."""
        out = []
        if plan.mesh.size("dp") > 1:
            numels = buckets.bucket_numels(position, coordinate, plan, parts=1)
            payload = buckets.reduce_bytes(plan) * sum(numels)
            out.append(Collective("dp", "all_reduce", "gradients", len(numels), payload))
        layouts = [(held, held.layout) for held in held_parameters(plan, position)]
        return out + buckets.final_collectives(layouts, coordinate, plan)

    def equivalence(self, plan: Plan) -> Equivalence:
        return Equivalence("exact")
