"""The process group of ranks of several hosts: shared memory within each host, gloo between them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from parallelrun.shared_memory.chains import ChainQueue, GlooLink
from parallelrun.shared_memory.channel import CollectiveChannel
from parallelrun.shared_memory.collectives import Collectives
from parallelrun.shared_memory.engine import Engine
from parallelrun.shared_memory.gloo_messages import HierarchicalMessages
from parallelrun.shared_memory.group import SharedMemoryGroup
from parallelrun.shared_memory.hierarchical import HierarchicalCollectives
from parallelrun.shared_memory.hosts import Hosts
from parallelrun.shared_memory.messages import MessageChannel
from parallelrun.shared_memory.named_group import Place
from parallelrun.shared_memory.process import GroupMember


class HierarchicalGroup(SharedMemoryGroup):
    """A group of ranks of several hosts.

    members: of all ranks, None on other hosts; one row for each of the channels of first and last stages, whose blocks
    of words differ. messages_base: see `MessageChannel`. groups: gloo's, of all ranks and of this rank's lane.
    shares_cores: see `Collectives`.
    """

    def __init__(
        self,
        place: Place,
        engine: Engine,
        hosts: Hosts,
        members: Sequence[Sequence[GroupMember | None]],
        messages_base: int,
        groups: tuple[Any, Any | None],
        shares_cores: bool,
    ):
        local = [[one for one in row if one is not None] for row in members]
        first, last = (CollectiveChannel(engine, row, hosts.local_rank, hosts.local) for row in local)
        self._links = [GlooLink(engine, one) for one in groups if one is not None]
        lane = self._links[1] if len(self._links) > 1 else None
        inside_host = Collectives(local[0], hosts.local_rank, shares_cores, engine.process.arena)
        make = HierarchicalCollectives(hosts, local[0], inside_host, (self._links[0], lane), (first, last))
        inside: Any = MessageChannel(engine, members[0], place.rank, messages_base)  # type: ignore[arg-type]
        messages: Any = HierarchicalMessages(engine, hosts, inside, self._links[0])
        self._hosts = hosts
        self._queue = ChainQueue(engine, (first, last), self._links)
        super().__init__(place, engine, make, self._queue, messages)

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        for link in self._links:
            if link.group is not None:
                link.group.set_timeout(timeout)

    def abort(self) -> None:
        super().abort()
        with self._engine.lock:
            self._queue.disconnect()

    @property
    def is_over_gloo_only(self) -> bool:
        """Return whether every rank is on a host of its own."""
        return self._hosts.share_none

    @property
    def num_bytes_between_hosts(self) -> int:
        """Return the bytes that collectives of this rank have sent to other hosts."""
        return sum(link.num_bytes for link in self._links)
