"""The base class of ZeRO stages 1 and 2 (Rajbhandari et al. 2020): every rank of dp updates its chunk of each weight.

Chunks are those of `torch.chunk` along one dim of each parameter (`buckets.shard_dim`), so that the optimizer's state
has a layout and the name of the one-device parameter. Along dim 0 chunks may be uneven or empty; they are padded when
they are sent. Torch-free.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING

from parallelrun.errors import Problem
from parallelrun.layout import Layout
from parallelrun.model_spec import ParameterSpec
from parallelrun.plan.data_strategy import DataStrategy
from parallelrun.plan.expert_axes import replica_axis
from parallelrun.plan.parameters import HeldParameter
from parallelrun.plan.prediction import merge
from parallelrun.plan.request import Request
from parallelrun.plan.structure import Collective, Equivalence, Plan
from parallelrun.precision import BYTES

from . import buckets
from .buckets import Filled, Shape, WaitingGradients
from .keys import BucketKeys

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class ZeRO(DataStrategy):
    """Weights are complete on every rank of dp; the optimizer's state and the update are sharded."""

    takes_experts = True
    keeps_gradients = True

    @classmethod
    def check(cls, request: Request) -> list[Problem]:
        return buckets.check_shardable(request, cls.kind, frozen_too=False)

    @classmethod
    def resolve(cls, request: Request) -> Self:
        return cls(bucket_bytes=BucketKeys.of(request.config).bucket_bytes)

    @abstractmethod
    def fill(self, trained: Sequence[HeldParameter], shapes: Sequence[Shape], plan: Plan) -> list[Filled]:
        """The buckets of trained parameters with those local shapes, in launch order."""

    def reductions(self, plan: Plan) -> int:
        """The number of times that a step reduces every bucket."""
        return 1

    def waiting(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> WaitingGradients:
        """The gradients of a rank that wait for their buckets."""
        key = "waiting gradients", pp_rank, *sorted(coordinate.items())
        if key not in plan.cache:
            fill = partial(self.fill, plan=plan)
            plan.cache[key] = WaitingGradients(pp_rank, coordinate, plan, fill)
        found: WaitingGradients = plan.cache[key]
        return found

    def state_layout(self, parameter: ParameterSpec, tensor_layout: Layout, plan: Plan) -> Layout:
        return buckets.shard_layout(parameter, tensor_layout, replica_axis(tensor_layout, plan), plan)

    def gathered_bytes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
        """Copies of chunks that are not contiguous inside their weight: chunks of several experts' matrices."""
        held = buckets.trained_parameters(plan, pp_rank)
        numels = [
            prod(shape) // plan.mesh.size(buckets.sum_axis(p, plan))
            for p, shape in zip(held, buckets.local_shapes(held, coordinate, plan))
            if buckets.shard_dim(p.spec, p.layout, buckets.sum_axis(p, plan), plan) > 0 and shape[0] > 1
        ]
        return BYTES[plan.precision.stored] * sum(numels)

    def collectives(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
        """Per bucket the reduce-scatters of gradients and one all-gather of parameters, then the final sums."""
        waiting, passes = self.waiting(pp_rank, coordinate, plan), self.reductions(plan)
        rows = []
        for number, bucket in enumerate(waiting.buckets):
            payload = waiting.sent_bytes(number)
            rows.append(Collective(bucket.axis, "reduce_scatter", "gradients", passes, passes * payload))
            rows.append(Collective(bucket.axis, "all_gather", "parameters", 1, payload))
        return merge(rows) + buckets.final_collectives(pp_rank, coordinate, plan)

    def equivalence(self, plan: Plan) -> Equivalence:
        return Equivalence("exact")
