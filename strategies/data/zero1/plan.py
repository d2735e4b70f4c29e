"""ZeRO stage 1 (Rajbhandari et al. 2020): every rank of dp updates its chunk of each parameter, then they are shared.

Chunks are those of `torch.chunk` along one dim of each parameter (`sharding.shard_dim`), so that optimizer state has a
layout and the one-device name; along dim 0 they may be uneven or empty, and are padded on the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Self

from parallelrun.errors import Problem
from parallelrun.layout import Layout
from parallelrun.model_spec import ParameterSpec
from parallelrun.plan import data_cost
from parallelrun.plan.data_strategy import DataStrategy, ExchangeForm
from parallelrun.plan.expert_axes import replica_axis
from parallelrun.plan.parameters import HeldParameter, held_parameters
from parallelrun.plan.prediction import merge
from parallelrun.plan.request import Request
from parallelrun.plan.structure import Collective, Equivalence, Plan
from parallelrun.precision import BYTES

from .. import buckets
from ..sharding import check_splits, shard_dim, shard_layout
from ..waiting import Waiting


@dataclass(frozen=True)
class ZeRO1(DataStrategy):
    """Weights and gradients are whole on every rank of dp; optimizer state and the update are split."""

    kind = "zero1"
    reads = ("bucket_mb",)
    keeps_gradients = True
    description = (
        "Each rank owns a part of every tensor's optimizer state. A reduce-scatter gives it the summed gradients of "
        "its part, it updates that part, and an all-gather gives every rank the new weights.",
        "Rajbhandari et al. 2020",
    )
    takes_experts = True

    @classmethod
    def check(cls, request: Request) -> list[Problem]:
        return check_splits(request, cls.kind)

    @classmethod
    def resolve(cls, request: Request) -> Self:
        return cls(bucket_bytes=int(request.config.strategy.data.bucket_mb * 2**20))

    def state_layout(self, parameter: ParameterSpec, tensor_layout: Layout, plan: Plan) -> Layout:
        return shard_layout(parameter, tensor_layout, replica_axis(tensor_layout, plan), plan)

    def gathered_bytes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
        """What is kept beside the weights: a chunk inside of several experts does not lie in one piece there."""
        held = buckets.trained_parameters(plan, pp_rank)
        numels = [
            prod(shape) // plan.mesh.size(buckets.sum_axis(p, plan))
            for p, shape in zip(held, buckets.local_shapes(held, coordinate, plan))
            if shard_dim(p.spec, p.layout, buckets.sum_axis(p, plan), plan) > 0 and shape[0] > 1
        ]
        return BYTES[plan.precision.stored] * sum(numels)

    def held_bytes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
        """Beside the buckets: each one's sum over dp, of which this rank keeps its part, and what pads them."""
        trained = buckets.trained_parameters(plan, pp_rank)
        shapes = buckets.local_shapes(trained, coordinate, plan)
        padded = part = whole = 0
        for bucket in buckets.partition(trained, shapes, plan, padded=True):
            numel = sum(buckets.exchanged_numel(trained[i], shapes[i], plan, padded=True) for i in bucket.indices)
            padded += numel
            part += numel // plan.mesh.size(bucket.axis)
            whole += sum(prod(shapes[i]) for i in bucket.indices)
        return BYTES[plan.precision.reduce] * (padded - whole + part)

    def backward_bytes(self, stage: int, number: int, coordinate: dict[str, int], plan: Plan) -> list[int] | None:
        """Gradients that no bucket has collected yet, all of them where buckets wait for the schedule's end; in the
        last pass, what full buckets receive over gloo."""
        if plan.pipeline.splits_backward:
            return None
        waiting = _waiting(plan.stages[stage].pp_rank, coordinate, plan)
        is_last = number == plan.batch.microbatches - 1
        return [
            beside + (sum(_received(one, waiting, plan) for one in full) if is_last else 0)
            for beside, full in waiting.of_stage(stage)
        ]

    def ending_bytes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
        """What all buckets receive over gloo, before the sums."""
        waiting = _waiting(pp_rank, coordinate, plan)
        return sum(_received(number, waiting, plan) for number in range(len(waiting.buckets)))

    def collectives(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
        """Per bucket a reduce-scatter of gradients and an all-gather of updated parameters, then the final sums."""
        trained = buckets.trained_parameters(plan, pp_rank)
        filled = buckets.partition(trained, buckets.local_shapes(trained, coordinate, plan), plan, padded=True)
        layouts = [(held, self.state_layout(held.spec, held.layout, plan)) for held in held_parameters(plan, pp_rank)]
        return exchanges(filled, trained, coordinate, plan) + buckets.final_collectives(layouts, coordinate, plan)

    def exchange_form(self, plan: Plan) -> ExchangeForm:
        return ExchangeForm(data_cost.SHARDED)

    def equivalence(self, plan: Plan) -> Equivalence:
        return Equivalence("exact")


def _waiting(pp_rank: int, coordinate: dict[str, int], plan: Plan) -> Waiting:
    return Waiting(pp_rank, coordinate, plan, partial(buckets.partition, plan=plan, padded=True))


def _received(number: int, waiting: Waiting, plan: Plan) -> int:
    """Bytes of the parts that a bucket's reduce-scatter receives and then sums, over gloo (`comm`)."""
    return waiting.sent_bytes(number) if plan.device == "cpu" else 0


def exchanges(
    filled: Iterable[buckets.Filled],
    trained: Sequence[HeldParameter],
    coordinate: dict[str, int],
    plan: Plan,
    passes: int = 1,
) -> list[Collective]:
    """Of every bucket as many reduce-scatters of gradients as `passes`, and one all-gather of updated parameters."""
    shapes = buckets.local_shapes(trained, coordinate, plan)
    rows = []
    for bucket in filled:
        numel = sum(buckets.exchanged_numel(trained[i], shapes[i], plan, padded=True) for i in bucket.indices)
        payload = buckets.reduce_bytes(plan) * numel
        rows.append(Collective(bucket.axis, "reduce_scatter", "gradients", passes, passes * payload))
        rows.append(Collective(bucket.axis, "all_gather", "parameters", 1, payload))
    return merge(rows)
