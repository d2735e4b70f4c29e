"""The base class of strategies that all-reduce by an algorithm of this project or of the backend. Torch-free."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from parallelrun.errors import Problem
from parallelrun.plan.data_strategy import ExchangeForm
from parallelrun.plan.expert_axes import DP, EXPERT
from parallelrun.plan.messages import ExplainedExchange, ExplainedRound, Explanation, calls_of, ranks_over
from parallelrun.plan.prediction import merge
from parallelrun.plan.request import Request
from parallelrun.plan.structure import Collective, Plan

from .. import buckets
from ..bucketed_plan import BucketedAllReduce
from ..compression.plan import SummedMessage
from . import algorithm as algorithms
from . import counts, explain
from .algorithm import Algorithm, over
from .steps import NATIVE, piece_elements

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class AlgorithmAllReduce(BucketedAllReduce):
    """A `BucketedAllReduce` with a choice of algorithms. default_algorithm: where the user names none."""

    default_algorithm: ClassVar[str] = NATIVE

    algorithm: Algorithm = field(default_factory=Algorithm)

    @classmethod
    def check(cls, request: Request) -> list[Problem]:
        return super().check(request) + algorithms.check(request, cls.default_algorithm)

    @classmethod
    def resolve(cls, request: Request) -> Self:
        return replace(super().resolve(request), algorithm=algorithms.of(request, cls.default_algorithm))

    @classmethod
    def filled(cls, request: Request) -> tuple[str, ...]:
        return algorithms.filled(request, cls.default_algorithm)

    def sending_classes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[tuple[int, int]]:
        """(the first, how many) of the members of dp that send the same: their segments may differ by an element."""
        sums = Counter(self.bucket_messages(pp_rank, coordinate, plan))
        others = {
            mesh_dim: coordinate.get(mesh_dim, 0)
            for mesh_dim in plan.mesh.mesh_dim_names
            if mesh_dim not in plan.mesh.mesh_dims_of("dp")
        }
        alike: dict[tuple[Collective, ...], list[int]] = defaultdict(list)
        for index in range(plan.mesh.size("dp")):
            place = plan.mesh.coordinate(plan.mesh.rank(**others, dp=index))
            rows = [
                replace(row, calls=times * row.calls, payload_bytes=times * row.payload_bytes)
                for message, times in sums.items()
                for row in self.rows_of_sum(message, place, plan)
            ]
            alike[tuple(merge(rows))].append(index)
        return [(same[0], len(same)) for same in alike.values()]

    def held_bytes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
        """Buffers for what the messages bring, kept per group of ranks and as large as its largest sum needs."""
        largest: Counter[str] = Counter()
        for message in set(self.bucket_messages(pp_rank, coordinate, plan)):
            size = self.buffer_elements(message, coordinate, plan) * message.element_bytes
            largest[message.axis] = max(largest[message.axis], size)
        return largest.total()

    def buffer_elements(self, message: SummedMessage, coordinate: dict[str, int], plan: Plan) -> int:
        """Elements of the buffers in which the parts of one sum arrive."""
        axis, on_cpu = message.axis, plan.device == "cpu"
        algorithm = over(self.algorithm, axis, plan)
        return counts.buffer_elements(algorithm, plan.mesh.size(axis), coordinate[axis], message.numel, on_cpu)

    def exchange_form(self, plan: Plan) -> ExchangeForm:
        form, algorithm = super().exchange_form(plan), self.algorithm
        native = algorithm.name == NATIVE
        return replace(form, name=algorithm.cost_name, group_size=algorithm.group_size, native=native)

    def explain(self, plan: Plan) -> Explanation:
        """Every message of every bucket, or one all-reduce a bucket where the backend chooses them."""
        if self.algorithm.name == NATIVE:
            return super().explain(plan)
        coordinate = plan.mesh.coordinate(0)
        messages = self.bucket_messages(coordinate["pp"], coordinate, plan)
        exchanges = [
            self.explained_sum(f"bucket {number} of {len(messages)}", message, plan, ranks_over(plan, message.axis))
            for number, message in enumerate(messages, start=1)
        ]
        ranks = ranks_over(plan, DP)
        final = calls_of(buckets.final_collectives(coordinate["pp"], coordinate, plan), plan, ranks)
        if final:
            exchanges.append(
                ExplainedExchange("the final gradients", tuple(ExplainedRound(c[0].what, calls=c) for c in final))
            )
        text, source = explain.TEXTS[self.algorithm.name]
        groups = plan.mesh.num_ranks // len(ranks)
        return Explanation("data", self.kind, text, source, ranks, groups, DP, tuple(exchanges))

    def explained_sum(
        self, title: str, message: SummedMessage, plan: Plan, ranks: tuple[int, ...]
    ) -> ExplainedExchange:
        limit = piece_elements(message.element_bytes) if plan.device == "cpu" else None
        algorithm = over(self.algorithm, message.axis, plan)
        return explain.exchange(algorithm, ranks, message.numel, message.element_bytes, limit, title)

    def links(self, plan: Plan) -> dict[tuple[int, int], int]:
        """(rank, rank) -> bytes of gradients that go from the one to the other in a step. Empty where the backend
        decides who sends to whom."""
        found: Counter[tuple[int, int]] = Counter()
        if self.algorithm.name == NATIVE:
            return found
        for axis in (DP, EXPERT + DP):
            size, algorithm = plan.mesh.size(axis), over(self.algorithm, axis, plan)
            for ranks in plan.mesh.groups(axis) if size > 1 else ():
                coordinate = plan.mesh.coordinate(ranks[0])
                sums = Counter(self.bucket_messages(coordinate.get("pp", 0), coordinate, plan))
                for message, times in sums.items():
                    if message.axis != axis:
                        continue
                    for (source, target), elements in counts.links(algorithm, size, message.numel).items():
                        found[ranks[source], ranks[target]] += times * elements * message.element_bytes
        return found

    def rows_of_sum(self, message: SummedMessage, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
        """The messages of one sum."""
        axis = message.axis
        algorithm, size, index = over(self.algorithm, axis, plan), plan.mesh.size(axis), coordinate[axis]
        limit = piece_elements(message.element_bytes) if plan.device == "cpu" else None
        return counts.rows(algorithm, size, index, message.numel, message.element_bytes, limit, axis)
