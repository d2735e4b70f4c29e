"""Horovod's data parallelism: broadcast at the start, fused all-reduce under backward, and what belongs to it.

What Horovod negotiates in every cycle (which tensors are ready everywhere) stands in the plan here: buckets are fixed,
so there is no cycle time, and its response cache would always hit. `bucket_mb` is its fusion threshold (0: every tensor
alone), `microbatches` its backward_passes_per_step.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, replace
from math import prod

from parallelrun.errors import Problem
from parallelrun.plan.messages import Exchange, Explanation, Round, calls_of, ranks_over
from parallelrun.plan.parameters import held_parameters
from parallelrun.plan.strategy import Request
from parallelrun.plan.structure import Collective, Equivalence, Plan

from .. import buckets
from ..allreduce import counts
from ..allreduce import settings as allreduce
from ..allreduce.settings import Algorithm
from ..allreduce.steps import NATIVE, piece_elements
from ..compression import settings as compression
from ..compression.settings import HALF_BYTES, Message
from ..ddp import plan as ddp
from ..ring import plan as ring
from . import halving, settings
from .settings import ADASUM, HorovodWay

KEYS = ("reduction", "timeline", "stall_warn_s", "worker_batches", "join_divisor", "process_sets")


class Way(ring.Way):
    """Every rank of dp holds all of its stage's weights, gradients and optimizer state."""

    reads = (*ring.Way.reads, *KEYS)

    def check(self, request: Request) -> list[Problem]:
        found = allreduce.check(request, NATIVE)
        sets = request.config.strategy.data.process_sets
        algorithm = request.config.strategy.data.algorithm
        if sets and algorithm == "hierarchical" and not found:
            what = "the inner groups of algorithm=hierarchical are of all workers, not of a process set"
            found = [Problem(what, "strategy.data.algorithm", "strategy.data.algorithm=ring", kind="not_built")]
        return [*compression.check(request), *found, *settings.check(request)]

    def resolve(self, request: Request) -> HorovodWay:
        data, alone = request.config.strategy.data, request.dp == 1
        return HorovodWay(
            data.kind,
            bucket_bytes=int(data.bucket_mb * 2**20),
            compression=compression.of(request.config),
            algorithm=Algorithm() if alone else allreduce.of(request, NATIVE),
            reduction="average" if alone else data.reduction,
            timeline=data.timeline,
            stall_warn_s=data.stall_warn_s,
            worker_batches=tuple(data.worker_batches),
            divides_by_active=data.join_divisor == "active",
            process_sets=() if alone else settings.completed(data.process_sets, request.dp),
        )

    def filled(self, request: Request) -> tuple[str, ...]:
        """Sentences on what this way filled in."""
        return (*allreduce.filled(request, NATIVE), *settings.filled(request))

    def collectives(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
        """As ddp's, or with adasum the messages that combine updates; then what the final gradients need."""
        if not _is_adasum(plan):
            return super().collectives(pp_rank, coordinate, plan)
        layouts = [(held, held.layout) for held in held_parameters(plan, pp_rank)]
        return [*_combining(pp_rank, coordinate, plan), *buckets.final_collectives(layouts, coordinate, plan)]

    def gathered_bytes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
        """What compression or, with adasum, the weights before the update and the largest update take."""
        if not _is_adasum(plan):
            return super().gathered_bytes(pp_rank, coordinate, plan)
        contents = buckets.contents(pp_rank, coordinate, plan)
        sizes = [buckets.reduce_bytes(plan) * sum(prod(shape) for _, shape in bucket.parts) for bucket in contents]
        return sum(sizes) + max(sizes, default=0)

    def held_bytes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
        """As ring's; with adasum its updates are counted in `gathered_bytes`."""
        return 0 if _is_adasum(plan) else super().held_bytes(pp_rank, coordinate, plan)

    def buffer_elements(self, message: Message, coordinate: dict[str, int], plan: Plan) -> int:
        """Elements of the buffers in which the parts of one sum over a process set, or over all copies, arrive."""
        strategy = _way(plan)
        if not strategy.process_sets:
            return super().buffer_elements(message, coordinate, plan)
        members, on_cpu = strategy.process_set(coordinate["dp"]), plan.device == "cpu"
        index = members.index(coordinate["dp"])
        return counts.buffer_elements(strategy.algorithm, len(members), index, message.numel, on_cpu)

    def rows_of_sum(self, message: Message, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
        """The messages of one sum over a process set, or over all copies where there are none."""
        strategy = _way(plan)
        if not strategy.process_sets:
            return super().rows_of_sum(message, coordinate, plan)
        worker = coordinate["dp"]
        members = strategy.process_set(worker)
        if len(members) == 1:
            return []
        limit = piece_elements(message.element_bytes) if plan.device == "cpu" else None
        index = members.index(worker)
        rows = ddp.Way.rows_of_sum(self, message, coordinate, plan)
        if strategy.algorithm.name != NATIVE:
            rows = counts.rows(strategy.algorithm, len(members), index, message.numel, message.element_bytes, limit)
        return [replace(row, axis=strategy.axis(worker)) for row in rows]

    def links(self, plan: Plan) -> dict[tuple[int, int], int]:
        """Not told: process sets and Adasum send over links of their own."""
        return {}

    def explain(self, plan: Plan) -> Explanation:
        """The messages of the largest process set, or of all workers where there are no sets."""
        strategy = _way(plan)
        if not strategy.process_sets:
            return super().explain(plan)
        worker = max(strategy.process_sets, key=len)[0]
        first = {mesh_dim: plan.mesh.coordinate(0)[mesh_dim] for mesh_dim in plan.mesh.mesh_dim_names}
        coordinate = plan.mesh.coordinate(plan.mesh.rank(**{**first, "dp": worker}))
        axis, ranks = (
            strategy.axis(worker),
            ranks_over(plan, strategy.axis(worker), plan.mesh.rank(**{**first, "dp": worker})),
        )
        rows, exchanges = self.collectives(coordinate["pp"], coordinate, plan), []
        if strategy.algorithm.name != NATIVE and len(ranks) > 1:
            rows = [row for row in rows if row.axis != axis]
            messages = ddp.bucket_messages(coordinate["pp"], coordinate, plan)
            titles = [f"bucket {number} of {len(messages)}" for number in range(1, len(messages) + 1)]
            exchanges = [self._explained_sum(*one, plan, ranks) for one in zip(titles, messages)]
        rounds = tuple(Round(calls[0].what, calls=calls) for calls in calls_of(rows, plan, ranks))
        exchanges += [Exchange("the collectives of one step", rounds)] if rounds else []
        sets = ", ".join(str(list(one)) for one in strategy.process_sets)
        text = f"{self.explained[0]} Only the members of a process set sum with each other: {sets}."
        return Explanation("data", strategy.kind, text, self.explained[1], ranks, 1, axis, tuple(exchanges))

    def sending_classes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[tuple[int, int]]:
        """(the first, how many) of the members of dp that send the same: Adasum's halves may differ by an element."""
        if not _is_adasum(plan):
            return super().sending_classes(pp_rank, coordinate, plan)
        alike: dict[tuple[tuple[object, ...], ...], list[int]] = defaultdict(list)
        for worker in range(plan.mesh.size("dp")):
            rows = _combining(pp_rank, {**coordinate, "dp": worker}, plan)
            alike[tuple(tuple(asdict(row).values()) for row in rows)].append(worker)
        return [(same[0], len(same)) for same in alike.values()]

    def equivalence(self, plan: Plan) -> Equivalence:
        """What one device computes, as long as workers' gradients are summed as they are."""
        strategy = _way(plan)
        reasons = [
            (strategy.reduction == ADASUM, "Adasum of the workers' updates, per stored part of a tensor"),
            (bool(strategy.process_sets), f"averages within process sets {list(map(list, strategy.process_sets))}"),
            (bool(strategy.worker_batches), f"workers join after {list(strategy.worker_batches)} batches"),
        ]
        base = compression.equivalence(plan, strategy.compression)
        if plan.mesh.size("dp") == 1 and not strategy.worker_batches:
            return base
        details = [text for applies, text in reasons if applies] + ([base.detail] if base.detail else [])
        return replace(base, kind="replay", detail="; ".join(details)) if details else base


def _way(plan: Plan) -> HorovodWay:
    assert isinstance(plan.data, HorovodWay)
    return plan.data


def _is_adasum(plan: Plan) -> bool:
    return _way(plan).reduction == ADASUM and plan.mesh.size("dp") > 1


def _combining(pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
    strategy, worker = _way(plan), coordinate["dp"]
    members = strategy.process_set(worker) if strategy.process_sets else tuple(range(plan.mesh.size("dp")))
    if len(members) == 1:
        return []
    contents = buckets.contents(pp_rank, coordinate, plan)
    vectors = [(sum(prod(shape) for _, shape in bucket.parts), len(bucket.parts)) for bucket in contents]
    size = HALF_BYTES if strategy.compression.kind == "fp16" else buckets.reduce_bytes(plan)
    return halving.rows(vectors, len(members), members.index(worker), size, strategy.axis(worker))
