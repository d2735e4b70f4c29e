"""The prediction: one all-reduce per trained parameter."""

from __future__ import annotations

from dataclasses import dataclass

from parallelrun.plan.data_strategy import DataStrategy
from parallelrun.plan.parameters import held_parameters
from parallelrun.plan.request import Request
from parallelrun.plan.structure import Collective, Equivalence, Plan
from parallelrun.precision import BYTES


@dataclass(frozen=True)
class EachTensor(DataStrategy):
    """Every replica holds complete weights; gradients are summed tensor by tensor."""

    kind = "each_tensor"
    description = ("After backward, one all-reduce per parameter sums its gradient over the replicas.", "")

    @classmethod
    def resolve(cls, request: Request) -> EachTensor:
        return cls()

    def collectives(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
        if plan.mesh.size("dp") == 1:
            return []
        held = [parameter for parameter in held_parameters(plan, pp_rank) if not parameter.spec.frozen]
        numel = sum(p.layout.local_numel(p.spec.shape, plan.mesh.sizes, coordinate) for p in held)
        return [Collective("dp", "all_reduce", "gradients", len(held), numel * BYTES[plan.precision.reduce])]

    def equivalence(self, plan: Plan) -> Equivalence:
        return Equivalence("exact")
