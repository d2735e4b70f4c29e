"""The operation that a thread waits for in a group, as the message of a hanging run names it."""

from __future__ import annotations

from typing import Any, NamedTuple

from parallelrun.distributed.shared_memory.engine import Engine
from parallelrun.distributed.shared_memory.messages import Message, MessageChannel


class Awaited(NamedTuple):
    """An operation of a group that has not ended. number: among the group's collectives, from 1; 0: a message; missing:
    the members without which it cannot end, None if that is not known."""

    operation: str
    num_bytes: int
    number: int
    missing: tuple[int, ...] | None


def awaited_in(engine: Engine, collectives: Any, messages: MessageChannel) -> Awaited | None:
    """Return what a thread waits for in the group that issues `collectives` and `messages`; None if none does."""
    for operation in tuple(engine.awaited):
        if isinstance(operation, Message):
            if messages.holds(operation):
                peers = None if operation.peer is None else (operation.peer,)
                return Awaited("send" if operation.is_send else "recv", operation.num_bytes, 0, peers)
        elif outstanding := collectives.outstanding(operation):
            return Awaited(operation.name, operation.num_bytes, *outstanding)  # type: ignore[attr-defined]
    return None
