"""The base class of strategies that all-reduce by an algorithm of this project or of the backend."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from parallelrun.base.errors import Problem
from parallelrun.base.wording import one_of
from parallelrun.planner.contract.messages import ExplainedExchange, ExplainedRound, Explanation, calls_of, ranks_over
from parallelrun.planner.contract.plan import Collective, Plan
from parallelrun.planner.contract.request import Request
from parallelrun.planner.pieces.expert_axes import DP, EXPERT

from ..bucket_prediction import final_collectives
from ..bucketed_plan import BucketedAllReduce
from ..compression.plan import SummedMessage
from ..keys import AlgorithmKeys
from . import explain
from .algorithm import Algorithm, NativeAllReduce
from .members import alike, places_on
from .rings import HierarchicalAllReduce, RingAllReduce
from .rounds import Number, Rounds, SumsByMessages, piece_elements
from .trees import HalvingDoubling, TreeAllReduce

if TYPE_CHECKING:
    from typing_extensions import Self

_CLASSES = (NativeAllReduce, RingAllReduce, HalvingDoubling, HierarchicalAllReduce, TreeAllReduce)
ALGORITHMS: dict[str, type[Algorithm]] = {algorithm.name: algorithm for algorithm in _CLASSES}


@dataclass(frozen=True)
class AlgorithmAllReduce(BucketedAllReduce, SumsByMessages):
    """A `BucketedAllReduce` with a choice of algorithms. default_algorithm: where the user names none."""

    default_algorithm: ClassVar[type[Algorithm]] = NativeAllReduce

    algorithm: Algorithm = field(default_factory=NativeAllReduce)

    @classmethod
    def asked_algorithm(cls, request: Request) -> type[Algorithm]:
        """The class of the algorithm that the user names, or of the default."""
        return ALGORITHMS[AlgorithmKeys.of(request.config).algorithm or cls.default_algorithm.name]

    @classmethod
    def check(cls, request: Request) -> list[Problem]:
        return super().check(request) + cls.check_algorithm(request)

    @classmethod
    def check_algorithm(cls, request: Request) -> list[Problem]:
        """An unknown algorithm, or what the named one refuses."""
        name = AlgorithmKeys.of(request.config).algorithm or cls.default_algorithm.name
        return one_of("strategy.data.algorithm", name, ALGORITHMS) or cls.asked_algorithm(request).check(request)

    @classmethod
    def resolve(cls, request: Request) -> Self:
        return replace(super().resolve(request), algorithm=cls.asked_algorithm(request).of(request))

    @classmethod
    def filled(cls, request: Request) -> tuple[str, ...]:
        return cls.asked_algorithm(request).filled(request)

    def summing_group(self, axis: str, coordinate: dict[str, int], plan: Plan) -> tuple[int, int]:
        """(size, index) of a rank in the group that sums over `axis`."""
        return plan.mesh.size(axis), coordinate[axis]

    def rounds(self, axis: str, size: int, index: int, numel: int, plan: Plan) -> Rounds:
        return self.algorithm.over(axis, plan).rounds(size, index, numel)

    def rows_of_sum(self, message: SummedMessage, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
        size, index = self.summing_group(message.axis, coordinate, plan)
        algorithm, limit = self.algorithm.over(message.axis, plan), _limit(message, plan)
        return algorithm.collectives(size, index, message.numel, message.element_bytes, limit, message.axis)

    def sending_classes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[tuple[int, int]]:
        """(the first, how many) of the members of dp that send the same: their segments may differ by an element."""
        return [
            (members[first], times * count)
            for members, times in self.summing_members(plan)
            for first, count in alike(self.counts_of(len(members), pp_rank, coordinate, plan), len(members))
        ]

    def summing_members(self, plan: Plan) -> list[tuple[Sequence[int], int]]:
        """(members of dp that sum with each other, how many such groups send the same): all of them, once."""
        return [(range(plan.num_data_ranks), 1)]

    def counts_of(self, size: int, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> Iterable[Number]:
        """The counts of a step, each as an array over the `size` members of a group of `summing_members`."""
        totals: defaultdict[tuple[str, str], Number] = defaultdict(int)
        for message, times in Counter(self.bucket_messages(pp_rank, coordinate, plan)).items():
            num_members, places = places_on(message.axis, size, plan)
            algorithm, limit = self.algorithm.over(message.axis, plan), _limit(message, plan)
            counts = algorithm.counts(num_members, places, message.numel, limit)
            totals[message.axis, "sends"] += times * counts.sends
            totals[message.axis, "bytes"] += times * counts.elements * message.element_bytes
            totals[message.axis, "receives"] += times * counts.receives
        return totals.values()

    def held_bytes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
        """Buffers for what the messages bring, kept per group of ranks and as large as its largest sum needs."""
        largest: Counter[str] = Counter()
        for message in set(self.bucket_messages(pp_rank, coordinate, plan)):
            size, index = self.summing_group(message.axis, coordinate, plan)
            algorithm = self.algorithm.over(message.axis, plan)
            elements = algorithm.buffer_elements(size, index, message.numel, on_cpu=plan.device == "cpu")
            largest[message.axis] = max(largest[message.axis], elements * message.element_bytes)
        return largest.total()

    def explain(self, plan: Plan) -> Explanation:
        """Every message of every bucket, or one all-reduce a bucket where the backend chooses them."""
        if self.algorithm.native:
            return super().explain(plan)
        coordinate = plan.mesh.coordinate(0)
        messages = self.bucket_messages(coordinate["pp"], coordinate, plan)
        exchanges = [
            self.explained_sum(f"bucket {number} of {len(messages)}", message, plan, ranks_over(plan, message.axis))
            for number, message in enumerate(messages, start=1)
        ]
        ranks = ranks_over(plan, DP)
        final = calls_of(final_collectives(coordinate["pp"], coordinate, plan), plan, ranks)
        if final:
            exchanges.append(
                ExplainedExchange("the final gradients", tuple(ExplainedRound(c[0].what, calls=c) for c in final))
            )
        groups = plan.mesh.num_ranks // len(ranks)
        return Explanation("data", self.kind, *self.algorithm.text, ranks, groups, DP, tuple(exchanges))

    def explained_sum(
        self, title: str, message: SummedMessage, plan: Plan, ranks: tuple[int, ...]
    ) -> ExplainedExchange:
        """The messages of one sum over `ranks`."""
        algorithm = self.algorithm.over(message.axis, plan)
        return explain.exchange(algorithm, ranks, message.numel, message.element_bytes, _limit(message, plan), title)

    def links(self, plan: Plan) -> dict[tuple[int, int], int]:
        """(rank, rank) -> bytes of gradients that go from the one to the other in a step. Empty where the backend
        decides which rank sends to which."""
        sizes: Counter[tuple[int, int]] = Counter()
        if self.algorithm.native:
            return sizes
        for axis in (DP, EXPERT + DP):
            size, algorithm = plan.mesh.size(axis), self.algorithm.over(axis, plan)
            for ranks in plan.mesh.groups(axis) if size > 1 else ():
                coordinate = plan.mesh.coordinate(ranks[0])
                sums = Counter(self.bucket_messages(coordinate.get("pp", 0), coordinate, plan))
                for message, times in sums.items():
                    if message.axis != axis:
                        continue
                    for (source, target), elements in algorithm.links(size, message.numel).items():
                        sizes[ranks[source], ranks[target]] += times * elements * message.element_bytes
        return sizes


def _limit(message: SummedMessage, plan: Plan) -> int | None:
    """Elements of a piece of a message; None: messages are sent whole."""
    return piece_elements(message.element_bytes) if plan.device == "cpu" else None
