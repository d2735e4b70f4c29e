"""The collectives, as what each member contributes and reads, for contiguous tensors.

What a rank reads of its own part is read from its tensor, so that only what others read is copied into the arena.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from parallelrun.distributed.shared_memory.arena import aligned
from parallelrun.distributed.shared_memory.process import GroupMember
from parallelrun.distributed.shared_memory.reductions import Reduction
from parallelrun.distributed.shared_memory.shared_collective import SharedCollective, SharedReduction
from parallelrun.distributed.shared_memory.tensors import num_bytes_of, split

SMALL = 2**15  # bytes up to which every rank sums an all-reduce itself: one exchange instead of two
SERIAL = 2**20  # bytes up to which one rank sums for all, if they share cores: each rank sleeps once


class Collectives:
    """Make the collectives of one group. shares_cores: more ranks than cores are on the host; equal on all members."""

    def __init__(self, members: Sequence[GroupMember], rank: int, shares_cores: bool):
        self._members, self._rank, self._size = members, rank, len(members)
        self.shares_cores = shares_cores
        self._me = members[rank]
        self._others = tuple(number for number in range(self._size) if number != rank)

    def barrier(self) -> SharedCollective:
        return SharedCollective("barrier", 0, -1, None, self._others, None)

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> SharedCollective:
        flat = tensor.view(-1)
        num_bytes = num_bytes_of(flat)
        if self.shares_cores and num_bytes <= SERIAL:
            return SharedReduction(flat, num_bytes, reduction, self._members, self._rank, self._others)
        if self._size == 2 or num_bytes <= SMALL:
            return self._all_reduce_at_once(flat, num_bytes, reduction)
        return self._all_reduce_by_parts(flat, num_bytes, reduction)

    def _all_reduce_at_once(self, flat: Tensor, num_bytes: int, reduction: Reduction) -> SharedCollective:
        """Every rank reads all tensors."""
        in_place = self._rank < 2  # the first sum overwrites it; a later source would be lost

        def combine(offsets: list[int]) -> None:
            sources = [self._members[number].read(offset, flat) for number, offset in enumerate(offsets)]
            if in_place:
                sources[self._rank] = flat
            if flat.numel():
                reduction(flat, sources)

        def fill(offset: int) -> None:
            self._me.write(offset, flat)

        return SharedCollective("all_reduce", num_bytes, num_bytes, fill, self._others, combine)

    def _all_reduce_by_parts(self, flat: Tensor, num_bytes: int, reduction: Reduction) -> SharedCollective:
        """Rank i reduces part i, into its place in the arena, from where the others copy it."""
        parts = split(flat, self._size)
        starts = [0, *accumulate(map(num_bytes_of, parts))]
        mine = parts[self._rank]

        def fill(offset: int) -> None:
            for number in self._others:
                self._me.write(offset + starts[number], parts[number])

        def combine(offsets: list[int]) -> None:
            if mine.numel():
                sources = [self._members[n].read(offset + starts[self._rank], mine) for n, offset in enumerate(offsets)]
                total, sources[self._rank] = sources[self._rank], mine
                reduction(total, sources)
                mine.copy_(total)

        def finish(offsets: list[int]) -> None:
            for number in self._others:
                part = parts[number]
                part.copy_(self._members[number].read(offsets[number] + starts[number], part))

        return SharedCollective("all_reduce", num_bytes, num_bytes, fill, self._others, combine, finish)

    def reduce(self, tensor: Tensor, root: int, reduction: Reduction) -> SharedCollective:
        flat = tensor.view(-1)
        num_bytes = num_bytes_of(flat)
        if self._rank != root:
            return SharedCollective(
                "reduce", num_bytes, num_bytes, lambda offset: self._me.write(offset, flat), (), None, readers=(root,)
            )

        def combine(offsets: list[int]) -> None:
            sources = [self._members[n].read(offset, flat) if n != root else flat for n, offset in enumerate(offsets)]
            if root > 1:
                sources[root] = flat.clone()
            reduction(flat, sources)

        return SharedCollective("reduce", num_bytes, -1, None, self._others, combine, readers=())

    def broadcast(self, tensor: Tensor, root: int) -> SharedCollective:
        flat = tensor.view(-1)
        num_bytes = num_bytes_of(flat)
        if self._rank == root:
            return SharedCollective(
                "broadcast", num_bytes, num_bytes, lambda offset: self._me.write(offset, flat), (), None,
                readers=self._others,
            )  # fmt: skip

        def combine(offsets: list[int]) -> None:
            flat.copy_(self._members[root].read(offsets[root], flat))

        return SharedCollective("broadcast", num_bytes, -1, None, (root,), combine, readers=())

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> SharedCollective:
        """outputs: one per rank, whose sizes may differ."""
        num_bytes = sum(map(num_bytes_of, outputs))

        def fill(offset: int) -> None:
            self._me.write(offset, tensor)
            mine = outputs[self._rank]
            if mine.data_ptr() != tensor.data_ptr():
                mine.view(-1).copy_(tensor.view(-1))

        def combine(offsets: list[int]) -> None:
            for number in self._others:
                output = outputs[number].view(-1)
                output.copy_(self._members[number].read(offsets[number], output))

        size = num_bytes_of(tensor)
        return SharedCollective("all_gather", num_bytes, size, fill, self._others, combine)

    def reduce_scatter(self, output: Tensor, parts: Sequence[Tensor], reduction: Reduction) -> SharedCollective:
        """parts: one per rank, whose sizes may differ; `output` may be this rank's own part."""
        sizes = [*map(num_bytes_of, parts)]
        starts = [0, *accumulate(map(aligned, sizes))]

        def fill(offset: int) -> None:
            for number in self._others:
                self._me.write(offset + starts[number], parts[number])

        def combine(offsets: list[int]) -> None:
            mine = parts[self._rank].view(-1)
            if not mine.numel():
                return
            sources = [self._members[n].read(offset + starts[self._rank], mine) for n, offset in enumerate(offsets)]
            overwritten = self._rank > 1 and output.data_ptr() == mine.data_ptr()
            sources[self._rank] = mine.clone() if overwritten else mine
            reduction(output.view(-1), sources)

        return SharedCollective("reduce_scatter", sum(sizes), starts[-1], fill, self._others, combine)

    def all_to_all(
        self, outputs: Sequence[Tensor], parts: Sequence[Tensor], name: str = "all_to_all"
    ) -> SharedCollective:
        """outputs, parts: one from and one for each rank; the sizes may differ. What a rank sends begins with where
        each part is and how many bytes it has. name: gather and scatter are this, with empty parts."""
        sizes = [*map(num_bytes_of, parts)]
        header = aligned(16 * self._size)
        starts = [header + start for start in (0, *accumulate(map(aligned, sizes)))]

        def fill(offset: int) -> None:
            words = self._me.words
            for number in self._others:
                words[offset // 8 + 2 * number] = starts[number]
                words[offset // 8 + 2 * number + 1] = sizes[number]
                self._me.write(offset + starts[number], parts[number])
            outputs[self._rank].view(-1).copy_(parts[self._rank].view(-1))

        def combine(offsets: list[int]) -> None:
            for number in self._others:
                output, offset = outputs[number].view(-1), offsets[number]
                words = self._members[number].words
                start, size = words[offset // 8 + 2 * self._rank], words[offset // 8 + 2 * self._rank + 1]
                expected = num_bytes_of(output)
                if size != expected:
                    raise RuntimeError(f"[shared memory] {name}: rank {number} of the group sends {size} bytes, "
                                       f"rank {self._rank} expects {expected}")  # fmt: skip
                output.copy_(self._members[number].read(offset + start, output))

        return SharedCollective(name, 0, starts[-1], fill, self._others, combine)
