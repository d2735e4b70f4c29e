"""Messages of a group over several hosts: through shared memory on one host, over gloo to the others."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import Tensor

from parallelrun.shared_memory.chains import BetweenHosts, GlooLink
from parallelrun.shared_memory.engine import Engine
from parallelrun.shared_memory.hosts import Hosts
from parallelrun.shared_memory.tensors import num_bytes_of

if TYPE_CHECKING:
    from parallelrun.shared_memory.messages import Message, MessageChannel

_LOOK_S = 5e-4


class GlooMessage(BetweenHosts):
    """One side of a message to or from another host. It ends in `wait` only: gloo has no notice of the end."""

    def __init__(self, link: GlooLink, engine: Engine, tensor: Tensor, peer: int, tag: int, is_send: bool):
        self.done, self.peer, self.is_send = False, peer, is_send
        self.error: Exception | None = None
        self.num_bytes = num_bytes_of(tensor)
        self.link, self._engine, self._tensor = link, engine, tensor
        start = link.group.send if is_send else link.group.recv
        self._work: Any = start([tensor], peer, tag)

    def wait(self, timeout_s: float) -> None:
        """Wait for the end. Meanwhile a thread advances what other ranks need of this one. Raises RuntimeError."""
        if self.done:
            return
        with self._engine.lock:
            self._engine.progress()
            is_owing = self._engine.is_owing()
        ended = threading.Event()
        self._engine.awaited.append(self)
        if is_owing:
            threading.Thread(target=self._advance_until, args=(ended,), daemon=True).start()
        try:
            self._work.wait(timedelta(seconds=timeout_s))
        finally:
            ended.set()
            self._engine.awaited.remove(self)
        self.done = True

    def _advance_until(self, ended: threading.Event) -> None:
        is_owing = True
        while is_owing and not ended.wait(_LOOK_S):
            with self._engine.lock:
                self._engine.progress()
                is_owing = self._engine.is_owing()


class HierarchicalMessages:
    """The messages of one group, with the methods of `MessageChannel`. link: to all ranks."""

    def __init__(self, engine: Engine, hosts: Hosts, inside: MessageChannel, link: GlooLink):
        self._engine, self._local, self._inside, self._link = engine, frozenset(hosts.local), inside, link

    def holds(self, message: object) -> bool:
        """Return whether a message is one of this group."""
        return message.link is self._link if isinstance(message, GlooMessage) else self._inside.holds(message)

    def send(self, tensor: Tensor, peer: int, tag: int) -> Message | GlooMessage:
        if peer in self._local:
            return self._inside.send(tensor, peer, tag)
        return GlooMessage(self._link, self._engine, tensor, peer, tag, is_send=True)

    def receive(self, tensor: Tensor, peer: int | None, tag: int) -> Message | GlooMessage:
        """Begin to receive. Raises RuntimeError if the sender may be any: it would have to wait in two places."""
        if peer is None:
            what = "a group over several hosts cannot receive from any rank: name the source, or use backend=gloo"
            raise RuntimeError(f"[shared memory] {what}")
        if peer in self._local:
            return self._inside.receive(tensor, peer, tag)
        return GlooMessage(self._link, self._engine, tensor, peer, tag, is_send=False)
