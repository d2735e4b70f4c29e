"""Sums over the ranks of one host, each lane's in a buffer of its own, ready to be sent to the hosts that need them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from parallelrun.shared_memory.arena import aligned
from parallelrun.shared_memory.hosts import Hosts
from parallelrun.shared_memory.process import GroupMember, LocalProcess
from parallelrun.shared_memory.reductions import Reduction
from parallelrun.shared_memory.shared_collective import SharedCollective

Cells = Sequence[Sequence[Sequence[Tensor]]]  # flat tensors by lane and by the host that totals them


class WholeSum:
    """`collective` sums a flat tensor over the host, on every rank, into `sums`, in the dtype of partial sums."""

    def __init__(self, flat: Tensor, sums: Tensor, hosts: Hosts, members: Sequence[GroupMember], reduction: Reduction):
        self._flat, self._sums, self._members, self._reduction = flat, sums, members, reduction
        self._local_rank = hosts.local_rank
        size = flat.numel() * flat.element_size()
        others = tuple(number for number in range(len(members)) if number != hosts.local_rank)
        self.collective = SharedCollective("all_reduce", size, size, self._fill, others, self._combine)

    def _fill(self, offset: int) -> None:
        self._members[self._local_rank].write(offset, self._flat)

    def _combine(self, offsets: list[int]) -> None:
        sources = [member.read(offset, self._flat) for member, offset in zip(self._members, offsets)]
        sources[self._local_rank] = self._flat
        self._reduction.partial(self._sums, sources)


class HostSums:
    """The first stage of a reduction: `collective` sums the cells of this rank's lane over the host, into `sums`.

    sums: (elements of the lane's cells), in the dtype of partial sums. received: (hosts, elements), their sums of what
    this host totals, after `exchanged` was sent.
    """

    def __init__(
        self,
        name: str,
        num_bytes: int,
        hosts: Hosts,
        members: Sequence[GroupMember],
        cells: Cells,
        reduction: Reduction,
    ):
        self._hosts, self._members, self._reduction = hosts, members, reduction
        process = members[hosts.local_rank].process
        assert isinstance(process, LocalProcess)
        self._arena = process.arena
        self._offsets: list[int] = []
        self._lanes = [[cell for row in lane for cell in row] for lane in cells]
        sizes = [[cell.numel() * cell.element_size() for cell in lane] for lane in self._lanes]
        starts = iter(accumulate((aligned(size) for lane in sizes for size in lane), initial=0))
        self._starts = [[next(starts) for _ in lane] for lane in sizes]
        size = next(starts)
        local_rank = hosts.local_rank
        others = tuple(number for number in range(len(members)) if number != local_rank)
        lanes = tuple(lane for lane in range(hosts.num_lanes) if lane != hosts.lane)
        sources, combine = ((), None) if hosts.lane is None else (others, self._combine)
        self.collective = SharedCollective(name, num_bytes, size, self._fill, sources, combine, readers=lanes)
        self._numels = (
            [sum(cell.numel() for cell in row) for row in cells[hosts.lane]] if hosts.lane is not None else []
        )
        self._dtype = reduction.partial_dtype(self._lanes[0][0].dtype)

    def _fill(self, offset: int) -> None:
        for lane, cells in enumerate(self._lanes):
            if lane != self._hosts.lane:
                for cell, start in zip(cells, self._starts[lane]):
                    self._members[self._hosts.local_rank].write(offset + start, cell)

    def _combine(self, offsets: list[int]) -> None:
        lane = self._hosts.lane
        assert lane is not None
        self.sums = self._scratch(sum(self._numels))
        parts = self.sums.split([cell.numel() for cell in self._lanes[lane]])
        for part, cell, start in zip(parts, self._lanes[lane], self._starts[lane]):
            if cell.numel():
                sources = [member.read(offset + start, cell) for member, offset in zip(self._members, offsets)]
                sources[self._hosts.local_rank] = cell
                self._reduction.partial(part, sources)

    @property
    def num_totalled(self) -> int:
        """Return the elements that this rank's lane totals for its host."""
        return self._numels[self._hosts.host]

    def exchanged(self) -> tuple[Tensor, list[int], Tensor, list[int]]:
        """Return the arguments of `GlooLink.exchange` that send each host the sums it totals."""
        num_hosts, item = len(self._hosts.ranks), self.sums.element_size()
        self.received = self._scratch(num_hosts * self.num_totalled).view(num_hosts, -1)
        return self.received, [self.num_totalled * item] * num_hosts, self.sums, [one * item for one in self._numels]

    def placed_by_host(self) -> Sequence[Tensor]:
        """Return `received`, with all of this host's sums in its place."""
        self.received = self._scratch(len(self._hosts.ranks) * self.sums.numel()).view(len(self._hosts.ranks), -1)
        self.received[self._hosts.host] = self.sums
        return self.received.unbind()

    def free(self) -> None:
        """Give back `sums` and `received`."""
        del self.sums, self.received
        while self._offsets:
            self._arena.free(self._offsets.pop())

    def _scratch(self, numel: int) -> Tensor:
        """Return memory of this process's arena: fresh memory costs as much as to use it."""
        self._offsets.append(self._arena.allocate(numel * self._dtype.itemsize))
        return self._members[self._hosts.local_rank].tensor(self._offsets[-1], self._dtype, numel)
