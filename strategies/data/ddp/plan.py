"""Data parallel with whole copies: gradients are summed over dp in buckets, under backward.

Gradients of experts that are spread over ep are summed over `expert_dp`, in buckets of their own.
"""

from __future__ import annotations

from dataclasses import replace

from parallelrun.errors import Problem
from parallelrun.plan.account import merge
from parallelrun.plan.explanation import Explanation, Step, everywhere, of_rows
from parallelrun.plan.structure import Collective, Equivalence, Plan
from parallelrun.plan.ways import Request
from parallelrun.train.parameters import held_parameters

from .. import buckets
from ..compression import settings as compression
from ..compression.settings import CompressedWay, Message
from ..replicated import Replicated


class Way(Replicated):
    """Every rank of dp holds all of its stage's weights, gradients and optimizer state."""

    reads: tuple[str, ...] = ("bucket_mb", *compression.KEYS)
    takes_experts = True

    def check(self, request: Request) -> list[Problem]:
        return compression.check(request)

    def settle(self, request: Request) -> CompressedWay:
        return compression.settle(request)

    def collectives(self, position: int, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
        """The sums of every bucket, then what the final gradients need (partial axes, tied copies)."""
        messages = bucket_messages(position, coordinate, plan)
        out = merge([row for message in messages for row in self.rows_of_sum(message, coordinate, plan)])
        layouts = [(held, held.layout) for held in held_parameters(plan, position)]
        return out + buckets.final_collectives(layouts, coordinate, plan)

    def gathered_bytes(self, position: int, coordinate: dict[str, int], plan: Plan) -> int:
        """What compression holds beside weights, gradients and optimizer state."""
        assert isinstance(plan.data, CompressedWay)
        contents = buckets.contents(position, coordinate, plan)
        return sum(compression.held_bytes(bucket.parts, plan, plan.data.compression) for bucket in contents)

    def explain(self, plan: Plan) -> Explanation:
        """Every sum of a bucket, in the order in which they are sent, then what final gradients need."""
        steps: list[Step] = []
        by_rank = {}
        for rank in range(plan.num_workers):
            place = plan.mesh.coordinate(rank)
            by_rank[rank] = [(message, place) for message in bucket_messages(place["pp"], place, plan)]
        for number in range(max(map(len, by_rank.values()))):

            def sums(rank: int, number: int = number) -> list[tuple[Collective, str]]:
                mine = by_rank[rank][number : number + 1]
                rows = [(row, m) for m, place in mine for row in self.rows_of_sum(m, place, plan)]
                return [(row, f"{m.numel:,} gradients") for row, m in rows if plan.mesh.size(row.axis) > 1]

            found = everywhere(plan, sums)
            steps += [Step(f"sum {number + 1}, under backward", found)] if found else []
        return Explanation("data", plan.data.kind, (*steps, *self.final_steps(plan)))

    def final_steps(self, plan: Plan) -> tuple[Step, ...]:
        """The sums that complete gradients after backward: over partial axes, and of tied copies."""

        def final(rank: int) -> list[Collective]:
            place = plan.mesh.coordinate(rank)
            layouts = [(held, held.layout) for held in held_parameters(plan, place["pp"])]
            return buckets.final_collectives(layouts, place, plan)

        return of_rows("data", plan.data.kind, plan, final).steps

    def rows_of_sum(self, message: Message, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
        """What one sum sends: for ways that are like this one but for how they sum."""
        return [Collective(message.axis, "all_reduce", "gradients", 1, message.payload_bytes)]

    def equivalence(self, plan: Plan) -> Equivalence:
        assert isinstance(plan.data, CompressedWay)
        return compression.equivalence(plan, plan.data.compression)


def bucket_messages(position: int, coordinate: dict[str, int], plan: Plan) -> list[Message]:
    """Every sum of one step, in the order in which the buckets are sent."""
    assert isinstance(plan.data, CompressedWay)
    return [
        replace(message, axis=bucket.axis)
        for bucket in buckets.contents(position, coordinate, plan)
        for message in compression.messages(bucket.parts, plan, plan.data.compression)
    ]
