"""Groups over several hosts: what gloo does, with shared memory within each host. The hosts are pretended."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallelrun import shared_memory, torch_private
from parallelrun.shared_memory import collectives, hierarchical
from parallelrun.shared_memory.hosts import HOST_VARIABLE
from tests.matrix import FULL
from tests.overlapping_groups import out_of_order
from tests.pool import RanksFailed, run_ranks
from tests.ranks.test_shared_memory import CASES, OPERATIONS, SIZES, part, strided, without_strides

# Layouts of hosts differ in the route of bytes, dtypes in their sums: every dtype is summed on the first, few on all.
FEW = CASES if FULL else [(dtype, SIZES[at]) for dtype in (torch.float32, torch.bfloat16) for at in (2, 4)]
EVEN, UNEVEN, MIXED, THREE, ALONE = "aabb", "aaab", "abba", "aabbc", "abc"  # the host of each rank


def over(hosts: str, **options: Any) -> Any:
    """Return a new group whose ranks are on these hosts."""
    os.environ[HOST_VARIABLE] = hosts[dist.get_rank()]
    group = dist.new_group(backend="shm", **options)
    assert shared_memory.carrier(group) == ("shm+gloo" if len(set(hosts)) < len(hosts) else "gloo")
    return group


def beside_gloo(hosts: str) -> list[str]:
    """The operations and cases in which a group over several hosts gives something else than gloo."""
    group, gloo, found = over(hosts), dist.new_group(backend="gloo"), []
    assert SIZES[-2] * 8 < hierarchical.SMALL < SIZES[-1] * 2, "bytes: the sizes are on both sides of it"
    for name, (operation, arguments) in OPERATIONS.items():
        for dtype, numel in CASES if hosts == EVEN and "reduce" in name else FEW:
            mine = operation(group, dtype, numel, *arguments)
            theirs = (without_strides if operation is strided else operation)(gloo, dtype, numel, *arguments)
            if len(mine) != len(theirs) or not all(map(torch.equal, mine, theirs)):
                found.append(f"{name} {dtype} {numel}")
    return found


@pytest.mark.parametrize("hosts", [EVEN, UNEVEN, MIXED, THREE, ALONE])
def test_every_operation_and_dtype_equals_gloo_bit_for_bit(hosts: str) -> None:
    assert run_ranks(len(hosts), beside_gloo, hosts, timeout=180) == [[]] * len(hosts)


def other_reductions(hosts: str) -> list[Tensor]:
    group, rank = over(hosts), dist.get_rank()
    found = []
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        found.append(part(torch.int32, 1000, rank))
        dist.all_reduce(found[-1], op, group=group)
    mask = part(torch.int32, 10, rank) > 2
    dist.all_reduce(mask, dist.ReduceOp.MAX, group=group)
    means = [part(torch.bfloat16, numel, rank) for numel in (10, 20_000)]
    for mean in means:
        dist.all_reduce(mean, dist.ReduceOp.AVG, group=group)
    numbers = torch.complex(torch.ones(3), torch.full((3,), float(rank)))
    dist.all_reduce(numbers, group=group)
    return [*found, mask, *means, numbers]


@pytest.mark.parametrize("hosts", [EVEN, THREE])
def test_the_other_reductions(hosts: str) -> None:
    world = len(hosts)
    parts = torch.stack([part(torch.int32, 1000, rank) for rank in range(world)])
    few = torch.stack([part(torch.int32, 10, rank) for rank in range(world)])
    many = torch.stack([part(torch.int32, 20_000, rank) for rank in range(world)])
    band, bor, bxor = parts[0], parts[0], parts[0]
    for one in parts[1:]:
        band, bor, bxor = band & one, bor | one, bxor ^ one
    for found in run_ranks(world, other_reductions, hosts):
        assert all(map(torch.equal, found[:4], (band, bor, bxor, few.amax(0) > 2)))
        assert torch.equal(found[4], few.float().mean(0).bfloat16())
        assert torch.equal(found[5], many.float().mean(0).bfloat16())
        assert torch.equal(
            found[6], torch.complex(torch.full((3,), float(world)), torch.full((3,), float(sum(range(world)))))
        )


def random_sums(hosts: str, cells: list[tuple[int, torch.dtype]]) -> list[list[Tensor]]:
    """[own numbers, their all-reduced sum, own part of their reduce-scattered one] of each (elements, dtype)."""
    group = over(hosts)
    return [random_sum(group, len(hosts), *cell) for cell in cells]


def random_sum(group: Any, world: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
    rank = dist.get_rank()
    numbers = torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)
    summed, mine = numbers.clone(), torch.zeros(numel // world, dtype=dtype)
    dist.all_reduce(summed, group=group)
    dist.reduce_scatter_tensor(mine, numbers, group=group)
    return [numbers, summed, mine]


@pytest.mark.parametrize("hosts", [EVEN, UNEVEN, MIXED, THREE])
def test_sums_are_by_host_then_by_rank_and_16_bit_ones_are_rounded_once(hosts: str) -> None:
    cells = list(product([20, 40_000], [torch.float32, torch.bfloat16]))
    for cell, results in zip(cells, zip(*run_ranks(len(hosts), random_sums, hosts, cells)), strict=True):
        of_hosts = []
        for host in dict.fromkeys(hosts):
            numbers = [result[0].float() for rank, result in enumerate(results) if hosts[rank] == host]
            of_hosts.append(sum(numbers[1:], numbers[0]))
        total = sum(of_hosts[1:], of_hosts[0]).to(cell[1])
        for rank, (_, summed, mine) in enumerate(results):
            assert torch.equal(summed, total), cell
            assert torch.equal(mine, total.chunk(len(hosts))[rank]), cell


def sums_in_pieces(hosts: str, cells: list[tuple[int, torch.dtype]]) -> list[list[Tensor]]:
    with mock.patch.object(hierarchical, "PIECE", 2**10):  # bytes: an all-reduce has many
        return random_sums(hosts, cells)


@pytest.mark.parametrize("hosts, dtype", [(THREE, torch.float32), (ALONE, torch.bfloat16)])
def test_sums_that_are_sent_in_pieces_have_the_bits_of_whole_ones(hosts: str, dtype: torch.dtype) -> None:
    cells = [(39_990, dtype)]  # for any of the groups; the last pieces and parts are shorter
    whole = run_ranks(len(hosts), random_sums, hosts, cells)
    pieces = run_ranks(len(hosts), sums_in_pieces, hosts, cells)
    assert all(map(torch.equal, *([tensor for [rank] in found for tensor in rank] for found in (pieces, whole))))


def sums_and_gloos(hosts: str) -> list[tuple[bool, int]]:
    """Whether the sum and the mean of random numbers have the bits of gloo's, and the bytes sent."""
    group, gloo, found = over(hosts), dist.new_group(list(range(len(hosts))), backend="gloo"), []
    for op, factor in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, len(hosts))):
        mine = torch.randn(39_990, dtype=torch.float64) + dist.get_rank()
        theirs = mine.clone()
        dist.all_reduce(mine, op, group=group)
        dist.all_reduce(theirs, group=gloo)
        found.append((torch.equal(mine, theirs / factor), group.num_bytes_between_hosts))
    return found


