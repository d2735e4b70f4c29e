"""The base class of strategies that all-reduce by an algorithm of this project or of the backend."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from parallelrun.base.errors import Problem
from parallelrun.base.wording import one_of
from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.contract.messages import ExplainedExchange, ExplainedRound, Explanation, calls_of, ranks_over
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.contract.request import Request

from ..bucket_prediction import final_collectives, inner_sums
from ..bucketed_plan import BucketedAllReduce
from ..compression.plan import SummedMessage, requested_compression
from ..keys import AlgorithmKeys
from .algorithm import Algorithm, NativeAllReduce
from .explain import explain_all_reduce
from .rings import HierarchicalAllReduce, RingAllReduce
from .rounds import Number, Rounds
from .trees import HalvingDoubling, TreeAllReduce

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Self

_CLASSES = (NativeAllReduce, RingAllReduce, HalvingDoubling, HierarchicalAllReduce, TreeAllReduce)
ALGORITHMS: dict[str, type[Algorithm]] = {algorithm.name: algorithm for algorithm in _CLASSES}


@dataclass(frozen=True)
class AlgorithmAllReduce(BucketedAllReduce):
    """A `BucketedAllReduce` with a choice of algorithms. default_algorithm: where the user names none."""

    default_algorithm: ClassVar[type[Algorithm]] = NativeAllReduce

    algorithm: Algorithm = field(default_factory=NativeAllReduce)

    @classmethod
    def requested_algorithm(cls, request: Request) -> type[Algorithm]:
        """The class of the algorithm that the user names, or of the default."""
        return ALGORITHMS[AlgorithmKeys.of(request.config).algorithm or cls.default_algorithm.name]

    @classmethod
    def check(cls, request: Request) -> list[Problem]:
        return super().check(request) + cls.check_algorithm(request)

    @classmethod
    def check_algorithm(cls, request: Request) -> list[Problem]:
        """An unknown algorithm, or what the named one refuses."""
        name = AlgorithmKeys.of(request.config).algorithm or cls.default_algorithm.name
        return one_of("strategy.data.algorithm", name, ALGORITHMS) or ALGORITHMS[name].check(cls.of_sums(request))

    @classmethod
    def resolve(cls, request: Request) -> Self:
        return replace(super().resolve(request), algorithm=cls.requested_algorithm(request).of(cls.of_sums(request)))

    @classmethod
    def filled(cls, request: Request) -> tuple[str, ...]:
        return cls.requested_algorithm(request).filled(cls.of_sums(request))

    @classmethod
    def of_sums(cls, request: Request) -> Request:
        """The request as the sums over dp see it: without cp, if that is summed first."""
        if request.dp == 1 or not requested_compression(request.config).compresses:
            return request
        return replace(request, cp=1, ep=request.ep_replicas * (request.ep // request.ep_data_ranks))

    def summing_group(self, axis: str, coordinate: dict[str, int], plan: Plan) -> tuple[int, int]:
        """(size, index) of a rank in the group that sums over `axis`."""
        return plan.mesh.size(axis), coordinate[axis]

    def group_axis(self, axis: str, worker: int) -> str:
        """The name of the group in which `worker` sums over `axis`."""
        return axis

    def rounds(self, axis: str, size: int, index: int, numel: int, plan: Plan) -> Rounds:
        """The rounds of member `index` of a group of `size` along `axis` for a tensor of `numel` elements.

        There are none where the backend chooses the messages.
        """
        return self.algorithm.over(axis, plan).rounds(size, index, numel)

    def rows_of_sum(self, message: SummedMessage, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
        size, index = self.summing_group(message.axis, coordinate, plan)
        if size == 1:
            return []
        algorithm = self.algorithm.over(message.axis, plan)
        axis = self.group_axis(message.axis, coordinate[plan.worker_axis])
        return algorithm.collectives(size, index, message.numel, message.element_bytes, axis)

    def sending_classes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[tuple[int, int]]:
        """(the first, how many) of the members of dp that send the same: their segments may differ by an element."""
        return [
            (members[first], times * count)
            for members, times in self.summing_members(plan)
            for first, count in equal_members(self.counts_of(len(members), pp_rank, coordinate, plan), len(members))
        ]

    def summing_members(self, plan: Plan) -> list[tuple[Sequence[int], int]]:
        """(members of dp that sum with each other, how many such groups send the same): all of them, once."""
        return [(range(plan.mesh.size(plan.data_axis)), 1)]

    def counts_of(self, size: int, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> Iterable[Number]:
        """The counts of a step, each as an array over the `size` members of a group of `summing_members`."""
        totals: defaultdict[tuple[str, str], Number] = defaultdict(int)
        for message, times in Counter(self.bucket_messages(pp_rank, coordinate, plan)).items():
            num_members, indices = indices_on(message.axis, size, plan)
            counts = self.algorithm.over(message.axis, plan).counts(num_members, indices, message.numel)
            totals[message.axis, "sends"] += times * counts.sends
            totals[message.axis, "bytes"] += times * counts.elements * message.element_bytes
            totals[message.axis, "receives"] += times * counts.receives
        return totals.values()

    def held_bytes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
        """The receive buffers of all sums but the last, which starts when backward has ended."""
        return self._receive_bytes(self.bucket_messages(pp_rank, coordinate, plan)[:-1], coordinate, plan)

    def ending_bytes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
        every = self._receive_bytes(self.bucket_messages(pp_rank, coordinate, plan), coordinate, plan)
        return every - self.held_bytes(pp_rank, coordinate, plan)

    def _receive_bytes(self, messages: list[SummedMessage], coordinate: dict[str, int], plan: Plan) -> int:
        """One buffer per group, as large as the group's largest sum needs."""
        largest: Counter[str] = Counter()
        for message in set(messages):
            size, index = self.summing_group(message.axis, coordinate, plan)
            longest = self.algorithm.over(message.axis, plan).longest_added(size, index, message.numel)
            largest[message.axis] = max(largest[message.axis], longest * message.element_bytes)
        return largest.total()

    def explained_group(self, plan: Plan) -> tuple[int, str]:
        """(a rank, the axis) of the group that `explain` describes."""
        return 0, plan.data_axis

    def explain(self, plan: Plan) -> Explanation:
        """Every message of every bucket, or one all-reduce a bucket where the backend chooses them."""
        rank, axis = self.explained_group(plan)
        coordinate, ranks = plan.mesh.coordinate(rank), ranks_over(plan, axis, rank)
        text, exchanges = self.described(), []
        rows, title = self.collectives(coordinate["pp"], coordinate, plan), "the collectives of one step"
        if not self.algorithm.native and len(ranks) > 1:
            messages = self.bucket_messages(coordinate["pp"], coordinate, plan)
            text, exchanges = (
                self.algorithm.text,
                [
                    self._explain_sum(f"bucket {number} of {len(messages)}", message, rank, plan)
                    for number, message in enumerate(messages, start=1)
                ],
            )
            inside = inner_sums(coordinate["pp"], coordinate, plan)
            exchanges = [*_exchanges("inside each worker", inside, plan, ranks), *exchanges]
            rows, title = final_collectives(coordinate["pp"], coordinate, plan), "the final gradients"
        exchanges += _exchanges(title, rows, plan, ranks)
        num_groups = plan.mesh.num_ranks // len(ranks)
        return Explanation("data", self.kind, *text, ranks, num_groups, axis, tuple(exchanges))

    def _explain_sum(self, title: str, message: SummedMessage, rank: int, plan: Plan) -> ExplainedExchange:
        """The messages of one sum in the group of `rank`."""
        algorithm = self.algorithm.over(message.axis, plan)
        axis = self.group_axis(message.axis, plan.mesh.coordinate(rank)[plan.worker_axis])
        return explain_all_reduce(algorithm, ranks_over(plan, axis, rank), message.numel, message.element_bytes, title)


