"""The collectives of a group: each is posted in turn, read by the members that need it, and its memory reused.

Every member has a block of words in its arena that only it writes. Three of them count, in the order in which the
group's collectives are issued: those whose contribution can be read (POSTED), those whose second contribution can be
read (COMBINED: an all-reduce has one), and those for which this member reads nothing any more (DONE). A ring of
descriptors says where each contribution is. A contribution is overwritten when all members are done with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from parallelrun.shared_memory.arena import fence
from parallelrun.shared_memory.engine import Engine
from parallelrun.shared_memory.process import LocalProcess, Peer

POSTED, COMBINED, DONE, CLOSED, _RING = 0, 1, 2, 3, 8  # words of a member's block
_SLOTS, _SLOT_WORDS = 64, 4  # collectives of a group that are under way; (kind, bytes, offset) of each
COLLECTIVE_WORDS = _RING + _SLOTS * _SLOT_WORDS
_QUEUED, _POSTED, _COMBINED, _DONE = range(4)


class GroupMember:
    """A member of a group: its process, and where its block of words begins."""

    def __init__(self, process: Peer | LocalProcess, base: int):
        self.process, self.words, self.base = process, process.words, base
        self.tensor = process.memory.tensor

    def __getitem__(self, word: int) -> int:
        return self.words[self.base + word]

    def __setitem__(self, word: int, value: int) -> None:
        self.words[self.base + word] = value


class SharedCollective:
    """A collective on one member.

    name, num_bytes: compared between the members that read each other. size: bytes of this member's contribution, -1:
    none. fill(offset): writes it into the arena. sources: members whose contributions are read. combine(offsets) reads
    them; finish(offsets) reads their second contributions, in the same place, which `combine` has written. readers:
    members that read this one's contribution, None: the sources.
    """

    def __init__(
        self,
        name: str,
        num_bytes: int,
        size: int,
        fill: Callable[[int], object] | None,
        sources: Iterable[int],
        combine: Callable[[list[int]], object] | None,
        finish: Callable[[list[int]], object] | None = None,
        readers: Iterable[int] | None = None,
    ):
        self.name, self.num_bytes, self.size = name, num_bytes, size
        self.fill, self.combine, self.finish = fill, combine, finish
        self.sources = tuple(sources)
        self.readers = self.sources if readers is None else tuple(readers)
        self.stage, self.index, self.offsets = _QUEUED, 0, []  # type: int, int, list[int]
        self.done = False
        self.error: Exception | None = None
        self._channel: CollectiveChannel | None = None

    def attach(self, channel: CollectiveChannel, index: int) -> None:
        self._channel, self.index = channel, index

    def missing(self) -> Peer | None:
        """Return a peer without which the collective cannot end."""
        return self._channel.missing() if self._channel else None

    def closed(self, peer: Peer) -> bool:
        """Return whether a peer has left the group."""
        assert self._channel is not None
        return self._channel.closed(peer)

    def __str__(self) -> str:
        return f"{self.name} of {self.num_bytes} bytes, collective {self.index} of its group"


class CollectiveChannel:
    """The collectives of one group in one process. Every method is called under the engine's lock.

    rank: the number of this process among `members`. numbers: what errors call the members, if not so.
    """

    def __init__(self, engine: Engine, members: Sequence[GroupMember], rank: int, numbers: Sequence[int] | None = None):
        self._engine, self._members, self._rank = engine, members, rank
        self._numbers = range(len(members)) if numbers is None else numbers
        self._me = members[rank]
        self._arena = engine.process.arena
        self._others = [one for number, one in enumerate(members) if number != rank]
        self._queue: deque[SharedCollective] = deque()
        self._num_issued = 0
        self._failed: Exception | None = None
        self._held: deque[tuple[int, int]] = deque()  # (index, offset) of contributions that members may still read

    def issue(self, collective: SharedCollective) -> None:
        """Post a collective and begin it."""
        collective.attach(self, self._num_issued)
        self._num_issued += 1
        self._queue.append(collective)
        self._engine.submit(self)

    def advance(self) -> bool:
        """See `engine.OperationQueue`."""
        limit = _DONE
        try:
            for collective in self._queue:
                while collective.stage < limit and self._step(collective, limit):
                    pass
                limit = collective.stage
                if limit == _QUEUED:
                    break
        except Exception as error:  # whoever waits for one of them is told; what follows could not be matched
            self._failed = error
        if self._failed is not None:
            for collective in self._queue:
                if not collective.done:
                    collective.error, collective.done = self._failed, True
            self._queue.clear()
        while self._queue and self._queue[0].stage == _DONE:
            self._queue.popleft()
        return bool(self._queue)

    def is_owing(self) -> bool:
        """See `engine.OperationQueue`."""
        return bool(self._queue)

    def _step(self, collective: SharedCollective, limit: int) -> bool:
        """Take a collective to its next stage, if that is possible now; `limit`: the stage of the one before it."""
        if collective.stage == _QUEUED:
            if self._behind(DONE, collective.index - _SLOTS + 1) is not None:
                return False
            self._post(collective)
        elif collective.stage == _POSTED:
            if collective.finish is None and limit < _DONE:
                return False
            if self._behind(POSTED, collective.index + 1, collective.sources) is not None:
                return False
            fence()
            self._combine(collective)
        else:
            if self._behind(COMBINED, collective.index + 1, collective.sources) is not None:
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
            offset = self._arena.allocate(collective.size)
            self._held.append((collective.index, offset))
            if collective.fill is not None:
                collective.fill(offset)
        slot = self._slot(collective.index)
        self._me[slot], self._me[slot + 1], self._me[slot + 2] = hash_of(collective.name), collective.num_bytes, offset
        collective.stage = _POSTED
        collective.offsets = [offset]
        self._publish(POSTED, collective.index + 1, collective.readers)

    def _combine(self, collective: SharedCollective) -> None:
        mine = collective.offsets[0]
        slot, offsets = self._slot(collective.index), [mine] * len(self._members)
        kind = hash_of(collective.name)
        for number in collective.sources:
            member = self._members[number]
            if member[slot] != kind or member[slot + 1] != collective.num_bytes:
                theirs = f"{name_of(member[slot])} of {member[slot + 1]} bytes"
                raise RuntimeError(f"[shared memory] rank {self._numbers[self._rank]} of the group issued "
                                   f"{collective}, rank {self._numbers[number]} {theirs}")  # fmt: skip
            offsets[number] = member[slot + 2]
        collective.offsets = offsets
        if collective.combine is not None:
            collective.combine(offsets)
        if collective.finish is None:
            self._end(collective)
        else:
            collective.stage = _COMBINED
            self._publish(COMBINED, collective.index + 1, collective.readers)

    def _end(self, collective: SharedCollective) -> None:
        collective.stage = _DONE
        collective.done = True
        self._me[DONE] = collective.index + 1  # nobody sleeps for it, except for a free slot: see `_SAFETY_S`

    def _publish(self, counter: int, value: int, readers: Iterable[int]) -> None:
        fence()
        self._me[counter] = value
        fence()
        pid = self._engine.process.pid
        for number in readers:
            self._members[number].process.wake(pid)

    def _behind(self, counter: int, target: int, of: Iterable[int] | None = None) -> GroupMember | None:
        """Return a member (of those numbered) whose counter is below `target`."""
        if target <= 0:
            return None
        for member in self._others if of is None else map(self._members.__getitem__, of):
            if member.words[member.base + counter] < target:
                return member
        return None

    def _slot(self, index: int) -> int:
        return _RING + index % _SLOTS * _SLOT_WORDS

    def reclaim(self) -> None:
        """Free the contributions that all members have read."""
        while self._held and self._behind(DONE, self._held[0][0] + 1) is None:
            self._arena.free(self._held.popleft()[1])

    def missing(self) -> Peer | None:
        """Return the peer for which the first collective waits."""
        if not self._queue:
            return None
        first = self._queue[0]
        if first.stage == _QUEUED:
            member = self._behind(DONE, first.index - _SLOTS + 1)
        else:
            counter = POSTED if first.stage == _POSTED else COMBINED
            member = self._behind(counter, first.index + 1, first.sources)
        return member.process if member is not None and isinstance(member.process, Peer) else None

    def closed(self, peer: Peer) -> bool:
        """Return whether a peer has left the group."""
        return any(one.process is peer and one[CLOSED] for one in self._others)

    def close(self) -> None:
        """Tell the members that this one has left."""
        self._publish(CLOSED, 1, (number for number in range(len(self._members)) if number != self._rank))


_NAMES = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter", "barrier",
)  # fmt: skip


def hash_of(name: str) -> int:
    """Return the number of a collective's name."""
    return _NAMES.index(name)


def name_of(number: int) -> str:
    """Return the name of a collective by its number."""
    return _NAMES[number]
