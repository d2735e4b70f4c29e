"""Horovod's data parallelism: broadcast at the start, fused all-reduce during backward, process sets, join, Adasum.

Horovod negotiates in every cycle which tensors are ready everywhere. Here the plan fixes the buckets, so there is no
cycle time, and its response cache would always hit. `bucket_mb` is its fusion threshold (0: every tensor alone),
`microbatches` its backward_passes_per_step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from parallelrun.base.errors import Problem
from parallelrun.base.precision import BYTES
from parallelrun.planner.contract.messages import ExplainedExchange, ExplainedRound, Explanation, calls_of, ranks_over
from parallelrun.planner.contract.plan import Collective, Equivalence, Plan
from parallelrun.planner.contract.request import Request

from ..common.allreduce.algorithm import NativeAllReduce
from ..common.allreduce.members import places_on
from ..common.allreduce.plan import AlgorithmAllReduce
from ..common.allreduce.rounds import Number
from ..common.bucket_prediction import buckets_of, final_collectives
from ..common.buckets import reduce_bytes
from ..common.compression.plan import SummedMessage
from ..common.keys import HorovodConfig
from . import checks, halving
from .settings import ADASUM, HorovodSettings

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Horovod(HorovodSettings, AlgorithmAllReduce):
    """Every rank of dp holds the complete weights, gradients and optimizer state of its stage."""

    kind = "horovod"
    config_class = HorovodConfig
    description = (
        "Each rank computes the gradients of its own samples. Backward fills buckets from the last layer to the first; "
        "a full bucket is summed over the replicas by one all-reduce while the rest of backward runs.",
        "Sergeev and Del Balso 2018",
    )

    @classmethod
    def check(cls, request: Request) -> list[Problem]:
        return [*super().check(request), *checks.check(request)]

    @classmethod
    def check_algorithm(cls, request: Request) -> list[Problem]:
        problems = super().check_algorithm(request)
        if not problems and HorovodConfig.of(request.config).process_sets and cls.asked_algorithm(request).has_groups:
            message = "the inner groups of algorithm=hierarchical are of all workers, not of a process set"
            problems = [Problem(message, "strategy.data.algorithm", "strategy.data.algorithm=ring", kind="not_built")]
        return problems

    @classmethod
    def resolve(cls, request: Request) -> Self:
        data, alone = HorovodConfig.of(request.config), request.num_data_ranks == 1
        resolved = super().resolve(request)
        return replace(
            resolved,
            algorithm=NativeAllReduce() if alone else resolved.algorithm,
            reduction="average" if alone else data.reduction,
            timeline=data.timeline,
            stall_warn_s=data.stall_warn_s,
            worker_batches=tuple(data.worker_batches),
            divides_by_active=data.join_divisor == "active",
            process_sets=() if alone else checks.completed(data.process_sets, request.dp),
        )

    @classmethod
    def filled(cls, request: Request) -> tuple[str, ...]:
        return (*super().filled(request), *checks.filled(request))

    @property
    def sum_name(self) -> str | None:
        return None if self.algorithm.native else self.algorithm.name

    def update_dtype(self, plan: Plan) -> str:
        return self.compression.dtype(plan)

    def collectives(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
        """The sums of gradients, or with adasum the messages that combine updates; then those of final gradients."""
        if not self._combines_updates(plan):
            return super().collectives(pp_rank, coordinate, plan)
        return [*self._combining(pp_rank, coordinate, plan), *final_collectives(pp_rank, coordinate, plan)]

    def gathered_bytes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
        """Bytes of compression or, with adasum, of the weights before the update."""
        if not self._combines_updates(plan):
            return super().gathered_bytes(pp_rank, coordinate, plan)
        return sum(_sent_bytes(pp_rank, coordinate, plan))

    def keeps_gradients(self, plan: Plan) -> bool:
        """Whether buckets hold the gradients; with adasum backward leaves them where they are."""
        return not self._combines_updates(plan) and super().keeps_gradients(plan)

    def backward_bytes(self, stage: int, number: int, coordinate: dict[str, int], plan: Plan) -> list[int] | None:
        return None if self._combines_updates(plan) else super().backward_bytes(stage, number, coordinate, plan)

    def ending_bytes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
        """Return what the largest update of Adasum needs (`halving.update_bytes`); else 0."""
        size, index = self.summing_group(plan.data_axis, coordinate, plan)
        if not self._combines_updates(plan) or size == 1:
            return 0
        sent, stored = BYTES[self.update_dtype(plan)], BYTES[plan.precision.stored]
        buckets = buckets_of(pp_rank, coordinate, plan).parts
        updates = ([prod(shape) for _, shape in parts] for parts in buckets)
        return max((halving.update_bytes(update, size, index, sent, stored) for update in updates), default=0)

    def held_bytes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
        """Receive buffers of the sums; the updates of adasum are counted in `gathered_bytes`."""
        return 0 if self._combines_updates(plan) else super().held_bytes(pp_rank, coordinate, plan)

    def summing_group(self, axis: str, coordinate: dict[str, int], plan: Plan) -> tuple[int, int]:
        """(size, index) of a rank in its process set, or among all copies where there are no sets."""
        if not self.process_sets:
            return super().summing_group(axis, coordinate, plan)
        members = self.process_set(coordinate["dp"])
        return len(members), members.index(coordinate["dp"])

    def rows_of_sum(self, message: SummedMessage, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
        """The messages of one sum over a process set, or over all copies if there are no sets."""
        rows = super().rows_of_sum(message, coordinate, plan)
        if not self.process_sets:
            return rows
        worker = coordinate["dp"]
        return [replace(row, axis=self.axis(worker)) for row in rows if len(self.process_set(worker)) > 1]

    def links(self, plan: Plan) -> dict[tuple[int, int], int]:
        """Return nothing: process sets and Adasum use links of their own, which are not predicted."""
        return {}

    def explain(self, plan: Plan) -> Explanation:
        """The messages of the largest process set, or of all workers if there are no sets."""
        if not self.process_sets:
            return super().explain(plan)
        worker = max(self.process_sets, key=len)[0]
        rank, axis = plan.mesh.rank(dp=worker), self.axis(worker)
        coordinate, ranks = plan.mesh.coordinate(rank), ranks_over(plan, axis, rank)
        rows, exchanges = self.collectives(coordinate["pp"], coordinate, plan), []
        if not self.algorithm.native and len(ranks) > 1:
            rows = [row for row in rows if row.axis != axis]
            messages = self.bucket_messages(coordinate["pp"], coordinate, plan)
            titles = [f"bucket {number} of {len(messages)}" for number in range(1, len(messages) + 1)]
            exchanges = [self.explained_sum(*one, plan, ranks) for one in zip(titles, messages)]
        rounds = tuple(ExplainedRound(calls[0].what, calls=calls) for calls in calls_of(rows, plan, ranks))
        exchanges += [ExplainedExchange("the collectives of one step", rounds)] if rounds else []
        sets = ", ".join(str(list(one)) for one in self.process_sets)
        text = f"{self.description[0]} Only the members of a process set sum with each other: {sets}."
        return Explanation("data", self.kind, text, self.description[1], ranks, 1, axis, tuple(exchanges))

    def summing_members(self, plan: Plan) -> list[tuple[Sequence[int], int]]:
        """The first process set of every size, with the number of its size."""
        if not self.process_sets:
            return super().summing_members(plan)
        by_size: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
        for members in self.process_sets:
            by_size[len(members)].append(members)
        return [(same[0], len(same)) for same in by_size.values()]

    def counts_of(self, size: int, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> Iterable[Number]:
        """Adasum's halves may differ by an element, too; a worker by itself sends nothing."""
        if not self._combines_updates(plan) or size == 1:
            return super().counts_of(size, pp_rank, coordinate, plan) if size > 1 else ()
        _, places = places_on(plan.data_axis, size, plan)
        vectors = Counter(numel for numel, _ in self._vectors(pp_rank, coordinate, plan))
        return [sum(times * halving.elements(numel, size, places) for numel, times in vectors.items())]

    def equivalence(self, plan: Plan) -> Equivalence:
        """Exact if the gradients of all workers are summed unchanged; else a replay."""
        reasons = [
            (self.reduction == ADASUM, "Adasum of the workers' updates, per stored part of a tensor"),
            (bool(self.process_sets), f"averages within process sets {list(map(list, self.process_sets))}"),
            (bool(self.worker_batches), f"workers join after {list(self.worker_batches)} batches"),
        ]
        base = self.compression.equivalence(plan)
        if plan.mesh.size("dp") == 1 and not self.worker_batches:
            return base
        details = [text for applies, text in reasons if applies] + ([base.detail] if base.detail else [])
        return replace(base, kind="replay", detail="; ".join(details)) if details else base

    def _combines_updates(self, plan: Plan) -> bool:
        """Whether Adasum combines updates in place of the sums of gradients."""
        return self.reduction == ADASUM and plan.mesh.size("dp") > 1

    def _combining(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
        worker = coordinate["dp"]
        members = self.process_set(worker) if self.process_sets else tuple(range(plan.mesh.size("dp")))
        if len(members) == 1:
            return []
        vectors, size = self._vectors(pp_rank, coordinate, plan), BYTES[self.update_dtype(plan)]
        return halving.rows(vectors, len(members), members.index(worker), size, self.axis(worker))

    def _vectors(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[tuple[int, int]]:
        """(elements, tensors) of each bucket."""
        buckets = buckets_of(pp_rank, coordinate, plan).parts
        return [(sum(prod(shape) for _, shape in parts), len(parts)) for parts in buckets]


def _sent_bytes(pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[int]:
    """Bytes of the parameters of each bucket, in the dtype that is sent."""
    buckets = buckets_of(pp_rank, coordinate, plan).parts
    return [reduce_bytes(plan) * sum(prod(shape) for _, shape in parts) for parts in buckets]
