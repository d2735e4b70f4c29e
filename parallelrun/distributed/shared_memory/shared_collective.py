"""A collective of a group, on one of its members."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from parallelrun.distributed.shared_memory.process import GroupMember, Peer
from parallelrun.distributed.shared_memory.reductions import Reduction

if TYPE_CHECKING:
    from parallelrun.distributed.shared_memory.channel import CollectiveChannel

_NAMES = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter", "barrier",
)  # fmt: skip
_NUMBERS = {name: number for number, name in enumerate(_NAMES)}


class CollectiveStage:
    """How far a collective is: numbers, in their order."""

    QUEUED, POSTED, COMBINED, DONE = range(4)


class SharedCollective:
    """A collective on one member.

    name, num_bytes: compared between the members that read each other. size: bytes of this member's contribution, -1:
    none. fill(offset): writes it into the arena. sources: members whose contributions are read. combine(offsets) reads
    them; finish(offsets) reads their second contributions, in the same place, which `combine` has written. readers:
    members that read this one's contribution, None: the sources.
    """

    __slots__ = (
        "_channel", "combine", "done", "error", "fill", "finish", "index", "name", "num_bytes", "offsets",
        "readers", "size", "sources", "stage",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        num_bytes: int,
        size: int,
        fill: Callable[[int], object] | None,
        sources: tuple[int, ...],
        combine: Callable[[list[int]], object] | None,
        finish: Callable[[list[int]], object] | None = None,
        readers: tuple[int, ...] | None = None,
    ):
        self.name, self.num_bytes, self.size = name, num_bytes, size
        self.fill, self.combine, self.finish = fill, combine, finish
        self.sources = sources
        self.readers = sources if readers is None else readers
        self.stage, self.index, self.offsets = CollectiveStage.QUEUED, 0, []  # type: int, int, list[int]
        self.done = False
        self.error: Exception | None = None
        self._channel: CollectiveChannel | None = None

    def attach(self, channel: CollectiveChannel, index: int) -> None:
        self._channel, self.index = channel, index

    def missing(self) -> list[Peer]:
        """Return the peers without which the collective cannot end."""
        return self._channel.missing() if self._channel else []

    def closed(self, peer: Peer) -> bool:
        """Return whether a peer has left the group."""
        assert self._channel is not None
        return self._channel.closed(peer)

    def __str__(self) -> str:
        return f"{self.name} of {self.num_bytes} bytes, collective {self.index} of its group"


class SharedReduction(SharedCollective):
    """An all-reduce of a flat tensor whose sum the member that posts last computes, for all.

    rank: of this process among `members`; sources: the others. Two members that post at the same time may both compute
    the sum. A step of tensor parallelism makes hundreds of these, so they have no functions of their own.
    """

    __slots__ = ("_flat", "_members", "_rank", "_reduction")

    def __init__(
        self,
        flat: Tensor,
        num_bytes: int,
        reduction: Reduction,
        members: Sequence[GroupMember],
        rank: int,
        sources: tuple[int, ...],
    ):
        super().__init__("all_reduce", num_bytes, num_bytes, None, sources, None)
        self._flat, self._reduction, self._members, self._rank = flat, reduction, members, rank

    def write(self, offset: int) -> None:
        """Write the contribution of this member to its arena."""
        flat = self._flat
        if self.num_bytes:
            self._members[self._rank].tensor(offset, flat.dtype, flat.numel()).copy_(flat)

    def reduce(self, offsets: list[int], result: int) -> None:
        """Write the sum of all contributions to this member's arena, and into its tensor."""
        if self.num_bytes:
            flat = self._flat
            dtype, numel, members = flat.dtype, flat.numel(), self._members
            total = members[self._rank].tensor(result, dtype, numel)
            self._reduction(total, [member.tensor(offset, dtype, numel) for member, offset in zip(members, offsets)])
            flat.copy_(total)

    def take(self, number: int, result: int) -> None:
        """Copy the sum that a member has computed."""
        flat = self._flat
        flat.copy_(self._members[number].tensor(result, flat.dtype, flat.numel()))


def number_of(name: str) -> int:
    """Return the number of a collective's name."""
    return _NUMBERS[name]


def name_of(number: int) -> str:
    return _NAMES[number]
