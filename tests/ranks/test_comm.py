"""Our collectives: values, parts along any dim, and what the counter sees of them and of torch's engines."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from parallelrun.distributed import comm, torch_private
from parallelrun.distributed.comm import gather_json
from parallelrun.distributed.comm.counter import CommunicationCounter
from parallelrun.distributed.mesh import Group, Mesh, build_mesh
from parallelrun.planner.contract.collective import Collective
from tests.plans import tiny_plan
from tests.pool import run_ranks


def mesh_of(**degrees: int) -> Mesh:
    return build_mesh(tiny_plan(**degrees), torch.device("cpu"))


def gather_and_scatter() -> list[torch.Tensor]:
    mesh = mesh_of(dp=2, tp=2)
    group = mesh.group("tp")
    mine = torch.arange(12.0).view(2, 3, 2) + 100 * group.index
    whole = comm.all_gather(mine, group, "test", dim=1)
    back = comm.reduce_scatter(whole, group, "test", dim=1)
    return [whole, back - 2 * mine]


def test_gather_concatenates_along_the_dim_and_scatter_sums_and_cuts_it() -> None:
    whole, difference = run_ranks(4, gather_and_scatter)[3]
    part = torch.arange(12.0).view(2, 3, 2)
    assert torch.equal(whole, torch.cat((part, part + 100), dim=1))
    assert not difference.any()


def sums_of_low_precision() -> list[float]:
    group = mesh_of(dp=4).group("dp")
    first = 256.0 if group.index == 0 else 1.0  # in bf16 256 + 1 is 256
    mine = torch.empty(1, dtype=torch.bfloat16)
    work = comm.reduce_scatter_into(mine, torch.full((4,), first, dtype=torch.bfloat16), group, "test", async_op=True)
    work.wait()
    return mine.tolist()


def test_parts_of_low_precision_are_summed_wide_and_rounded_once() -> None:
    assert run_ranks(4, sums_of_low_precision) == [[260.0]] * 4  # 259, rounded to the nearest that bf16 has


def to_and_from_one_member() -> tuple[float, float, list[Collective]]:
    mesh = mesh_of(dp=2, tp=2)
    group = mesh.group("dp")
    told, summed = torch.full((3,), float(mesh.rank)), torch.full((3,), 10.0**mesh.rank)
    with CommunicationCounter(mesh) as counter:
        for work in (
            comm.broadcast(told, group, "test", source=1, async_op=True),
            comm.reduce(summed, group, "test", destination=1, async_op=True),
        ):
            assert work is not None
            work.wait()
    return told[0].item(), summed[0].item(), counter.rows()


def test_a_broadcast_comes_from_and_a_reduction_goes_to_a_member_of_the_group() -> None:
    results = run_ranks(4, to_and_from_one_member)  # groups over dp: ranks 0, 2 and 1, 3
    assert [told for told, _, _ in results] == [2, 3, 2, 3]
    assert [results[rank][1] for rank in (2, 3)] == [101.0, 1010.0]
    assert results[0][2] == [Collective("dp", "broadcast", "test", 1, 12), Collective("dp", "reduce", "test", 1, 12)]


def degree_one_sends_nothing() -> list[Collective]:
    mesh = mesh_of(tp=2)
    with CommunicationCounter(mesh) as counter:
        tensor = torch.ones(3)
        comm.all_reduce(tensor, mesh.group("dp"), "test")
        comm.all_gather(tensor, mesh.group("pp"), "test")
        comm.broadcast(tensor, mesh.group("pp"), "test")
        comm.reduce(tensor, mesh.group("pp"), "test")
    return counter.rows()


def test_an_axis_of_degree_one_has_no_communicator() -> None:
    assert run_ranks(2, degree_one_sends_nothing) == [[], []]


def counted() -> list[Collective]:
    mesh = mesh_of(dp=2)
    group = mesh.group("dp")
    with CommunicationCounter(mesh) as counter:
        comm.all_reduce(torch.ones(10), group, "gradients")
        comm.all_reduce(torch.ones(5), group, "gradients")
        comm.all_gather(torch.ones(4, dtype=torch.float64), group, "parameters")
        comm.reduce_scatter(torch.ones(6), group, "gradients")
        if mesh.rank == 0:
            [work.wait() for work in comm.exchange([(torch.ones(7), 1)], [], group, "activations")]
        else:
            [work.wait() for work in comm.exchange([], [(torch.ones(7), 0)], group, "activations")]
        layer = nn.parallel.DistributedDataParallel(nn.Linear(4, 4), process_group=group.process_group)
        layer(torch.ones(2, 4)).sum().backward()
    return counter.rows()


def counted_beside_others() -> tuple[list[Collective], list[int], list[str]]:
    """The rows of an outer counter, the calls that it and an inner one had seen before and after, and what is left."""
    mesh = mesh_of(dp=2)
    group, tensor = mesh.group("dp"), torch.ones(2)

    def elsewhere() -> None:
        comm.all_reduce(tensor, group, "other thread")

    def handed_over(modes: list[object]) -> None:
        with torch_private.dispatch_modes(modes):
            comm.all_reduce(tensor, group, "handed over")

    calls = []
    with CommunicationCounter(mesh) as outer:
        with torch.inference_mode():
            comm.all_reduce(torch.ones(2), group, "inference")
        with CommunicationCounter(mesh) as inner:
            comm.all_reduce(tensor, group, "both")
            modes = torch_private.current_dispatch_modes()
            assert modes == [outer, inner]
        for target, args in ((elsewhere, ()), (handed_over, (modes[:1],))):
            thread = threading.Thread(target=target, args=args)
            thread.start()
            thread.join()
        calls.append(sum(row.calls for row in inner.rows()))
    comm.all_reduce(tensor, group, "after")
    calls.append(sum(row.calls for row in outer.rows()))
    left = [str(mode) for mode in torch_private.current_dispatch_modes()]
    if torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "BackendSelect"):
        left.append("kernel")
    return outer.rows(), calls, left


def test_a_counter_sees_what_its_own_thread_issues_until_it_is_left() -> None:
    for rows, calls, left in run_ranks(2, counted_beside_others):
        assert [(row.purpose, row.calls) for row in rows] == [("both", 1), ("handed over", 1), ("inference", 1)]
        assert calls == [1, 3] and not left


class SumInBackward(torch.autograd.Function):
    """Its backward sums over a group, and runs another backward: autograd does that of many in a thread of its own."""

    @staticmethod
    def forward(ctx, tensor, group, depth, threads):
        ctx.rest = group, depth, threads
        return tensor * 1

    @staticmethod
    def backward(ctx, gradient):
        group, depth, threads = ctx.rest
        threads.add(threading.get_ident())
        comm.all_reduce(torch.ones(1), group, "backward")
        if depth > 1:
            with torch.enable_grad():
                backward_within_backward(group, depth - 1, threads)
        return gradient, None, None, None


def backward_within_backward(group: Group, depth: int, threads: set[int]) -> None:
    SumInBackward.apply(torch.ones(1, requires_grad=True), group, depth, threads).sum().backward()


def counted_in_autograds_threads() -> tuple[int, list[Collective]]:
    mesh, threads = mesh_of(dp=2), set()
    with CommunicationCounter(mesh) as counter:
        backward_within_backward(mesh.group("dp"), 70, threads)
    return len(threads), counter.rows()


def test_what_backward_issues_in_a_thread_of_autograd_is_counted() -> None:
    for num_threads, rows in run_ranks(2, counted_in_autograds_threads):
        assert num_threads > 1 and rows == [Collective("dp", "all_reduce", "backward", 70, 280)]


def test_payload_is_the_full_buffer_and_point_to_point_counts_at_the_sender() -> None:
    sender, receiver = run_ranks(2, counted)
    assert Collective("dp", "all_reduce", "gradients", 2, 60) in sender
    assert Collective("dp", "all_gather", "parameters", 1, 64) in sender
    assert Collective("dp", "reduce_scatter", "gradients", 1, 24) in sender
    assert Collective("dp", "send", "activations", 1, 28) in sender
    assert Collective("dp", "recv", "activations", 1, 0) in receiver


def test_an_engine_of_torch_is_seen_under_its_axis() -> None:
    engine = [row for row in run_ranks(2, counted)[0] if row.purpose == "engine" and row.operation == "all_reduce"]
    assert engine == [Collective("dp", "all_reduce", "engine", 1, 4 * (16 + 4))]


def wrong_world(overrides: dict[str, Any]) -> str:
    try:
        build_mesh(tiny_plan(overrides), torch.device("cpu"))
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"dp": 2}, "has 2 ranks, the world has 3"),
        ({"dp": 3, "strategy.data.kind": "ps", "global_batch": 12}, "has 3 ranks beside 1 server, the world has 3"),
    ],
)
def test_a_mesh_of_another_size_than_the_world_is_refused(overrides: dict[str, Any], told: str) -> None:
    assert all(told in said for said in run_ranks(3, wrong_world, overrides))


def exchange() -> list[dict]:
    return gather_json(
        {"rank": dist.get_rank(), "text": "é" * (3 * dist.get_rank() + 1)}, mesh_of(dp=3, global_batch=9)
    )


def test_json_of_different_lengths_reaches_every_rank() -> None:
    expected = [{"rank": rank, "text": "é" * (3 * rank + 1)} for rank in range(3)]
    assert run_ranks(3, exchange) == [expected] * 3
