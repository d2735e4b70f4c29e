"""Creation of a group: its members exchange where their memory is, and agree on shared memory or gloo."""

from __future__ import annotations

import json
from typing import Any

from parallelrun import torch_private
from parallelrun.errors import EnvironmentProblem
from parallelrun.shared_memory import engine as engines
from parallelrun.shared_memory import keep_out_of_graphs
from parallelrun.shared_memory.arena import is_supported
from parallelrun.shared_memory.channel import COLLECTIVE_WORDS
from parallelrun.shared_memory.engine import Engine
from parallelrun.shared_memory.group import SharedMemoryGroup
from parallelrun.shared_memory.messages import message_words
from parallelrun.shared_memory.process import GroupMember

refusals: list[str] = []  # why groups use gloo instead


def create_group(options: Any, _: Any = None) -> Any:
    """Return a SharedMemoryGroup if all members can map each other's memory, else gloo's group; the same on all.

    Called by torch, whose `_DistributedBackendOptions` it takes.
    """
    store, rank, size = options.store, options.group_rank, options.group_size
    mine = _offer(size)
    everyone = _exchange(store, "endpoint", rank, size, mine)
    why = [one["refused"] for one in everyone if "refused" in one]
    if not why and len({one["host"] for one in everyone}) > 1:
        why = ["the ranks are on several hosts, or in containers apart"]
    if why:
        return _refused(options, why[0])
    engine = engines.current()
    mine_refused = ""
    try:
        for one in everyone:
            engine.process.open_peer(one)
    except (OSError, ValueError) as error:
        mine_refused = f"the memory of another rank cannot be mapped: {error}"
    why = [one for one in _exchange(store, "opened", rank, size, mine_refused) if one]
    if why:
        return _refused(options, why[0])
    if torch_private.is_compiler_loaded():  # the user compiles
        keep_out_of_graphs()
    members = [_member(engine, one) for one in everyone]
    num_ranks = max(size, *(one["ranks"] for one in everyone))
    shares_cores = num_ranks > min(one["cores"] for one in everyone)
    return SharedMemoryGroup(store, rank, engine, members, COLLECTIVE_WORDS, options.timeout, shares_cores)


def _refused(options: Any, why: str) -> Any:
    refusals.append(why)
    return torch_private.gloo_group(options)


def _offer(size: int) -> dict[str, Any]:
    """Return where this process's memory and its block of words for a group of `size` are, or why there is none."""
    if not is_supported():
        return {"refused": "no memfd or pidfd"}
    try:
        engine = engines.current()
        words = COLLECTIVE_WORDS + message_words(size)
        base = engine.process.arena.allocate(8 * words)
        engine.process.words[base // 8 : base // 8 + words] = memoryview(bytes(8 * words)).cast("q")
        known = {"ranks": len(engine.process.peers) + 1, "cores": engine.num_cores}  # so far, on this host
        return {**engine.process.endpoint(), **known, "base": base // 8}
    except (OSError, ValueError, EnvironmentProblem) as error:
        return {"refused": f"{type(error).__name__}: {error}"}


def _exchange(store: Any, key: str, rank: int, size: int, value: Any) -> list[Any]:
    """Return every member's value."""
    store.set(f"{key}{rank}", json.dumps(value))
    return [json.loads(one) for one in store.multi_get([f"{key}{number}" for number in range(size)])]


def _member(engine: Engine, endpoint: dict[str, Any]) -> GroupMember:
    process = engine.process
    return GroupMember(process.peers.get(endpoint["token"], process), endpoint["base"])
