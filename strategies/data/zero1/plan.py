"""ZeRO stage 1 (Rajbhandari et al. 2020): every rank of dp updates its chunk of each parameter, then they are shared.

Chunks are those of `torch.chunk` along each parameter's dim 0, so that optimizer state has a layout and the one-device
name; they may be uneven or empty, and are padded on the way.
"""

from __future__ import annotations

from parallelrun.errors import Problem
from parallelrun.layout import Layout
from parallelrun.plan.structure import Collective, DataWay, Equivalence, Plan
from parallelrun.plan.ways import Request
from parallelrun.train.parameters import held_parameters

from .. import buckets
from ..replicated import Replicated
from ..sharding import check_splits


class Way(Replicated):
    """Weights and gradients are whole on every rank of dp; optimizer state and the update are split."""

    reads = ("bucket_mb",)

    def check(self, request: Request) -> list[Problem]:
        return check_splits(request, "zero1")

    def settle(self, request: Request) -> DataWay:
        return buckets.settle(request)

    def state_layout(self, tensor_layout: Layout, plan: Plan) -> Layout:
        return tensor_layout.split(0, "dp") if plan.mesh.size("dp") > 1 else tensor_layout

    def collectives(self, position: int, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
        """Per bucket a reduce-scatter of gradients and an all-gather of updated parameters, then the final sums."""
        out = []
        degree = plan.mesh.size("dp")
        if degree > 1:
            numels = buckets.bucket_numels(position, coordinate, plan, parts=degree)
            payload = buckets.reduce_bytes(plan) * sum(numels)
            out.append(Collective("dp", "reduce_scatter", "gradients", len(numels), payload))
            out.append(Collective("dp", "all_gather", "parameters", len(numels), payload))
        layouts = [(held, self.state_layout(held.layout, plan)) for held in held_parameters(plan, position)]
        return out + buckets.final_collectives(layouts, coordinate, plan)

    def equivalence(self, plan: Plan) -> Equivalence:
        return Equivalence("exact")
