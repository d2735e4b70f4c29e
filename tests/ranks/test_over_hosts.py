"""Groups whose ranks are on several hosts use gloo, beside groups in shared memory. The hosts are pretended."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallelrun.distributed import shared_memory
from parallelrun.distributed.comm import waiting
from parallelrun.distributed.shared_memory import collectives
from parallelrun.distributed.shared_memory.joining import SEVERAL_HOSTS
from tests.overlapping_groups import out_of_order
from tests.pool import RanksFailed, run_ranks

ONE, EVEN, UNEVEN, MIXED = "aaaa", "aabb", "aaab", "abba"  # the host of each rank


def over(hosts: str) -> Any:
    """Return a new group whose ranks are on these hosts."""
    os.environ[shared_memory.HOST_VARIABLE] = hosts[dist.get_rank()]
    return dist.new_group(backend="shm")


def on_hosts(names: tuple[str, ...]) -> tuple[str, str, float, str]:
    os.environ[shared_memory.HOST_VARIABLE] = names[dist.get_rank()]
    everyone, pair = dist.new_group(), dist.new_group([1, 2])
    tensor = torch.ones(10)
    dist.all_reduce(tensor, group=everyone)
    in_pair = shared_memory.carrier(pair) if dist.get_rank() else ""
    return shared_memory.carrier(everyone), in_pair, float(tensor.sum()), shared_memory.refusal(everyone)


def test_what_carries_a_group_depends_on_the_hosts_of_its_ranks() -> None:
    assert run_ranks(3, on_hosts, ("a", "b", "b"))[1:] == [("gloo", "shm", 30.0, SEVERAL_HOSTS)] * 2
    assert run_ranks(3, on_hosts, ("", "", ""))[1:] == [("shm", "shm", 30.0, "")] * 2
    assert run_ranks(3, on_hosts, ("a", "b", "c"))[1:] == [("gloo", "gloo", 30.0, SEVERAL_HOSTS)] * 2


def issued(hosts: str) -> int:
    group = over(hosts)
    for _ in range(3):
        dist.all_reduce(torch.ones(1), group=group)
    return waiting.num_issued()[group.group_name]


def test_the_collectives_of_a_group_over_hosts_are_counted() -> None:
    """By them a stall is explained. torch counts those of its built-in backends only."""
    assert run_ranks(2, issued, "ab") == [3, 3]


def out_of_order_on(hosts: str, seed: int) -> None:
    os.environ[shared_memory.HOST_VARIABLE] = hosts[dist.get_rank()]
    out_of_order(seed)


@pytest.mark.parametrize("hosts", [EVEN, UNEVEN, MIXED, "abcd"])
def test_overlapping_groups_complete_in_any_order(hosts: str) -> None:
    run_ranks(4, out_of_order_on, hosts, 3)


def wait_while_owing(hosts: str, how: str) -> float:
    """Rank 0 waits for another host, which answers only after a collective that needs rank 0."""
    group, inside = over(hosts), dist.new_group([0, 1, 2])
    rank, tensor = dist.get_rank(), torch.ones(collectives.SERIAL // 2)
    if rank < 3:
        time.sleep(rank % 2)  # rank 0 waits before it can sum its part
        work = dist.all_reduce(tensor, group=inside, async_op=True)
        if rank:
            work.wait()
        if how == "a collective":
            dist.all_reduce(torch.ones(1), group=group)
        elif rank == 1:
            dist.send(torch.ones(1), 3, group=group)
        elif rank == 0:
            dist.recv(torch.zeros(1), 3, group=group)
        work.wait()
    elif how == "a collective":
        dist.all_reduce(torch.ones(1), group=group)
    else:
        dist.recv(torch.zeros(1), 1, group=group)
        dist.send(torch.ones(1), 0, group=group)
    return float(tensor[0])


@pytest.mark.parametrize("how", ["a message", "a collective"])
def test_a_rank_that_waits_for_another_host_serves_its_own_host(how: str) -> None:
    """Their all-reduce is so large that each of the three sums a part."""
    assert run_ranks(4, wait_while_owing, UNEVEN, how, timeout=20) == [3.0, 3.0, 3.0, 1.0]


def left_alone(hosts: str, how: str, dying: int) -> None:
    """A rank dies while the others need it."""
    group = over(hosts)
    dist.all_reduce(torch.ones(1), group=group)
    if dist.get_rank() == dying:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "in a message":
        dist.recv(torch.zeros(2), dying, group=group)
    dist.all_reduce(torch.ones(100_000), group=group)


@pytest.mark.parametrize("how", ["in a collective", "in a message"])
@pytest.mark.parametrize(("hosts", "dying"), [(ONE, 1), (EVEN, 3), (UNEVEN, 3), (UNEVEN, 2)])
def test_a_dead_peer_is_noticed_on_every_host_within_a_second(hosts: str, dying: int, how: str) -> None:
    """The pool gives survivors a second to tell; on a machine that is overloaded, not all get to run in it."""
    for _ in range(3):
        with pytest.raises(RanksFailed) as failed:
            run_ranks(4, left_alone, hosts, how, dying)
        first, *others = failed.value.failures
        assert first.rank == dying and first.kind == "SIGKILL"
        assert all(failure.is_victim for failure in others), others
        assert hosts != ONE or all("Connection closed by peer" in failure.message for failure in others), others
        if len(others) == 3:
            return
    pytest.fail(f"only {[failure.rank for failure in others]} noticed within a second")
