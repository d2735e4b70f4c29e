"""The prediction: one all-reduce per trained parameter."""

from __future__ import annotations

from dataclasses import dataclass

from parallelrun.base.precision import BYTES
from parallelrun.config.schema.field import key
from parallelrun.config.schema.run_schema import DataStrategyConfig
from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.contract.data_strategy import DataStrategy
from parallelrun.planner.contract.parameters import held_parameters
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.contract.request import Request


@dataclass
class EachTensorConfig(DataStrategyConfig):
    """Keys of `strategy.data` with kind=each_tensor."""

    kind: str = "each_tensor"
    max_pending: int = key(1, "each_tensor: all-reduces that may be under way at once", least=1)


@dataclass(frozen=True)
class EachTensor(DataStrategy):
    """Every replica holds complete weights; gradients are summed tensor by tensor.

    max_pending: all-reduces that may be under way at once.
    """

    kind = "each_tensor"
    config_class = EachTensorConfig

    max_pending: int = 1

    @classmethod
    def resolve(cls, request: Request) -> EachTensor:
        return cls(max_pending=EachTensorConfig.of(request.config).max_pending)

    def collectives(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
        if plan.mesh.size("dp") == 1:
            return []
        held = [parameter for parameter in held_parameters(plan, pp_rank) if not parameter.spec.frozen]
        numel = sum(p.layout.local_numel(p.spec.shape, plan.mesh.sizes, coordinate) for p in held)
        return [Collective("dp", "all_reduce", "gradients", len(held), numel * BYTES[plan.precision.reduce])]
