"""The plan of naive_ddp: one all-reduce per trained parameter that has copies."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.contract.data_strategy import DataStrategy
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.contract.request import Request
from parallelrun.planner.pieces.expert_axes import replica_axis
from parallelrun.planner.predict.prediction import merge

from ..common.bucket_prediction import final_collectives, local_shapes, trained_parameters
from ..common.buckets import is_summed, reduce_bytes
from ..common.keys import NaiveDDPConfig


@dataclass(frozen=True)
class NaiveDDP(DataStrategy):
    """Every rank of dp holds its stage's complete weights, gradients and optimizer state."""

    kind = "naive_ddp"
    config_class = NaiveDDPConfig
    takes_experts = True
    takes_context = True
    overlaps_backward = False

    @classmethod
    def resolve(cls, request: Request) -> NaiveDDP:
        return cls()

    def collectives(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
        trained = trained_parameters(plan, pp_rank)
        calls = [
            Collective(replica_axis(p.layout, plan), "all_reduce", "gradients", 1, reduce_bytes(plan) * prod(shape))
            for p, shape in zip(trained, local_shapes(trained, coordinate, plan))
            if is_summed(p, plan)
        ]
        return merge(calls) + final_collectives(pp_rank, coordinate, plan)
