"""The base class of ZeRO stages 1 and 2 (Rajbhandari et al. 2020): every rank of dp updates its chunk of each weight.

Chunks are those of `torch.chunk` along one dim of each parameter (`buckets.shard_dim`), so that the optimizer's state
has a layout and the name of the one-device parameter. Along dim 0 chunks may be uneven or empty; they are padded when
they are sent. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from parallelrun.errors import Problem
from parallelrun.layout import Layout
from parallelrun.model_spec import ParameterSpec
from parallelrun.plan import data_cost
from parallelrun.plan.data_strategy import Bucket, DataStrategy, ExchangeForm
from parallelrun.plan.expert_axes import replica_axis
from parallelrun.plan.parameters import HeldParameter
from parallelrun.plan.prediction import merge
from parallelrun.plan.request import Request
from parallelrun.plan.structure import Collective, Equivalence, Plan
from parallelrun.precision import BYTES

from .bucket_prediction import RankBuckets, buckets_of, check_shardable, final_collectives
from .buckets import Shape, partition, shard_dim, shard_layout
from .keys import BucketKeys

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class ZeRO(DataStrategy):
    """Weights are complete on every rank of dp; the optimizer's state and the update are sharded."""

    takes_experts = True
    takes_context = True

    @classmethod
    def check(cls, request: Request) -> list[Problem]:
        return check_shardable(request, cls.kind, frozen_too=False)

    @classmethod
    def resolve(cls, request: Request) -> Self:
        return cls(bucket_bytes=BucketKeys.of(request.config).bucket_bytes)

    def buckets(self, trained: Sequence[HeldParameter], shapes: Sequence[Shape], plan: Plan) -> list[Bucket]:
        return partition(trained, shapes, plan, padded=True)

    def state_layout(self, parameter: ParameterSpec, tensor_layout: Layout, plan: Plan) -> Layout:
        return shard_layout(parameter, tensor_layout, replica_axis(tensor_layout, plan), plan)

    def keeps_gradients(self, plan: Plan) -> bool:
        return True

    def gathered_bytes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
        """Copies of chunks that are not contiguous inside their weight: chunks of several experts' matrices."""
        found = buckets_of(pp_rank, coordinate, plan)
        numels = [
            prod(shape) // plan.mesh.size(axis)
            for axis, parts in zip(found.axes, found.parts)
            for p, shape in parts
            if shard_dim(p.spec, p.layout, axis, plan) > 0 and shape[0] > 1
        ]
        return BYTES[plan.precision.stored] * sum(numels)

    def collectives(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
        """Per bucket the reduce-scatters of gradients and one all-gather of parameters, then the final sums."""
        found, passes = buckets_of(pp_rank, coordinate, plan), self.num_exchanges(plan)
        rows = []
        for number, axis in enumerate(found.axes):
            payload = found.sent_bytes(number)
            rows.append(Collective(axis, "reduce_scatter", "gradients", passes, passes * payload))
            rows.append(Collective(axis, "all_gather", "parameters", 1, payload))
        return merge(rows) + final_collectives(pp_rank, coordinate, plan)

    def exchange_form(self, plan: Plan) -> ExchangeForm:
        return ExchangeForm(data_cost.SCATTERED_AGAIN if self.num_exchanges(plan) > 1 else data_cost.SHARDED)

    def equivalence(self, plan: Plan) -> Equivalence:
        return Equivalence("exact")


def received_bytes(number: int, buckets: RankBuckets, plan: Plan) -> int:
    """Bytes that a bucket's reduce-scatter over gloo receives before it sums them (`comm`)."""
    return buckets.sent_bytes(number) if plan.device == "cpu" else 0
