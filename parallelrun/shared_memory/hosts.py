"""The hosts of a group: which ranks share one, and which of them exchange data with other hosts.

On each host the first `num_lanes` ranks do so, as many as the smallest host has. Lane i is one of them on every host:
all ranks of lane i form a gloo group. The rank with local index j has its data carried by lane j modulo `num_lanes`.
"""

from __future__ import annotations

from collections.abc import Sequence

HOST_VARIABLE = "PARALLELRUN_SIMULATED_HOST"  # ranks of a simulated host; tests and `emulate=true` set it


class Hosts:
    """The ranks of a group by host, seen from one of them. Hosts are in the order of their lowest ranks.

    host, local_rank: of this rank. lane: the lane of which this rank is a part, None: of none.
    """

    def __init__(self, identities: Sequence[str], rank: int):
        """identities: for each rank, what the ranks of its host have in common."""
        by_host: dict[str, list[int]] = {}
        for number, identity in enumerate(identities):
            by_host.setdefault(identity, []).append(number)
        self.ranks = list(by_host.values())
        self.host = next(number for number, ranks in enumerate(self.ranks) if rank in ranks)
        self.local = self.ranks[self.host]
        self.local_rank = self.local.index(rank)
        self.num_lanes = min(map(len, self.ranks))
        self.lane = self.local_rank if self.local_rank < self.num_lanes else None

    @property
    def is_even(self) -> bool:
        """Return whether every rank is a lane's."""
        return all(len(ranks) == self.num_lanes for ranks in self.ranks)

    @property
    def share_none(self) -> bool:
        """Return whether every rank is on a host of its own."""
        return all(len(ranks) == 1 for ranks in self.ranks)

    def carried(self, lane: int, host: int) -> list[int]:
        """Return the ranks of a host whose data a lane carries."""
        return self.ranks[host][lane :: self.num_lanes]
