"""The plan of horovod: its settings and process sets, the traffic and memory of its sums, and of Adasum."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from parallelrun.base.errors import Problem
from parallelrun.base.precision import BYTES
from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.contract.messages import Explanation
from parallelrun.planner.contract.plan import Equivalence, Plan
from parallelrun.planner.contract.request import Request
from parallelrun.planner.predict.prediction import merge

from ..common.allreduce.algorithm import NativeAllReduce
from ..common.allreduce.plan import AlgorithmAllReduce, indices_on
from ..common.allreduce.rounds import Number
from ..common.bucket_prediction import buckets_of, final_collectives, inner_sums
from ..common.buckets import reduce_bytes
from ..common.keys import HorovodConfig
from . import checks, halving

PROCESS_SET = "process_set"  # the name of their groups among the axes


@dataclass(frozen=True)
class Horovod(AlgorithmAllReduce):
    """Every rank of dp holds the complete weights, gradients and optimizer state of its stage.

    reduction: average | adasum. worker_batches: the number of batches of each dp coordinate; (): enough.
    process_sets: dp coordinates that average among themselves, each in one set; (): all together. span: consecutive
    coordinates of dp that share the experts of one copy of the model, and are one worker in sets, join and Adasum.
    """

    kind = "horovod"
    config_class = HorovodConfig

    reduction: str = "average"
    timeline: bool = False
    worker_batches: tuple[int, ...] = ()
    process_sets: tuple[tuple[int, ...], ...] = ()
    span: int = 1

    @classmethod
    def check(cls, request: Request) -> list[Problem]:
        return [*super().check(request), *checks.check_horovod(request)]

    @classmethod
    def check_algorithm(cls, request: Request) -> list[Problem]:
        problems, has_sets = super().check_algorithm(request), HorovodConfig.of(request.config).process_sets
        if not problems and has_sets and cls.requested_algorithm(request).has_groups:  # as in Horovod itself
            message = "the inner groups of algorithm=hierarchical are of all workers, not of a process set"
            problems = [Problem(message, "strategy.data.algorithm", "strategy.data.algorithm=ring", kind="not_built")]
        return problems

    @classmethod
    def resolve(cls, request: Request) -> Horovod:
        data, is_single = HorovodConfig.of(request.config), request.num_data_ranks == 1
        resolved, span = super().resolve(request), request.ep_replicas
        resolved = replace(resolved, algorithm=NativeAllReduce() if is_single else resolved.algorithm)
        resolved = replace(resolved, timeline=data.timeline, span=span)
        if request.dp <= span:  # one worker
            return resolved
        sets = checks.complete_sets(data.process_sets, request.dp, span)
        batches = tuple(data.worker_batches)
        return replace(resolved, reduction=data.reduction, worker_batches=batches, process_sets=sets)

    @classmethod
    def filled(cls, request: Request) -> tuple[str, ...]:
        return (*super().filled(request), *checks.filled(request))

    @property
    def independent(self) -> bool:
        """Adasum combines updates, so gradients stay each worker's own; process sets train separately."""
        return self.reduction == checks.ADASUM or bool(self.process_sets)

    @property
    def in_step(self) -> bool:
        """A worker that has joined takes part in gradients only."""
        return not self.independent and not self.worker_batches

    @property
    def sums_workers_first(self) -> bool:
        """Adasum, process sets and join are of workers, which have complete sequences and models."""
        return super().sums_workers_first or not self.in_step

    @classmethod
    def of_sums(cls, request: Request) -> Request:
        data, workers = HorovodConfig.of(request.config), request.dp // request.ep_replicas
        if workers < 2 or not (data.process_sets or data.worker_batches):
            return super().of_sums(request)
        return replace(request, dp=workers, cp=1, ep=1)

    @property
    def shares_statistics(self) -> bool:
        return not self.independent

    def has_batch(self, step: int, worker: int) -> bool:
        """Whether a worker (dp coordinate) has not joined yet."""
        return not self.worker_batches or step <= self.worker_batches[worker]

    # Process sets

    @cached_property
    def worker_sets(self) -> tuple[tuple[int, ...], ...]:
        """The process sets, by workers."""
        return tuple(tuple(dict.fromkeys(index // self.span for index in members)) for members in self.process_sets)

    def process_set(self, worker: int) -> tuple[int, ...]:
        """The workers of the process set of `worker`, itself among them."""
        return next(members for members in self.worker_sets if worker in members)

    def group_axis(self, axis: str, worker: int) -> str:
        """Process sets of different sizes have different names."""
        if not self.process_sets:
            return axis
        sizes = {len(members) for members in self.worker_sets if len(members) > 1}
        return PROCESS_SET if len(sizes) < 2 else f"{PROCESS_SET}_{len(self.process_set(worker))}"

    def group_size(self, axis: str) -> int | None:
        groups = {self.group_axis("dp", members[0]): len(members) for members in self.worker_sets if len(members) > 1}
        return groups.get(axis)

    def members(self, axis: str, worker: int) -> tuple[int, ...] | None:
        return self.process_set(worker) if self.process_sets and axis == self.group_axis(axis, worker) else None

    def rank_groups(self, plan: Plan) -> list[tuple[int, ...]]:
        """The ranks that sum with each other: those of each group of workers, or of each process set in it."""
        sets, groups = self.worker_sets or (range(plan.num_replicas),), plan.mesh.groups(plan.worker_axis)
        return [tuple(ranks[worker] for worker in members) for ranks in groups for members in sets]

    def summing_group(self, axis: str, coordinate: dict[str, int], plan: Plan) -> tuple[int, int]:
        if not self.process_sets:
            return super().summing_group(axis, coordinate, plan)
        worker = coordinate[plan.worker_axis]
        return len(members := self.process_set(worker)), members.index(worker)

    def summing_members(self, plan: Plan) -> list[tuple[Sequence[int], int]]:
        """The first process set of every size, with the number of sets of its size."""
        if not self.process_sets:
            return super().summing_members(plan)
        by_size: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
        for members in self.worker_sets:
            by_size[len(members)].append(members)
        return [(same[0], len(same)) for same in by_size.values()]

    # Traffic

    def combines_updates(self, plan: Plan) -> bool:
        """Whether Adasum combines updates in place of the sums of gradients."""
        return self.reduction == checks.ADASUM and plan.num_replicas > 1

    def update_dtype(self, plan: Plan) -> str:
        """The dtype in which Adasum sends updates."""
        return self.compression.dtype(plan)

    def collectives(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
        """The sums of gradients, or with adasum the messages that combine updates; then those of final gradients."""
        if not self.combines_updates(plan):
            return super().collectives(pp_rank, coordinate, plan)
        size, index = self.summing_group(plan.worker_axis, coordinate, plan)
        vectors, element_bytes = self._vectors(pp_rank, coordinate, plan), BYTES[self.update_dtype(plan)]
        axis = self.group_axis(plan.worker_axis, coordinate[plan.worker_axis])
        rows = halving.message_rows(vectors, size, index, element_bytes, axis) if size > 1 else []
        rows += inner_sums(pp_rank, coordinate, plan)
        return [*merge(rows), *final_collectives(pp_rank, coordinate, plan)]

    def counts_of(self, size: int, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> Iterable[Number]:
        """Adasum's halves may differ by an element, too; a worker by itself sends nothing."""
        if not self.combines_updates(plan) or size == 1:
            return super().counts_of(size, pp_rank, coordinate, plan) if size > 1 else ()
        _, indices = indices_on(plan.data_axis, size, plan)
        vectors = Counter(numel for numel, _ in self._vectors(pp_rank, coordinate, plan))
        return [sum(times * halving.sent_elements(numel, size, indices) for numel, times in vectors.items())]

    def explained_group(self, plan: Plan) -> tuple[int, str]:
        """The largest process set, or all workers if there are no sets."""
        if not self.process_sets:
            return super().explained_group(plan)
        worker = max(self.worker_sets, key=len)[0]
        return plan.mesh.rank(**{plan.worker_axis: worker}), self.group_axis(plan.worker_axis, worker)

    def explain(self, plan: Plan) -> Explanation:
        explanation = super().explain(plan)
        if not self.process_sets:
            return explanation
        sets = ", ".join(str(list(members)) for members in self.process_sets)
        text = f"{explanation.text} Only the members of a process set sum with each other: {sets}."
        return replace(explanation, text=text, num_groups=1)

    def equivalence(self, plan: Plan) -> Equivalence:
        """Exact if the gradients of all workers are summed unchanged; else a replay."""
        reasons = [
            (self.reduction == checks.ADASUM, "Adasum of the workers' updates, per stored part of a tensor"),
            (bool(self.process_sets), f"averages within process sets {list(map(list, self.process_sets))}"),
            (bool(self.worker_batches), f"workers join after {list(self.worker_batches)} batches"),
        ]
        base = self.compression.equivalence(plan)
        details = [text for applies, text in reasons if applies] + ([base.detail] if base.detail else [])
        return replace(base, kind="replay", detail="; ".join(details)) if details else base

    # Memory. With Adasum backward leaves the gradients where they are, and a rank keeps the weights before the update.

    def gathered_bytes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
        if not self.combines_updates(plan):
            return super().gathered_bytes(pp_rank, coordinate, plan)
        return reduce_bytes(plan) * sum(numel for numel, _ in self._vectors(pp_rank, coordinate, plan))

    def keeps_gradients(self, plan: Plan) -> bool:
        return not self.combines_updates(plan) and super().keeps_gradients(plan)

    def backward_bytes(self, stage: int, number: int, coordinate: dict[str, int], plan: Plan) -> list[int] | None:
        return None if self.combines_updates(plan) else super().backward_bytes(stage, number, coordinate, plan)

    def held_bytes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
        return 0 if self.combines_updates(plan) else super().held_bytes(pp_rank, coordinate, plan)

    def ending_bytes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
        """Where updates are combined, what the largest update of Adasum needs (`halving.update_bytes`)."""
        if not self.combines_updates(plan):
            return super().ending_bytes(pp_rank, coordinate, plan)
        size, index = self.summing_group(plan.data_axis, coordinate, plan)
        if size == 1:
            return 0
        sent, stored = BYTES[self.update_dtype(plan)], BYTES[plan.precision.stored]
        buckets = buckets_of(pp_rank, coordinate, plan).parts
        updates = ([prod(shape) for _, shape in parts] for parts in buckets)
        return max((halving.update_bytes(update, size, index, sent, stored) for update in updates), default=0)

    def _vectors(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[tuple[int, int]]:
        """(elements, tensors) of each bucket."""
        buckets = buckets_of(pp_rank, coordinate, plan).parts
        return [(sum(prod(shape) for _, shape in parts), len(parts)) for parts in buckets]
