"""Creation of a group: its members exchange where their memory is, and agree on shared memory or gloo."""

from __future__ import annotations

import json
from typing import Any

from parallelrun.base.errors import EnvironmentProblem
from parallelrun.distributed import torch_private
from parallelrun.distributed.shared_memory import engine as engines
from parallelrun.distributed.shared_memory.arena import is_supported
from parallelrun.distributed.shared_memory.channel import COLLECTIVE_WORDS, CollectiveChannel
from parallelrun.distributed.shared_memory.collectives import Collectives
from parallelrun.distributed.shared_memory.group import SharedMemoryGroup
from parallelrun.distributed.shared_memory.messages import MessageChannel, message_words
from parallelrun.distributed.shared_memory.process import GroupMember

REFUSED = "refused"  # key of a group's store: why the group uses gloo
SEVERAL_HOSTS = "its ranks are on several hosts, or in several containers"


def create_group(options: Any, _: Any = None) -> Any:
    """Return a SharedMemoryGroup if all members can map each other's memory, else gloo's group; the same on all.

    Called by torch, whose `_DistributedBackendOptions` it takes.
    """
    rank, size = options.group_rank, options.group_size
    endpoints = _exchange(options, "endpoint", _offer(size))
    reasons = [endpoint["refused"] for endpoint in endpoints if "refused" in endpoint]
    if not reasons and len({endpoint["host"] for endpoint in endpoints}) > 1:
        reasons = [SEVERAL_HOSTS]
    if reasons:
        return _gloo_group(options, reasons[0])
    engine = engines.current()
    own_reason = ""
    try:
        for endpoint in endpoints:
            engine.process.open_peer(endpoint)
    except (OSError, ValueError) as error:
        own_reason = f"the memory of another rank cannot be mapped: {error}"
    reasons = [reason for reason in _exchange(options, "opened", own_reason) if reason]
    if reasons:
        return _gloo_group(options, reasons[0])
    num_ranks = max(len(endpoints), *(endpoint["ranks"] for endpoint in endpoints))
    shares_cores = num_ranks > min(endpoint["cores"] for endpoint in endpoints)
    process = engine.process
    members = [GroupMember(process.peers.get(endpoint["token"], process), endpoint["base"]) for endpoint in endpoints]
    channel = CollectiveChannel(engine, members, rank)
    messages = MessageChannel(engine, members, rank, COLLECTIVE_WORDS)
    collectives = Collectives(members, rank, shares_cores)
    return SharedMemoryGroup(options, engine, collectives, channel, messages)


def _gloo_group(options: Any, reason: str) -> Any:
    options.store.set(REFUSED, reason)
    engine = engines.existing()
    if engine is not None:
        engine.advance_in_background()
    return torch_private.gloo_group(options.store, options.group_rank, options.group_size, options.timeout)


def _offer(size: int) -> dict[str, Any]:
    """Return where this process's memory and its block of words for a group of `size` are, or why there is none."""
    if not is_supported():
        return {"refused": "no memfd or pidfd"}
    try:
        engine = engines.current()
        words = COLLECTIVE_WORDS + message_words(size)
        base = engine.process.arena.allocate(8 * words)
        engine.process.words[base // 8 : base // 8 + words] = memoryview(bytes(8 * words)).cast("q")
        offer = {"ranks": len(engine.process.peers) + 1, "cores": engine.num_cores}  # so far, on this host
        return {**engine.process.endpoint(), **offer, "base": base // 8}
    except (OSError, ValueError, EnvironmentProblem) as error:
        return {"refused": f"{type(error).__name__}: {error}"}


def _exchange(options: Any, key: str, value: Any) -> list[Any]:
    """Return every member's value."""
    options.store.set(f"{key}{options.group_rank}", json.dumps(value))
    values = options.store.multi_get([f"{key}{number}" for number in range(options.group_size)])
    return [json.loads(value) for value in values]