def _exchanges(title: str, rows: list[Collective], plan: Plan, ranks: Sequence[int]) -> list[ExplainedExchange]:
    rounds = tuple(ExplainedRound(calls[0].what, calls=calls) for calls in calls_of(rows, plan, ranks))
    return [ExplainedExchange(title, rounds)] if rounds else []


# numpy is imported on call: most plans need none of this.


def indices_on(axis: str, size: int, plan: Plan) -> tuple[int, NDArray[Any]]:
    """(size of a group of `axis`, the index in its group of each member of the data axis, in order).

    size: members of the data axis that sum with each other; an axis of experts has fewer, where all of them do.
    """
    import numpy

    rest = numpy.arange(size)
    if axis == plan.data_axis:
        return size, rest
    digits, indices = {}, numpy.zeros_like(rest)
    for name in reversed(plan.mesh.mesh_dims_of(plan.data_axis)):
        rest, digits[name] = divmod(rest, plan.mesh.size(name))
    for name in plan.mesh.mesh_dims_of(axis):
        indices = indices * plan.mesh.size(name) + digits[name]
    return plan.mesh.size(axis), indices


def equal_members(numbers: Iterable[Number], size: int) -> list[tuple[int, int]]:
    """(the first, how many) of the members whose numbers are all equal. numbers: arrays over `size` members, or one
    number for all of them."""
    import numpy

    table = numpy.stack([numpy.zeros(size, dtype=numpy.int64), *(numpy.broadcast_to(n, size) for n in numbers)])
    _, first, counts = numpy.unique(table, axis=1, return_index=True, return_counts=True)
    return sorted(zip(first.tolist(), counts.tolist()))