def test_hosts_of_one_rank_sum_around_gloos_ring() -> None:
    """The exchange of parts would leave ports idle: it took 1.3 times as long."""
    share = 2 * 39_990 * 8 * 2 // 3
    assert run_ranks(3, sums_and_gloos, ALONE) == [[(True, share), (True, 2 * share)]] * 3


def uneven_parts(hosts: str) -> tuple[list[int], list[float], list[Any], list[Any]]:
    """Gathers and reduce-scatters of another size for each rank, and Python objects."""
    group, rank, world = over(hosts), dist.get_rank(), len(hosts)
    outputs = [torch.zeros(number + 1) for number in range(world)]
    dist.all_gather(outputs, torch.full((rank + 1,), float(rank)), group=group)
    mine = torch.zeros(rank + 1)
    dist.reduce_scatter(mine, [torch.full((number + 1,), float(rank + number)) for number in range(world)], group=group)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, "x" * rank, group=group)
    given: list[Any] = [None]
    dist.scatter_object_list(given, list("abcde")[:world] if rank == 1 else None, src=1, group=group)
    return [int(one.sum()) for one in outputs], mine.tolist(), everyone, given


@pytest.mark.parametrize("hosts", [EVEN, UNEVEN, THREE])
def test_parts_of_several_sizes_and_python_objects(hosts: str) -> None:
    world = len(hosts)
    for rank, (sums, mine, everyone, given) in enumerate(run_ranks(world, uneven_parts, hosts)):
        assert sums == [number * (number + 1) for number in range(world)]
        assert mine == [float(sum(range(world)) + rank * world)] * (rank + 1)
        assert everyone == ["x" * number for number in range(world)] and given == ["abcde"[rank]]


def out_of_order_on(hosts: str, seed: int) -> None:
    os.environ[HOST_VARIABLE] = hosts[dist.get_rank()]
    out_of_order(seed)


@pytest.mark.parametrize("hosts", [EVEN, UNEVEN, MIXED, "abcd"])
def test_overlapping_groups_complete_in_any_order(hosts: str) -> None:
    run_ranks(4, out_of_order_on, hosts, 3)


