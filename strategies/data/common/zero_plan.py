"""The base class of ZeRO stages 1 and 2 (Rajbhandari et al. 2020): every rank of dp updates its chunk of each weight.

Chunks are those of `torch.chunk` along one dim of each parameter (`buckets.shard_dim`), so that the optimizer's state
has a layout and the name of the one-device parameter. Uneven chunks are padded when they are sent.

In mixed precision a rank stores weights that every use rounds in the compute dtype, and its own chunk in the stored
one, which the optimizer updates (Megatron-LM's distributed optimizer): half the bytes, and the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallelrun.base.layout import Layout
from parallelrun.base.precision import BYTES
from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.contract.data_strategy import Bucket, DataStrategy, ExchangeForm
from parallelrun.planner.contract.parameters import HeldParameter, distinct_parameters
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.contract.request import Request
from parallelrun.planner.model.model_spec import ParameterSpec
from parallelrun.planner.pieces.expert_axes import replica_axis
from parallelrun.planner.predict.prediction import merge

from .bucket_prediction import RankBuckets, buckets_of, final_collectives
from .buckets import ROUNDED_ROLES, Shape, is_summed, partition, reduce_bytes, shard_dim, shard_layout
from .keys import BucketKeys


@dataclass(frozen=True)
class ZeRO(DataStrategy):
    """Weights are complete on every rank of dp; the optimizer's state and the update are sharded."""

    takes_experts = True
    takes_context = True
    rounds_weights = True

    @classmethod
    def resolve(cls, request: Request) -> ZeRO:
        return cls(bucket_bytes=BucketKeys.of(request.config).bucket_bytes)

    def buckets(self, trained: Sequence[HeldParameter], shapes: Sequence[Shape], plan: Plan) -> list[Bucket]:
        """The last stage of a rank first. No bucket spans two stages, because their backward passes alternate."""
        buckets = []
        for stage in sorted({parameter.stage for parameter in trained}, reverse=True):
            own = [index for index, parameter in enumerate(trained) if parameter.stage == stage]
            buckets += partition(trained, shapes, plan, padded=True, only=own)
        return buckets

    def weight_dtype(self, parameter: ParameterSpec, tensor_layout: Layout, plan: Plan) -> str:
        rounds = self._rounds(plan) and parameter.layer_role in ROUNDED_ROLES and not parameter.frozen
        has_copies = plan.mesh.size(replica_axis(tensor_layout, plan)) > 1
        return plan.precision.compute if rounds and has_copies else plan.precision.stored

    def _rounds(self, plan: Plan) -> bool:
        """Whether weights may be kept in the compute dtype. Not where their gradients would be rounded to it after a
        sum: over a grid, or over microbatches if backward is split."""
        sums = plan.pipeline.splits_backward or not plan.tensor.is_one_dimensional
        return plan.precision.compute != plan.precision.stored and plan.num_data_ranks > 1 and not sums

    def state_layout(self, parameter: ParameterSpec, tensor_layout: Layout, plan: Plan) -> Layout:
        return shard_layout(parameter, tensor_layout, replica_axis(tensor_layout, plan), plan)

    def keeps_gradients(self, plan: Plan) -> bool:
        return True

    def gathered_bytes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
        """This rank's chunks that are no part of their weights: of rounded ones, and of several experts' matrices."""
        sizes, numel = plan.mesh.sizes, 0
        for parameter, count in distinct_parameters(plan, pp_rank):
            spec, layout = parameter.spec, parameter.layout
            if is_summed(parameter, plan) and not spec.frozen:
                along = shard_dim(spec, layout, replica_axis(layout, plan), plan)
                is_strided = along > 0 and layout.local_shape(spec.shape, sizes, coordinate)[0] > 1
                if is_strided or self.weight_dtype(spec, layout, plan) != plan.precision.stored:
                    mine = self.state_layout(spec, layout, plan)
                    numel += count * mine.local_numel(spec.shape, sizes, coordinate)
        return BYTES[plan.precision.stored] * numel

    def collectives(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
        """Per bucket the reduce-scatters of gradients and one all-gather of parameters, then the final sums."""
        buckets, passes = buckets_of(pp_rank, coordinate, plan), self.num_exchanges(plan)
        rows = []
        for number, axis in enumerate(buckets.axes):
            payload = buckets.sent_bytes(number)
            rows.append(Collective(axis, "reduce_scatter", "gradients", passes, passes * payload))
            gathered = payload // reduce_bytes(plan) * buckets.element_bytes[number]
            rows.append(Collective(axis, "all_gather", "parameters", 1, gathered))
        return merge(rows) + final_collectives(pp_rank, coordinate, plan)

    def exchange_form(self, plan: Plan) -> ExchangeForm:
        return ExchangeForm(gathers_rounded=self._rounds(plan))


def received_bytes(number: int, buckets: RankBuckets, plan: Plan) -> int:
    """Bytes that a bucket's reduce-scatter over gloo receives before it sums them (`comm`)."""
    return buckets.sent_bytes(number) if plan.device == "cpu" else 0
