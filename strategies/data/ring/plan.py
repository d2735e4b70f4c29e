"""Data parallel with a written-out all-reduce (Gibiansky 2017; Sergeev and Del Balso 2018): ddp but for how it sums."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

from parallelrun.errors import Problem
from parallelrun.plan.account import merge
from parallelrun.plan.expert_axes import DP, EXPERT
from parallelrun.plan.explanation import Explanation, Step
from parallelrun.plan.structure import Collective, Plan
from parallelrun.plan.ways import Request

from ..allreduce import counts, explaining
from ..allreduce import settings as allreduce
from ..allreduce.settings import over
from ..allreduce.steps import NATIVE, RING, piece_elements
from ..compression import settings as compression
from ..compression.settings import Message
from ..ddp import plan as ddp
from .settings import RingWay


class Way(ddp.Way):
    """Every rank of dp holds all of its stage's weights, gradients and optimizer state."""

    reads = (*ddp.Way.reads, *allreduce.KEYS)

    def check(self, request: Request) -> list[Problem]:
        return super().check(request) + allreduce.check(request, RING)

    def settle(self, request: Request) -> RingWay:
        data = request.config.strategy.data
        return RingWay(
            data.kind,
            bucket_bytes=int(data.bucket_mb * 2**20),
            compression=compression.of(request.config),
            algorithm=allreduce.of(request, RING),
        )

    def filled(self, request: Request) -> tuple[str, ...]:
        """Sentences on what this way filled in."""
        return allreduce.filled(request, RING)

    def sending_classes(self, position: int, coordinate: dict[str, int], plan: Plan) -> list[tuple[int, int]]:
        """(the first, how many) of the members of dp that send the same: their segments may differ by an element."""
        sums = Counter(ddp.bucket_messages(position, coordinate, plan))
        others = {
            leaf: coordinate.get(leaf, 0) for leaf in plan.mesh.leaf_names if leaf not in plan.mesh.leaf_axes("dp")
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

    def links(self, plan: Plan) -> dict[tuple[int, int], int]:
        """(rank, rank) -> bytes of gradients that go from the one to the other in a step. Empty where the backend
        decides who sends to whom."""
        data = plan.data
        assert isinstance(data, RingWay)
        found: Counter[tuple[int, int]] = Counter()
        if data.algorithm.name == NATIVE:
            return found
        for axis in (DP, EXPERT + DP):
            size, algorithm = plan.mesh.size(axis), over(data.algorithm, axis, plan)
            for ranks in plan.mesh.groups(axis) if size > 1 else ():
                place = plan.mesh.coordinate(ranks[0])
                sums = Counter(ddp.bucket_messages(place.get("pp", 0), place, plan))
                for message, times in sums.items():
                    if message.axis != axis:
                        continue
                    for (source, target), elements in counts.links(algorithm, size, message.numel).items():
                        found[ranks[source], ranks[target]] += times * elements * message.element_bytes
        return found

    def explain(self, plan: Plan) -> Explanation:
        """Every message of every sum; where the backend sums, its collectives."""
        assert isinstance(plan.data, RingWay)
        if plan.data.algorithm.name == NATIVE:
            return super().explain(plan)
        found: list[Step] = []
        limit = piece_elements if plan.device == "cpu" else None
        for axis in (DP, EXPERT + DP):
            groups = plan.mesh.groups(axis) if plan.mesh.size(axis) > 1 else ()
            by_sums: dict[tuple[Message, ...], list[tuple[int, ...]]] = defaultdict(list)
            for ranks in groups:
                place = plan.mesh.coordinate(ranks[0])
                sums = tuple(m for m in ddp.bucket_messages(place["pp"], place, plan) if m.axis == axis)
                by_sums[sums].append(tuple(ranks))
            for sums, alike in by_sums.items():
                for number, one in enumerate(sums, start=1):
                    name = f"sum {number} of {len(sums)} over {axis}, {one.numel:,} gradients"
                    most = limit(one.element_bytes) if limit else None
                    algorithm = over(plan.data.algorithm, axis, plan)
                    found += explaining.steps(algorithm, alike, one.numel, one.element_bytes, most, axis, name)
        title = f"{plan.data.kind}: all-reduce by {plan.data.algorithm.name}"
        return Explanation("data", title, (*found, *self.final_steps(plan)))

    def rows_of_sum(self, message: Message, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
        """The messages of one sum."""
        assert isinstance(plan.data, RingWay)
        axis = message.axis
        algorithm, size, index = over(plan.data.algorithm, axis, plan), plan.mesh.size(axis), coordinate[axis]
        limit = piece_elements(message.element_bytes) if plan.device == "cpu" else None
        return counts.rows(algorithm, size, index, message.numel, message.element_bytes, limit, axis)
