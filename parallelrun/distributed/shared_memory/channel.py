"""The collectives of a group: each is posted in turn, read by the members that need it, and its memory reused.

Every member has a block of words in its arena that only it writes. Three of them count, in the order in which the
group's collectives are issued: those whose contribution can be read (POSTED), those whose second contribution can be
read (COMBINED: an all-reduce by parts has one), and those for which this member reads nothing any more (DONE). A ring
of descriptors says where each contribution is. A contribution is overwritten when all members are done with it.

A member that waits for several others sleeps until the last of them has posted, and only that one wakes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from parallelrun.distributed.shared_memory.arena import fence, store_before_load
from parallelrun.distributed.shared_memory.engine import Engine, PendingOperation
from parallelrun.distributed.shared_memory.process import GroupMember, Peer
from parallelrun.distributed.shared_memory.shared_collective import (
    CollectiveStage,
    SharedCollective,
    SharedReduction,
    name_of,
    number_of,
)

POSTED, COMBINED, DONE, CLOSED, _RING = 0, 1, 2, 3, 8  # words of a member's block
_SLOTS, _SLOT_WORDS = 64, 4  # collectives of a group that are under way; (kind, bytes, offset, result) of each
COLLECTIVE_WORDS = _RING + _SLOTS * _SLOT_WORDS


class CollectiveChannel:
    """The collectives of one group in one process. Every method is called under the engine's lock.

    rank: the number of this process among `members`.
    """

    def __init__(self, engine: Engine, members: Sequence[GroupMember], rank: int):
        self._engine, self._members, self._rank = engine, members, rank
        self._me = members[rank]
        self._arena = engine.process.arena
        self._others = tuple(number for number in range(len(members)) if number != rank)
        self._other_words = tuple((members[number].words, members[number].base) for number in self._others)
        self._num_done = 0  # collectives with which all others are done, at least
        self._queue: deque[SharedCollective] = deque()
        self.num_issued = 0
        self._failed: Exception | None = None
        self._readable: deque[tuple[int, int]] = deque()  # (index, offset) of contributions that members may still read

    def issue(self, collective: SharedCollective) -> None:
        """Post a collective and begin it."""
        collective.attach(self, self.num_issued)
        self.num_issued += 1
        self._queue.append(collective)
        self._engine.submit(self)

    def advance(self) -> bool:
        """See `engine.OperationQueue`."""
        limit = CollectiveStage.DONE
        try:
            for collective in self._queue:
                while collective.stage < limit and self._step(collective, limit):
                    pass
                limit = collective.stage
                if limit == CollectiveStage.QUEUED:
                    break
        except Exception as error:  # whoever waits for one of them is told; what follows could not be matched
            self._failed = error
        if self._failed is not None:
            for collective in self._queue:
                if not collective.done:
                    collective.error, collective.done = self._failed, True
            self._queue.clear()
        while self._queue and self._queue[0].stage == CollectiveStage.DONE:
            self._queue.popleft()
        return bool(self._queue)

    def is_owing(self) -> bool:
        """See `engine.OperationQueue`."""
        return bool(self._queue)

    def _step(self, collective: SharedCollective, limit: int) -> bool:
        """Take a collective to its next stage, if that is possible now; `limit`: the stage of the one before it."""
        if collective.stage == CollectiveStage.QUEUED:
            if not self._are_done(collective.index - _SLOTS + 1):
                return False
            self._post(collective)
        elif collective.stage == CollectiveStage.POSTED:
            if collective.finish is None and limit < CollectiveStage.DONE:
                return False
            if self._is_behind(POSTED, collective.index + 1, collective.sources):
                return False
            fence()
            if isinstance(collective, SharedReduction):
                self._take_or_reduce(collective)
            else:
                self._combine(collective)
        else:
            if self._is_behind(COMBINED, collective.index + 1, collective.sources):
                return False
            fence()
            assert collective.finish is not None
            collective.finish(collective.offsets)
            self._end(collective)
        return True

    def _post(self, collective: SharedCollective) -> None:
        offset = -1
        if collective.size >= 0:
            self.reclaim()
            offset = self._allocate(collective)
            if isinstance(collective, SharedReduction):
                collective.write(offset)
            elif collective.fill is not None:
                collective.fill(offset)
        words, at = self._me.words, self._me.base + self._slot(collective.index)
        words[at], words[at + 1], words[at + 2] = number_of(collective.name), collective.num_bytes, offset
        words[at + 3] = 0
        collective.stage = CollectiveStage.POSTED
        collective.offsets = [offset]
        self._publish(POSTED, collective)

    def _combine(self, collective: SharedCollective) -> None:
        collective.offsets = self._offsets(collective)
        if collective.combine is not None:
            collective.combine(collective.offsets)
        if collective.finish is None:
            self._end(collective)
        else:
            collective.stage = CollectiveStage.COMBINED
            self._publish(COMBINED, collective)

    def _take_or_reduce(self, collective: SharedReduction) -> None:
        """Take the sum that a member has computed, else compute it for all."""
        slot = self._slot(collective.index)
        for number, (words, base) in zip(self._others, self._other_words):
            result = words[base + slot + 3]
            if result:
                fence()
                collective.take(number, result)
                break
        else:
            try:
                result = self._allocate(collective)
                collective.reduce(self._offsets(collective), result)
                fence()
                self._me[slot + 3] = result
                store_before_load()
            finally:  # ranks that find no sum compute it, and fail alike
                self._wake(collective.readers)
        self._end(collective)

    def _offsets(self, collective: SharedCollective) -> list[int]:
        """Return where each member's contribution is. Raises RuntimeError if one has issued another collective."""
        slot, offsets = self._slot(collective.index), collective.offsets * len(self._members)
        members, kind, num_bytes = self._members, number_of(collective.name), collective.num_bytes
        for number in collective.sources:
            member = members[number]
            words, at = member.words, member.base + slot
            if words[at] != kind or words[at + 1] != num_bytes:
                theirs = f"{name_of(words[at])} of {words[at + 1]} bytes"
                raise RuntimeError(f"[shared memory] rank {self._rank} of the group issued "
                                   f"{collective}, rank {number} {theirs}")  # fmt: skip
            offsets[number] = words[at + 2]
        return offsets

    def _allocate(self, collective: SharedCollective) -> int:
        offset = self._arena.allocate(collective.size)
        self._readable.append((collective.index, offset))
        return offset

    def _end(self, collective: SharedCollective) -> None:
        collective.stage = CollectiveStage.DONE
        collective.done = True
        self._me[DONE] = collective.index + 1  # nobody sleeps for it, except for a free slot: see `engine.SLEEP_S`

    def _publish(self, counter: int, collective: SharedCollective) -> None:
        """Count the collective, and wake the readers that now have all that they wait for."""
        target = collective.index + 1
        fence()
        self._me[counter] = target
        store_before_load()
        if isinstance(collective, SharedReduction):
            return  # whoever finds that all have posted goes on, and then wakes the others
        if not collective.sources and len(collective.readers) == len(self._others):  # all wait for this member alone
            self._wake(number for number in collective.readers if self._members[number][counter] >= target)
        elif not self._is_behind(counter, target, self._others):
            self._wake(collective.readers)

    def _wake(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._members[number].process.wake()

    def _is_behind(self, counter: int, target: int, of: tuple[int, ...]) -> bool:
        """Return whether a counter is below `target` at one of the members numbered."""
        if len(of) == len(self._other_words):  # the most frequent case
            for words, base in self._other_words:  # noqa: SIM110 - a generator takes twice as long
                if words[base + counter] < target:
                    return True
            return False
        members = self._members
        return any(members[number][counter] < target for number in of)

    def _are_done(self, num_collectives: int) -> bool:
        """Return whether all others are done with so many collectives."""
        if num_collectives > self._num_done:
            dones = [words[base + DONE] for words, base in self._other_words]
            self._num_done = min(dones, default=num_collectives)
        return num_collectives <= self._num_done

    def _slot(self, index: int) -> int:
        return _RING + index % _SLOTS * _SLOT_WORDS

    def reclaim(self) -> None:
        """Free the contributions that all members have read."""
        while self._readable and self._are_done(self._readable[0][0] + 1):
            self._arena.free(self._readable.popleft()[1])

    def missing(self) -> list[Peer]:
        """Return the peers for which the first collective waits."""
        if not self._queue:
            return []
        first = self._queue[0]
        counter, target, of = COMBINED, first.index + 1, first.sources
        if first.stage == CollectiveStage.QUEUED:
            counter, target, of = DONE, first.index - _SLOTS + 1, self._others
        elif first.stage == CollectiveStage.POSTED:
            counter = POSTED
        members = (self._members[number] for number in of)
        return [member.process for member in members if member[counter] < target and isinstance(member.process, Peer)]

    def closed(self, peer: Peer) -> bool:
        """Return whether a peer has left the group."""
        return any(self._members[number].process is peer and self._members[number][CLOSED] for number in self._others)

    def outstanding(self, operation: PendingOperation) -> tuple[int, tuple[int, ...]] | None:
        """Return the number of a collective that has not ended, from 1, and the members that have not issued it.

        None if it is not of this group.
        """
        for collective in tuple(self._queue):
            if collective is operation:
                index = collective.index
                return index + 1, tuple(n for n in self._others if self._members[n][POSTED] <= index)
        return None

    def close(self) -> None:
        """Tell the members that this one has left."""
        self._me[CLOSED] = 1
        store_before_load()
        self._wake(self._others)
