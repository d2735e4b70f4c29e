"""The ring, and the hierarchical all-reduce that is made of rings."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import gcd

from parallelrun.base.errors import Problem
from parallelrun.base.wording import divisors, either, nearest
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.contract.request import Request

from ..keys import AlgorithmKeys
from .algorithm import GROUP_SIZE, Algorithm, Counts
from .rounds import Number, Rounds, all_gather, ring, scatter_reduce, segments


@dataclass(frozen=True)
class RingAllReduce(Algorithm):
    """See `rounds.ring`."""

    text = (
        "The buffer is cut into as many blocks as there are ranks. In n - 1 rounds of scatter-reduce each rank sends a "
        "block to the next rank, which adds it to its own; then each rank holds one block of the sum. In n - 1 rounds "
        "of all-gather these travel on around the ring. Each rank sends 2 (n - 1) / n of the buffer.",
        "Patarasuk and Yuan 2009; Gibiansky 2017",
    )

    name: str = field(default="ring", init=False)

    def rounds(self, size: int, index: int, numel: int) -> Rounds:
        return ring(range(size), index, (0, numel))

    def counts(self, size: int, index: Number, numel: int) -> Counts:
        counts = [_counts_of_ring(*ring) for ring in self.rings(size, index, numel)]
        return Counts(*map(sum, zip(*counts)))

    def longest_added(self, size: int, index: int, numel: int) -> int:
        """A member adds to every segment but the one with its own number, which it sends first."""
        rings = [ring for ring in self.rings(size, index, numel) if ring[0] > 1]
        return max((length // n + (length % n > (i < length % n)) for n, i, length in rings), default=0)

    def rings(self, size: int, index: Number, numel: int) -> list[tuple[int, Number, Number]]:
        """(size, index, numel) of the rings that a member is in."""
        return [(size, index, numel)]


@dataclass(frozen=True)
class HierarchicalAllReduce(RingAllReduce):
    """Scatter-reduce inside the group, a ring across groups among ranks that own the same segment, all-gather inside.

    The default group is the members of dp that share a host; where hosts are unknown it has the divisor of dp next to
    its root, with which a rank has the fewest rounds.
    """

    has_groups = True
    text = (
        "Scatter-reduce inside each inner group, a ring all-reduce of the own block across groups, all-gather inside: "
        "what leaves a group is divided by the size of the group.",
        "Goyal et al. 2017; Jia et al. 2018",
    )

    name: str = field(default="hierarchical", init=False)

    @classmethod
    def of(cls, request: Request) -> HierarchicalAllReduce:
        group_size, per_node = AlgorithmKeys.of(request.config).group_size, request.config.cluster.gpus_per_node
        if group_size is None and per_node is not None:
            group_size = min(request.num_data_ranks, max(1, per_node // request.tp))
        return cls(
            group_size
            or min(divisors(request.num_data_ranks), key=lambda size: (size + request.num_data_ranks // size, size))
        )

    @classmethod
    def check(cls, request: Request) -> list[Problem]:
        """Groups that do not make up dp, or with different numbers of an expert's copies (every ep-th of dp)."""
        group_size, dp, ep = AlgorithmKeys.of(request.config).group_size, request.num_data_ranks, request.ep_data_ranks
        if group_size is not None and group_size < 1:  # the rules of keys report it
            return []
        size = cls.of(request).group_size
        if dp % size:
            source = "" if group_size is not None else f" (cluster.gpus_per_node / tp={request.tp})"
            message, legal = f"inner groups of {size}{source} do not make up dp={dp}", divisors(dp)
        elif size % ep and ep % size:
            message = f"inner groups of {size} members of dp do not hold equally many copies of an expert, one in {ep}"
            legal = [n for n in divisors(dp) if n % ep == 0 or ep % n == 0]
        else:
            return []
        return [Problem(message, GROUP_SIZE, either(GROUP_SIZE, nearest(size, legal)), kind="arithmetic")]

    @classmethod
    def filled(cls, request: Request) -> tuple[str, ...]:
        if AlgorithmKeys.of(request.config).group_size is not None or request.num_data_ranks == 1:
            return ()
        per_node = request.config.cluster.gpus_per_node
        reason = "the ranks of dp in a host" if per_node else "cluster.gpus_per_node is not set"
        return (f"group_size={cls.of(request).group_size} (filled: dp {request.num_data_ranks}, {reason})",)

    def over(self, axis: str, plan: Plan) -> HierarchicalAllReduce:
        """Inner groups are of the same ranks, or of one."""
        distance = plan.mesh.size(plan.data_axis) // plan.mesh.size(axis)
        return replace(self, group_size=self.group_size // gcd(self.group_size, distance))

    def rounds(self, size: int, index: int, numel: int) -> Rounds:
        assert size % self.group_size == 0, f"groups of {self.group_size} do not make up {size}"
        group, inner = divmod(index, self.group_size)
        inside = range(group * self.group_size, (group + 1) * self.group_size)
        across = range(inner, size, self.group_size)
        own = segments(0, numel, self.group_size)[(inner + 1) % self.group_size]
        around = ring(across, group, own)
        return (*scatter_reduce(inside, inner, (0, numel)), *around, *all_gather(inside, inner, (0, numel)))

    def rings(self, size: int, index: Number, numel: int) -> list[tuple[int, Number, Number]]:
        """That of the inner group, in two halves, and the one across groups, over the segment that a member owns."""
        group, inner = divmod(index, self.group_size)
        base, num_longer = divmod(numel, self.group_size)
        own = base + ((inner + 1) % self.group_size < num_longer)
        return [(self.group_size, inner, numel), (size // self.group_size, group, own)]


def _counts_of_ring(size: int, index: Number, numel: Number) -> Counts:
    """Two rounds of the ring of all segments, without the one that is received or sent last in each phase."""
    base, num_longer = divmod(numel, size)

    def length(segment: Number) -> Number:
        return base + (segment % size < num_longer)

    def num_messages(segment: Number) -> Number:
        return 1 * (length(segment) > 0)

    twice = 2 * (num_longer + (size - num_longer) * (base > 0))
    return Counts(
        twice - num_messages(index + 1) - num_messages(index + 2),
        2 * numel - length(index + 1) - length(index + 2),
        twice - num_messages(index) - num_messages(index + 1),
    )
