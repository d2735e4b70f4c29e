"""Collectives of a group over several hosts: through shared memory within a host, over gloo between hosts.

Sums are first over the ranks of each host, in rank order, then over the hosts in theirs, on one rank, which distributes
the result; large fp32 and fp64 all-reduces among hosts of one rank are gloo's. All ranks have the same bits, in every
run. 16-bit sums are carried in fp32 and rounded once. Each lane (see `hosts`) moves its share of the bytes: of an
all-reduce of n bytes over H hosts with L lanes, 2 n (H - 1) / H / L.

A reduce is an all-reduce. Gather and scatter are all-to-alls with empty parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from parallelrun.shared_memory.arena import aligned
from parallelrun.shared_memory.chains import Chain, GlooLink, Stage, issue, sum_around_ring, together
from parallelrun.shared_memory.channel import CollectiveChannel
from parallelrun.shared_memory.collectives import Collectives
from parallelrun.shared_memory.engine import PendingOperation
from parallelrun.shared_memory.host_sums import HostSums, WholeSum
from parallelrun.shared_memory.hosts import Hosts
from parallelrun.shared_memory.process import GroupMember
from parallelrun.shared_memory.reductions import Reduction
from parallelrun.shared_memory.shared_collective import SharedCollective
from parallelrun.shared_memory.tensors import adjacent, as_bytes, num_bytes_of, split

PIECE = 2**19  # bytes that a lane sends to another host at a time
SMALL = 2**15  # bytes up to which every rank of equal hosts exchanges an all-reduce whole: one exchange instead of two


class HierarchicalCollectives:
    """Make the collectives of one group. The methods are those of `Collectives`.

    members: those of this host. inside: the collectives among them. links: gloo between all ranks, and between those of
    this rank's lane. channels: of first and of last stages.
    """

    def __init__(
        self,
        hosts: Hosts,
        members: Sequence[GroupMember],
        inside: Collectives,
        links: tuple[GlooLink, GlooLink | None],
        channels: tuple[CollectiveChannel, CollectiveChannel],
    ):
        self._hosts, self._members = hosts, members
        self._inside = inside
        self._whole, self._lane = links
        self._first, self._last = channels
        self._others = tuple(number for number in range(len(members)) if number != hosts.local_rank)
        self._num_hosts = len(hosts.ranks)
        self._num_ranks = sum(map(len, hosts.ranks))

    def barrier(self) -> Chain:
        def between() -> list[PendingOperation]:
            return [self._lane.barrier()] if self._lane is not None and self._hosts.lane == 0 else []

        def first() -> list[SharedCollective]:
            return issue(self._first, self._inside.barrier())

        def last() -> list[SharedCollective]:
            return issue(self._last, self._inside.barrier())

        return Chain("barrier", 0, (first, between, last))

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> Chain:
        flat = tensor.view(-1)
        if self._hosts.is_even and num_bytes_of(flat) <= SMALL:
            return self._all_reduce_at_once(flat, reduction)
        if self._lane and self._num_ranks == self._num_hosts > 2 and reduction.is_plain_sum(flat.dtype):
            return sum_around_ring(self._lane, flat, reduction)
        return self._all_reduce_by_parts(flat, reduction)

    def reduce(self, tensor: Tensor, root: int, reduction: Reduction) -> Chain:
        return self.all_reduce(tensor, reduction)

    def _all_reduce_at_once(self, flat: Tensor, reduction: Reduction) -> Chain:
        """Every rank sums its host's tensors, and sends the sum to the other ranks of its lane."""
        sums = flat.new_empty((self._num_hosts, flat.numel()), dtype=reduction.partial_dtype(flat.dtype))
        inside = WholeSum(flat, sums[self._hosts.host], self._hosts, self._members, reduction)

        def total() -> tuple[()]:
            reduction.total(flat, sums.unbind(), self._num_ranks)
            return ()

        stages = (lambda: issue(self._first, inside.collective), lambda: self._spread(sums.unbind()), total)
        return Chain("all_reduce", num_bytes_of(flat), stages)

    def _all_reduce_by_parts(self, flat: Tensor, reduction: Reduction) -> Chain:
        """Send small pieces one after the other: a host's port then serves all its streams evenly. A large exchange
        among more than two hosts left ports idle for a third of the time (benchmarks/emulated.py)."""
        of_a_piece = PIECE * self._num_hosts * self._hosts.num_lanes
        num_pieces = 1 if self._num_hosts == 2 else max(1, -(-num_bytes_of(flat) // of_a_piece))
        of_pieces = [self._all_reduce_stages(piece, reduction) for piece in split(flat, num_pieces)]
        return Chain("all_reduce", num_bytes_of(flat), [partial(together, stages) for stages in zip(*of_pieces)])

    def _all_reduce_stages(self, flat: Tensor, reduction: Reduction) -> tuple[Stage, ...]:
        """Each lane of each host sums one part. Two hosts send no more if each sums the parts of both, in one exchange
        instead of two (but for 16-bit sums, whose partial sums are larger)."""
        hosts, num_bytes = self._hosts, num_bytes_of(flat)
        lanes = split(flat, hosts.num_lanes)
        in_one = self._num_hosts == 2 and reduction.partial_dtype(flat.dtype) == flat.dtype
        parts = [[block] if in_one else split(block, self._num_hosts) for block in lanes]
        cells = [[[part] for part in row] for row in parts]
        inside = HostSums("all_reduce", num_bytes, hosts, self._members, cells, reduction)

        def spread() -> list[PendingOperation]:
            if hosts.lane is None or in_one:
                return []
            self._total(inside, reduction, parts[hosts.lane][hosts.host])
            return self._spread(parts[hosts.lane])

        def last() -> list[SharedCollective]:
            if hosts.lane is not None and in_one:
                self._total(inside, reduction, lanes[hosts.lane])
            return issue(self._last, self._gather_lanes("all_reduce", lanes, num_bytes))

        def between() -> list[PendingOperation]:
            if hosts.lane is not None and in_one:
                return self._spread(inside.placed_by_host())
            return self._exchange_sums(inside)

        return (lambda: issue(self._first, inside.collective), between, spread, last)

    def _gather_lanes(self, name: str, lanes: Sequence[Tensor], num_bytes: int) -> SharedCollective:
        """Let every rank have what each lane of its host has. lanes: parts of one tensor."""
        outputs = [*lanes, *(lanes[0][:0] for _ in range(len(self._members) - len(lanes)))]
        made = self._inside.all_gather(outputs, outputs[self._hosts.local_rank])
        made.name, made.num_bytes = name, num_bytes
        return made

    def reduce_scatter(self, output: Tensor, parts: Sequence[Tensor], reduction: Reduction) -> Chain:
        hosts, num_bytes = self._hosts, sum(map(num_bytes_of, parts))
        cells = [
            [[parts[rank].view(-1) for rank in hosts.carried(lane, host)] for host in range(self._num_hosts)]
            for lane in range(hosts.num_lanes)
        ]
        inside = HostSums("reduce_scatter", num_bytes, hosts, self._members, cells, reduction)
        totals: list[Tensor] = []

        def total() -> tuple[()]:
            if hosts.lane is not None:
                totals.append(output.view(-1) if hosts.is_even else output.new_empty(inside.num_totalled))
                self._total(inside, reduction, totals[0])
                if not hosts.is_even:
                    output.view(-1).copy_(totals[0][: output.numel()])
            return ()

        def last() -> list[SharedCollective]:
            return issue(self._last, self._deliver(output, parts, totals))

        stages: list[Stage] = [
            lambda: issue(self._first, inside.collective),
            lambda: self._exchange_sums(inside),
            total,
        ]
        return Chain("reduce_scatter", num_bytes, stages if hosts.is_even else [*stages, last])

    def _deliver(self, output: Tensor, parts: Sequence[Tensor], totals: Sequence[Tensor]) -> SharedCollective:
        """Give the ranks that are no lane's the results that one carries for them. totals: of a lane."""
        hosts, local_rank, num_bytes = self._hosts, self._hosts.local_rank, sum(map(num_bytes_of, parts))
        if totals:
            me, size = self._members[local_rank], num_bytes_of(totals[0])

            def fill(offset: int) -> None:
                me.write(offset, totals[0])

            return SharedCollective("reduce_scatter", num_bytes, size, fill, self._others, None)
        lane = local_rank % hosts.num_lanes
        before = hosts.local[lane : local_rank : hosts.num_lanes]

        def combine(offsets: list[int]) -> None:
            start = offsets[lane] + sum(num_bytes_of(parts[rank]) for rank in before)
            output.view(-1).copy_(self._members[lane].read(start, output))

        return SharedCollective("reduce_scatter", num_bytes, -1, None, self._others, combine)

    def broadcast(self, tensor: Tensor, root: int) -> Chain:
        flat = tensor.view(-1)
        hosts, lanes = self._hosts, split(flat, self._hosts.num_lanes)
        source = next(host for host, ranks in enumerate(hosts.ranks) if root in ranks)
        is_source = source == hosts.host

        def first() -> list[SharedCollective]:
            if not is_source:
                return []
            return issue(self._first, self._inside.broadcast(flat, hosts.local.index(root)))

        def between() -> list[PendingOperation]:
            return [self._lane.broadcast(lanes[hosts.lane], source)] if hosts.lane is not None and self._lane else []

        def last() -> list[SharedCollective]:
            if is_source:
                return []
            return issue(self._last, self._gather_lanes("broadcast", lanes, num_bytes_of(flat)))

        return Chain("broadcast", num_bytes_of(flat), (first, between, last))

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> Chain:
        """outputs: one per rank, whose sizes may differ. Each lane sends the tensors of its host, then shares what it
        has received."""
        hosts, num_bytes = self._hosts, sum(map(num_bytes_of, outputs))

        def first() -> list[SharedCollective]:
            return issue(self._first, self._inside.all_gather([outputs[rank] for rank in hosts.local], tensor))

        def between() -> list[PendingOperation]:
            if hosts.lane is None or self._lane is None:
                return []
            carried = [hosts.carried(hosts.lane, host) for host in range(self._num_hosts)]
            if self._num_hosts > 2 and hosts.is_even:
                return [self._lane.share([outputs[ranks[0]] for ranks in carried])]
            return [self._lane.broadcast(outputs[rank], host) for host, ranks in enumerate(carried) for rank in ranks]

        def last() -> list[SharedCollective]:
            return issue(self._last, self._share(outputs, num_bytes))

        return Chain("all_gather", num_bytes, (first, between, last))

    def _share(self, outputs: Sequence[Tensor], num_bytes: int) -> SharedCollective:
        """Let every rank read what the lanes of its host have received."""
        hosts, me = self._hosts, self._members[self._hosts.local_rank]
        others = [host for host in range(self._num_hosts) if host != hosts.host]
        shared = [[outputs[rank] for host in others for rank in hosts.carried(lane, host)]
                  for lane in range(hosts.num_lanes)]  # fmt: skip
        starts = [[*accumulate((aligned(num_bytes_of(one)) for one in row), initial=0)] for row in shared]

        def fill(offset: int) -> None:
            assert hosts.lane is not None
            for start, output in zip(starts[hosts.lane], shared[hosts.lane]):
                me.write(offset + start, output)

        def combine(offsets: list[int]) -> None:
            for lane in range(hosts.num_lanes):
                if lane != hosts.lane:
                    for start, output in zip(starts[lane], shared[lane]):
                        output.view(-1).copy_(self._members[lane].read(offsets[lane] + start, output))

        if hosts.lane is None:
            return SharedCollective("all_gather", num_bytes, -1, None, self._others, combine)
        return SharedCollective("all_gather", num_bytes, starts[hosts.lane][-1], fill, self._others, combine)

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> Chain:
        """outputs: one per rank at the root, else empty."""
        nothing = tensor.view(-1)[:0]
        parts = [tensor if rank == root else nothing for rank in range(self._num_ranks)]
        return self._all_to_all("gather", outputs or [nothing] * self._num_ranks, parts)

    def scatter(self, output: Tensor, parts: Sequence[Tensor], root: int) -> Chain:
        """parts: one per rank at the root, else empty."""
        nothing = output.view(-1)[:0]
        outputs = [output if rank == root else nothing for rank in range(self._num_ranks)]
        return self._all_to_all("scatter", outputs, parts or [nothing] * self._num_ranks)

    def all_to_all(self, outputs: Sequence[Tensor], parts: Sequence[Tensor]) -> Chain:
        """outputs, parts: one from and one for each rank; the sizes may differ.

        Over gloo, on one host too: shared memory there, beside gloo for the other hosts, took 2.3 to 3 times as long.
        """
        return self._all_to_all("all_to_all", outputs, parts)

    def _all_to_all(self, name: str, outputs: Sequence[Tensor], parts: Sequence[Tensor]) -> Chain:
        arriving, leaving = [num_bytes_of(one) for one in outputs], [num_bytes_of(one) for one in parts]
        in_place = adjacent(outputs)
        received = torch.empty(sum(arriving), dtype=torch.uint8) if in_place is None else in_place

        def first() -> list[PendingOperation]:
            source = adjacent(parts)
            if source is None:
                source = torch.cat([as_bytes(one) for one in parts])
            return [self._whole.exchange(received, arriving, source, leaving)]

        def last() -> tuple[()]:
            if in_place is None:
                for output, part in zip(outputs, received.split(arriving)):
                    as_bytes(output).copy_(part)
            return ()

        return Chain(name, sum(leaving), (first, last))

    def _exchange_sums(self, inside: HostSums) -> list[PendingOperation]:
        """Send each host the sums that it totals."""
        return [self._lane.exchange(*inside.exchanged())] if self._lane is not None else []

    def _total(self, inside: HostSums, reduction: Reduction, total: Tensor) -> None:
        """Set `total` to the sums over all hosts of what this rank's lane carries for its host."""
        reduction.total(total, inside.received.unbind(), self._num_ranks)
        inside.free()

    def _spread(self, parts: Sequence[Tensor]) -> list[PendingOperation]:
        """Send the part that this host has to all members of the lane, and receive theirs. parts: by host."""
        assert self._lane is not None
        if self._num_hosts > 2:
            return [self._lane.share(parts)]
        return [self._lane.broadcast(part, host) for host, part in enumerate(parts)]
