"""Messages between the members of a group: copied into the sender's arena, matched by (sender, tag) in order.

For each pair there is a ring of descriptors in the sender's block of words. SENT counts the messages to a member, TAKEN
those from a member whose memory and descriptor the sender may reuse, so a sender is at most a ring and IN_FLIGHT bytes
ahead. Messages can be received in another order than sent, by tag. So a sender that is stopped (STALLED) while the
receiver waits for a later message makes it take those before to private memory.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

import torch
from torch import Tensor

from parallelrun.distributed.shared_memory.arena import fence, store_before_load
from parallelrun.distributed.shared_memory.channel import CLOSED
from parallelrun.distributed.shared_memory.engine import Engine
from parallelrun.distributed.shared_memory.process import GroupMember, Peer

IN_FLIGHT = 2**26  # bytes from one member to another that are not received yet; a single message may be larger
_SLOTS, _SLOT_WORDS = 32, 3  # of a ring: (tag, offset, bytes)


def message_words(size: int) -> int:
    """Return the words of a member's block in a group of `size`: SENT, STALLED, TAKEN and a ring for each member."""
    return size * (3 + _SLOTS * _SLOT_WORDS)


class Message:
    """One side of a message. peer: number of the other member. tensor: contiguous."""

    def __init__(self, channel: MessageChannel, tensor: Tensor, peer: int, tag: int, is_send: bool):
        self._channel = channel
        self.tensor, self.peer, self.tag, self.is_send = tensor, peer, tag, is_send
        self.name = "send" if is_send else "recv"
        self.num_bytes = tensor.numel() * tensor.element_size()
        self.done = False
        self.error: Exception | None = None

    def missing(self) -> list[Peer]:
        """Return the other side."""
        peer = self._channel.peer(self.peer)
        return [peer] if peer is not None else []

    def closed(self, peer: Peer) -> bool:
        """Return whether the other side has left the group."""
        return self._channel.peer(self.peer) is peer and self._channel.has_left(self.peer)

    def __str__(self) -> str:
        where = f"{'to' if self.is_send else 'from'} rank {self.peer} of the group"
        return f"{self.name} of {self.num_bytes} bytes {where}, tag {self.tag}"


class _Arrived:
    """A message that can be received: `bytes_` after it was taken to private memory, else at `offset`."""

    __slots__ = ("bytes_", "index", "num_bytes", "offset")

    def __init__(self, index: int, offset: int, num_bytes: int):
        self.index, self.offset, self.num_bytes = index, offset, num_bytes
        self.bytes_: Tensor | None = None


class _Inbox:
    """Messages that have arrived from one member, by tag and in order, and the numbers of those seen and received."""

    def __init__(self) -> None:
        self.by_tag: dict[int, deque[_Arrived]] = defaultdict(deque)
        self.num_seen = 0
        self.taken: set[int] = set()
        self.num_taken = 0


