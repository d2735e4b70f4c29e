"""Creation of a group: its members exchange where their memory is, and agree on shared memory or gloo."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

from parallelrun import torch_private
from parallelrun.errors import EnvironmentProblem
from parallelrun.shared_memory import engine as engines
from parallelrun.shared_memory import keep_out_of_graphs
from parallelrun.shared_memory.arena import is_supported
from parallelrun.shared_memory.channel import COLLECTIVE_WORDS, CollectiveChannel
from parallelrun.shared_memory.collectives import Collectives
from parallelrun.shared_memory.engine import Engine
from parallelrun.shared_memory.group import SharedMemoryGroup
from parallelrun.shared_memory.hierarchical_group import HierarchicalGroup
from parallelrun.shared_memory.hosts import Hosts
from parallelrun.shared_memory.messages import MessageChannel, message_words
from parallelrun.shared_memory.named_group import Place
from parallelrun.shared_memory.process import GroupMember

REFUSED = "refused"  # key of a group's store: why the group uses gloo alone
_CHANNELS = 2  # blocks of words for collectives; a group of one host uses one of them


def create_group(options: Any, _: Any = None) -> Any:
    """Return a SharedMemoryGroup if all members can map each other's memory, a HierarchicalGroup if those of each host
    can, else gloo's group; the same on all.

    A rank that waits in gloo's group does not advance its operations of other groups, which peers may wait for. So
    ranks that are all on different hosts have a HierarchicalGroup, too.

    Called by torch, whose `_DistributedBackendOptions` it takes.
    """
    place = Place(options.store, options.group_rank, options.group_size, options.timeout)
    everyone = _exchange(place, "endpoint", _offer(place.size))
    why = [one["refused"] for one in everyone if "refused" in one]
    if why:
        return _refused(place, why[0])
    hosts = Hosts([one["host"] for one in everyone], place.rank)
    if hosts.share_none and place.size > 1:
        place.store.set(REFUSED, "each rank is on a host, or in a container, of its own")
    engine = engines.current()
    mine_refused = ""
    try:
        for rank in hosts.local:
            engine.process.open_peer(everyone[rank])
    except (OSError, ValueError) as error:
        mine_refused = f"the memory of another rank cannot be mapped: {error}"
    why = [one for one in _exchange(place, "opened", mine_refused) if one]
    if why:
        return _refused(place, why[0])
    torch_private.before_compiling(_keep_out)
    num_ranks = max(len(hosts.local), *(everyone[rank]["ranks"] for rank in hosts.local))
    shares_cores = num_ranks > min(everyone[rank]["cores"] for rank in hosts.local)
    if len(hosts.ranks) > 1:
        return _over_hosts(place, engine, hosts, everyone, shares_cores)
    members = [_member(engine, one) for one in everyone]
    channel = CollectiveChannel(engine, members, place.rank)
    messages = MessageChannel(engine, members, place.rank, _CHANNELS * COLLECTIVE_WORDS)
    collectives = Collectives(members, place.rank, shares_cores, engine.process.arena)
    return SharedMemoryGroup(place, engine, collectives, channel, messages)


def _over_hosts(
    place: Place, engine: Engine, hosts: Hosts, everyone: Sequence[dict[str, Any]], shares_cores: bool
) -> HierarchicalGroup:
    gloo = torch_private.gloo_group(place.store, place.rank, place.size, place.timeout)
    lane = gloo if hosts.share_none else None
    if hosts.lane is not None and lane is None:
        store = PrefixStore(f"lane {hosts.lane}/", place.store)
        lane = torch_private.gloo_group(store, hosts.host, len(hosts.ranks), place.timeout)
    members = [
        [_member(engine, one, number * COLLECTIVE_WORDS) if rank in hosts.local else None
         for rank, one in enumerate(everyone)]
        for number in range(_CHANNELS)
    ]  # fmt: skip
    return HierarchicalGroup(place, engine, hosts, members, _CHANNELS * COLLECTIVE_WORDS, (gloo, lane), shares_cores)


def _keep_out(_: object) -> None:
    keep_out_of_graphs()


def _refused(place: Place, why: str) -> Any:
    place.store.set(REFUSED, why)
    return torch_private.gloo_group(place.store, place.rank, place.size, place.timeout)


def _offer(size: int) -> dict[str, Any]:
    """Return where this process's memory and its block of words for a group of `size` are, or why there is none."""
    if not is_supported():
        return {"refused": "no memfd or pidfd"}
    try:
        engine = engines.current()
        words = _CHANNELS * COLLECTIVE_WORDS + message_words(size)
        base = engine.process.arena.allocate(8 * words)
        engine.process.words[base // 8 : base // 8 + words] = memoryview(bytes(8 * words)).cast("q")
        known = {"ranks": len(engine.process.peers) + 1, "cores": engine.num_cores}  # so far, on this host
        return {**engine.process.endpoint(), **known, "base": base // 8}
    except (OSError, ValueError, EnvironmentProblem) as error:
        return {"refused": f"{type(error).__name__}: {error}"}


def _exchange(place: Place, key: str, value: Any) -> list[Any]:
    """Return every member's value."""
    place.store.set(f"{key}{place.rank}", json.dumps(value))
    return [json.loads(one) for one in place.store.multi_get([f"{key}{number}" for number in range(place.size)])]


def _member(engine: Engine, endpoint: dict[str, Any], skipped_words: int = 0) -> GroupMember:
    process = engine.process
    return GroupMember(process.peers.get(endpoint["token"], process), endpoint["base"] + skipped_words)