def message_while_owing(hosts: str) -> float:
    """Rank 0 waits for a message from another host, that is sent after a collective that needs rank 0."""
    group, inside = over(hosts), dist.new_group([0, 1, 2])
    rank, tensor = dist.get_rank(), torch.ones(collectives.SERIAL // 2)
    if rank < 3:
        time.sleep(rank % 2)  # rank 0 waits before it can sum its part
        work = dist.all_reduce(tensor, group=inside, async_op=True)
        if rank == 1:
            work.wait()
            dist.send(torch.ones(1), 3, group=group)
        if rank == 0:
            dist.recv(torch.zeros(1), 3, group=group)
        work.wait()
    else:
        dist.recv(torch.zeros(1), 1, group=group)
        dist.send(torch.ones(1), 0, group=group)
    return float(tensor[0])


def test_a_rank_that_waits_for_a_message_from_another_host_serves_its_own_host() -> None:
    """Their all-reduce is so large that each of the three sums a part."""
    assert run_ranks(4, message_while_owing, UNEVEN, timeout=20) == [3.0, 3.0, 3.0, 1.0]


def any_source(hosts: str) -> str:
    try:
        dist.recv(torch.zeros(1), group=over(hosts))
    except RuntimeError as error:
        return str(error)
    return ""


def test_any_source_is_refused() -> None:
    assert all("name the source" in told for told in run_ranks(3, any_source, "aab"))


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
@pytest.mark.parametrize(("hosts", "dying"), [(EVEN, 3), (UNEVEN, 3), (UNEVEN, 2)])
def test_a_dead_peer_is_noticed_on_every_host_within_a_second(hosts: str, dying: int, how: str) -> None:
    """The pool gives survivors a second to tell; on a machine that is overloaded, not all get to run in it."""
    for _ in range(3):
        with pytest.raises(RanksFailed) as failed:
            run_ranks(4, left_alone, hosts, how, dying)
        first, *others = failed.value.failures
        assert first.rank == dying and first.kind == "SIGKILL"
        assert all(one.is_victim for one in others), others
        if len(others) == 3:
            return
    pytest.fail(f"only {[one.rank for one in others]} noticed within a second")


def survives(hosts: str) -> tuple[str, float]:
    """Rank 3 leaves; what the others are told, and after how many seconds. Nobody ends."""
    group = over(hosts)
    dist.all_reduce(torch.ones(1), group=group)
    began = time.monotonic()
    told = ""
    if dist.get_rank() == 3:
        group.abort()
    else:
        try:
            dist.all_reduce(torch.ones(100_000), group=group)
        except RuntimeError as error:
            told = str(error)
    elapsed = time.monotonic() - began
    dist.barrier()
    return told, elapsed


@pytest.mark.parametrize("hosts", [EVEN, UNEVEN])
def test_the_loss_of_a_rank_is_passed_on_between_hosts(hosts: str) -> None:
    """Some ranks wait for none that is lost, but for one that will not go on."""
    for told, seconds in run_ranks(4, survives, hosts, fresh=True)[:3]:
        assert told and seconds < 5, (told, seconds)


def waits_in_vain(hosts: str) -> tuple[str, str]:
    group = over(hosts, timeout=timedelta(seconds=0.5))
    told = ["", ""]
    if dist.get_rank() == 0:
        waits = (lambda: dist.barrier(group=group), lambda: dist.recv(torch.ones(1), 3, group))
        for number, wait in enumerate(waits):
            try:
                wait()
            except RuntimeError as error:
                told[number] = str(error)
    dist.barrier()
    return told[0], told[1]


def test_the_timeout_of_a_group() -> None:
    collective, message = run_ranks(4, waits_in_vain, EVEN, fresh=True)[0]
    assert "Timed out waiting 500ms for barrier of 0 bytes over several hosts" in collective
    assert "Timed out" in message or "timed out" in message or "Connection" in message, message


def differ(hosts: str) -> str:
    group = over(hosts)
    try:
        dist.all_reduce(torch.ones(10 if dist.get_rank() in (0, 2) else 11), group=group)
    except RuntimeError as error:
        return str(error)
    return ""


def test_collectives_that_do_not_match_on_a_host_are_refused() -> None:
    told = run_ranks(4, differ, EVEN, fresh=True)
    assert "rank 3 of the group issued all_reduce of 44 bytes" in told[3] and "rank 2 all_reduce of 40 bytes" in told[3]


def sent_between_hosts(hosts: str, numel: int, dtype: torch.dtype) -> int:
    group = over(hosts)
    tensor = torch.ones(numel, dtype=dtype)
    dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, torch.full_like(tensor, float(len(hosts))))
    return group.num_bytes_between_hosts


def test_the_bytes_between_hosts_are_a_lanes_share() -> None:
    """2 (H - 1) / H / L of the tensor for each lane; 16-bit sums go as fp32."""
    size = 2**24
    assert run_ranks(4, sent_between_hosts, EVEN, size // 4, torch.float32) == [size // 2] * 4
    assert run_ranks(4, sent_between_hosts, UNEVEN, size // 4, torch.float32) == [size, 0, 0, size]
    assert run_ranks(4, sent_between_hosts, EVEN, size // 4, torch.bfloat16) == [size // 4 * 3 // 2] * 4


def waits_of_a_message(hosts: str) -> list[bool]:
    """Whether each wait that is timed was for a message: of one message from the first host to the other."""
    group, rank, heard = over(hosts), dist.get_rank(), []
    dist.barrier(group=group)
    with torch_private.timed_waits(lambda is_message, began, ended: heard.append(is_message)):
        if rank in (0, 2):
            message = (dist.isend if rank == 0 else dist.irecv)(torch.ones(10), 2 - rank, group=group)
            assert message is not None
            message.wait()
    return heard


def test_the_wait_for_a_message_from_another_host_is_timed_once() -> None:
    """gloo's own wait, inside ours, would count the same seconds again."""
    assert run_ranks(4, waits_of_a_message, EVEN) == [[True], [], [True], []]