class MessageChannel:
    """The messages of one group in one process. Every method is called under the engine's lock."""

    def __init__(self, engine: Engine, members: Sequence[GroupMember], rank: int, base: int):
        self._engine, self._members, self._rank = engine, members, rank
        self._me, self._arena = members[rank], engine.process.arena
        size = len(members)
        self._sent, self._stalled, self._taken, self._rings = base, base + size, base + 2 * size, base + 3 * size
        self._outbox: list[Message] = []
        self._receives: list[Message] = []
        self._inboxes = [_Inbox() for _ in members]
        self._posted: list[deque[tuple[int, int, int]]] = [deque() for _ in members]  # (index, offset, bytes)

    def peer(self, number: int) -> Peer | None:
        """Return the process of a member, None for this one."""
        process = self._members[number].process
        return process if isinstance(process, Peer) else None

    def holds(self, message: Message) -> bool:
        """Return whether a message is one of this group."""
        return message._channel is self

    def has_left(self, number: int) -> bool:
        """Return whether a member has left the group and has sent nothing more than what was seen."""
        return bool(self._members[number][CLOSED])

    def send(self, tensor: Tensor, peer: int, tag: int) -> Message:
        """Begin to send. It ends when the tensor is copied."""
        message = Message(self, tensor, peer, tag, is_send=True)
        self._outbox.append(message)
        self._engine.submit(self)
        return message

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Message:
        message = Message(self, tensor, peer, tag, is_send=False)
        self._receives.append(message)
        self._engine.submit(self)
        return message

    def advance(self) -> bool:
        """See `engine.OperationQueue`."""
        if self._outbox:
            blocked: set[int] = set()
            for message in self._outbox:
                if message.peer in blocked or not self._post(message, message.peer):
                    blocked.add(message.peer)
            self._outbox = [message for message in self._outbox if not message.done]
        if self._receives:
            # before any is matched: the first of two equal receives gets the first
            for number in {message.peer for message in self._receives}:
                self._look(number)
            for message in self._receives:
                self._match(message)
            self._receives = [message for message in self._receives if not message.done]
        return bool(self._outbox or self._receives)

    def is_owing(self) -> bool:
        """See `engine.OperationQueue`. Nobody needs a receive but its own rank."""
        return bool(self._outbox)

    def missing(self) -> list[Peer]:
        """Return the receiver for which the first message waits."""
        return self._outbox[0].missing() if self._outbox else []

    def reclaim(self, number: int) -> int:
        """Free the messages that a member has received; return the bytes that it has not."""
        posted, taken = self._posted[number], self._members[number][self._taken + self._rank]
        while posted and posted[0][0] < taken:
            self._arena.free(posted.popleft()[1])
        return sum(num_bytes for _, _, num_bytes in posted)

    def _post(self, message: Message, to: int) -> bool:
        """Copy a message into the arena and publish it, if there is room."""
        if self._is_full(to, message.num_bytes):
            self._me[self._stalled + to] = 1
            store_before_load()
            if self._is_full(to, message.num_bytes):  # still, now that the receiver wakes this process
                self._members[to].process.wake()
                return False
        self._me[self._stalled + to] = 0
        index = self._me[self._sent + to]
        try:
            offset = self._arena.allocate(message.num_bytes)
        except Exception as error:
            message.error, message.done = error, True
            return True
        tensor = message.tensor
        if message.num_bytes:
            self._me.tensor(offset, tensor.dtype, tensor.numel()).copy_(tensor.view(-1))
        self._posted[to].append((index, offset, message.num_bytes))
        slot = self._slot(to, index)
        self._me[slot], self._me[slot + 1], self._me[slot + 2] = message.tag, offset, message.num_bytes
        fence()
        self._me[self._sent + to] = index + 1
        store_before_load()
        self._members[to].process.wake()
        message.done = True
        return True

    def _is_full(self, to: int, num_bytes: int) -> bool:
        in_flight = self.reclaim(to)
        return len(self._posted[to]) == _SLOTS or (in_flight > 0 and in_flight + num_bytes > IN_FLIGHT)

    def _slot(self, to: int, index: int) -> int:
        return self._rings + (to * _SLOTS + index % _SLOTS) * _SLOT_WORDS

    def _match(self, message: Message) -> None:
        """Receive a message if it has arrived."""
        queue = self._inboxes[message.peer].by_tag.get(message.tag)
        if queue:
            self._receive(message, message.peer, queue.popleft())
        elif self._members[message.peer][self._stalled + self._rank]:
            self._make_room(message.peer)

    def _look(self, number: int) -> None:
        """Take notice of the messages that a member has published."""
        inbox, member = self._inboxes[number], self._members[number]
        sent = member[self._sent + self._rank]
        if inbox.num_seen == sent:
            return
        fence()
        for index in range(inbox.num_seen, sent):
            slot = self._slot(self._rank, index)
            inbox.by_tag[member[slot]].append(_Arrived(index, member[slot + 1], member[slot + 2]))
        inbox.num_seen = sent

    def _receive(self, message: Message, number: int, arrived: _Arrived) -> None:
        flat = message.tensor.view(-1)
        if arrived.num_bytes > message.num_bytes:
            message.error = RuntimeError(f"[shared memory] {message}: the message has {arrived.num_bytes} bytes")
        elif arrived.num_bytes:
            source = arrived.bytes_
            if source is None:
                source = self._members[number].tensor(arrived.offset, torch.uint8, arrived.num_bytes)
            if arrived.num_bytes == message.num_bytes:
                flat.copy_(source.view(flat.dtype))
            else:
                flat.view(torch.uint8)[: arrived.num_bytes].copy_(source)
        if arrived.bytes_ is None:
            self._take(number, arrived.index)
        message.done = True

    def _take(self, number: int, index: int) -> None:
        """Tell a member that the memory of a message is no longer read, once all before it are taken too."""
        inbox = self._inboxes[number]
        inbox.taken.add(index)
        while inbox.num_taken in inbox.taken:
            inbox.taken.discard(inbox.num_taken)
            inbox.num_taken += 1
        fence()
        self._me[self._taken + number] = inbox.num_taken
        store_before_load()
        if self._members[number][self._stalled + self._rank]:
            self._members[number].process.wake()

    def _make_room(self, number: int) -> None:
        """Take what has arrived from a member, but is not asked for, to private memory."""
        for queue in self._inboxes[number].by_tag.values():
            for arrived in queue:
                if arrived.bytes_ is None:
                    source = self._members[number].tensor(arrived.offset, torch.uint8, arrived.num_bytes)
                    arrived.bytes_ = source.clone()
                    self._take(number, arrived.index)
