"""All-reduce written out: the sum, the same bits everywhere, in order, counted to the byte and by link."""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallelrun.distributed import torch_private
from parallelrun.distributed.comm.counter import CommunicationCounter
from parallelrun.distributed.mesh import Group, build_mesh
from parallelrun.distributed.sequences import Lane
from parallelrun.strategies.data.common.allreduce import runtime
from parallelrun.strategies.data.common.allreduce.algorithm import Algorithm, NativeAllReduce
from parallelrun.strategies.data.common.allreduce.rings import HierarchicalAllReduce, RingAllReduce
from parallelrun.strategies.data.common.allreduce.trees import HalvingDoubling, TreeAllReduce
from tests.plans import tiny_plan
from tests.pool import RanksFailed, run_ranks

RING, HALVING_DOUBLING = RingAllReduce(), HalvingDoubling()
NUMELS = (0, 1, 2, 5, 7, 64, 203)  # none, fewer than ranks, uneven
CASES = {
    2: (RING, HALVING_DOUBLING),
    3: (RING, HALVING_DOUBLING),
    5: (RING, HALVING_DOUBLING, TreeAllReduce()),
    6: (HALVING_DOUBLING, HierarchicalAllReduce(2), HierarchicalAllReduce(3)),
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
BOUND = {torch.float64: 1e-15, torch.float32: 1e-6, torch.bfloat16: 3e-2}  # relative to the largest sum


def world_group() -> Group:
    world, rank = dist.get_world_size(), dist.get_rank()
    return Group("dp", tuple(range(world)), rank, dist.group.WORLD)


def all_reduce(tensor: Tensor, group: Group, algorithm: Algorithm, async_op: bool = False) -> Any:
    """The runtime's all-reduce by the rounds of an algorithm."""
    rounds = algorithm.rounds(group.size, group.index, tensor.numel())
    started = runtime.all_reduce(tensor, group, "gradients", rounds)
    return started if async_op else started.wait()


def mine(index: int, numel: int, dtype: torch.dtype) -> Tensor:
    """What that member gives to the sum."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(index), dtype=torch.float64).to(dtype)


def sums(algorithms: tuple[Algorithm, ...]) -> list[list[Tensor]]:
    """Per algorithm the sums of every dtype and size."""
    group = world_group()
    found = []
    for algorithm in algorithms:
        found.append([mine(group.index, numel, dtype) for dtype in DTYPES for numel in NUMELS])
        for tensor in found[-1]:
            all_reduce(tensor, group, algorithm)
    return found


@pytest.mark.parametrize("world", CASES)
def test_every_rank_ends_with_the_same_bits_of_the_sum(world):
    results = run_ranks(world, sums, CASES[world])
    for number in range(len(CASES[world])):
        cells = [(dtype, numel) for dtype in DTYPES for numel in NUMELS]
        for cell, (dtype, numel) in enumerate(cells):
            expected = sum(mine(index, numel, dtype).double() for index in range(world))
            copies = [result[number][cell] for result in results]
            assert all(torch.equal(copy, copies[0]) for copy in copies)
            error = (copies[0].double() - expected).abs().max() if numel else 0.0
            assert error <= BOUND[dtype] * world * 3, (dtype, numel)


def wire(algorithm: Algorithm, numel: int) -> tuple[list, dict[tuple[int, int], int], list]:
    """(rows counted, bytes by link as sent from here, rows predicted) of one asynchronous fp64 all-reduce."""
    world = dist.get_world_size()
    mesh = build_mesh(tiny_plan(dp=world, global_batch=4 * world), torch.device("cpu"))
    group, sent = mesh.group("dp"), Counter()

    def note(lane: Lane, what: str) -> None:
        if lane.ranks[0] == mesh.rank:
            sent[lane.ranks] += int(what.partition("(")[2].split()[0])

    tensor = torch.zeros(numel, dtype=torch.float64)
    with CommunicationCounter(mesh, note) as counter:
        all_reduce(tensor, group, algorithm, async_op=True).wait()
    predicted = algorithm.collectives(world, group.index, numel, 8)
    return counter.rows(), dict(sent), predicted


@pytest.mark.parametrize(
    ("world", "algorithm", "numel"),
    [
        (3, RING, 1000),
        (4, RING, 2),
        (5, HALVING_DOUBLING, 1003),
        (4, HierarchicalAllReduce(2), 1003),
    ],
    ids=str,
)
def test_every_rank_and_link_carries_what_is_foretold(world, algorithm, numel):
    """The messages are sent by another thread than the one that counts: they are counted all the same."""
    links = {}
    for counted, sent, predicted in run_ranks(world, wire, algorithm, numel):
        assert {row for row in counted if row.calls} == {row for row in predicted if row.calls}
        links.update(sent)
    expected = Counter()
    for index in range(world):
        for step in algorithm.rounds(world, index, numel):
            if step.send:
                expected[index, step.send.peer] += 8 * step.send.numel
    assert links == expected


def several_at_once() -> tuple[list[float], list[float]]:
    group = world_group()
    tensors = [torch.full((3000,), float(number + group.index)) for number in range(6)]
    algorithms = [RING, HALVING_DOUBLING, NativeAllReduce()] * 2
    works = [all_reduce(t, group, algorithm, async_op=True) for t, algorithm in zip(tensors, algorithms)]
    for work in reversed(works):
        work.wait()
    return [float(t.min()) for t in tensors], [float(t.max()) for t in tensors]


def test_what_is_started_together_does_not_mix():
    expected = [3.0 * number + 3.0 for number in range(6)]
    assert run_ranks(3, several_at_once) == [(expected, expected)] * 3


def waits(delay_s: float) -> list[tuple[bool, float]]:
    """What the step's clock hears of one all-reduce for which rank 1 comes late."""
    group = world_group()
    heard: list[tuple[bool, float]] = []
    if group.index == 1:
        time.sleep(delay_s)
    with torch_private.timed_waits(lambda is_message, began, ended: heard.append((is_message, ended - began))):
        all_reduce(torch.zeros(3000), group, RING, async_op=True).wait()
    return heard


def test_the_clock_hears_of_the_wait_and_not_of_the_threads_own():
    first = run_ranks(2, waits, 0.3)[0]
    assert len(first) == 1 and not first[0][0] and first[0][1] > 0.15


def with_a_dying_peer() -> None:
    group = world_group()
    all_reduce(torch.zeros(10), group, RING)  # all are connected
    work: Any = None
    if group.index != 1:
        work = all_reduce(torch.zeros(3000), group, RING, async_op=True)
        work.wait()
    os._exit(9)


def test_a_dead_peer_is_an_error_of_the_wait_not_a_hang():
    with pytest.raises(RanksFailed) as failed:
        run_ranks(3, with_a_dying_peer, timeout=30)
    kinds = {failure.rank: failure.kind for failure in failed.value.failures}
    assert kinds[1] == "exit 9" and kinds[0] == kinds[2] == "RuntimeError", kinds


def with_a_fault(fault: str) -> Tensor:
    """The sum of 100 ones, with something wrong on every rank."""
    if fault == "copied instead of added":
        runtime.SCATTER_REDUCE = "never"
    if fault == "one round short":
        all_rounds = RingAllReduce.rounds
        RingAllReduce.rounds = lambda self, *arguments: all_rounds(self, *arguments)[:-1]
    if fault == "not waited for":
        right = runtime.run_rounds
        runtime.run_rounds = lambda *arguments: (time.sleep(0.2), right(*arguments))[1]
        runtime.SumOnThread.wait = lambda self: None
    tensor = torch.ones(100)
    all_reduce(tensor, world_group(), RING)
    result = tensor.clone()
    dist.barrier()
    return result


@pytest.mark.parametrize("fault", ["none", "copied instead of added", "one round short", "not waited for"])
def test_planted_bugs_show_in_the_sum(fault):
    results = run_ranks(3, with_a_fault, fault)
    right = all(torch.equal(result, torch.full((100,), 3.0)) for result in results)
    assert right == (fault == "none")
