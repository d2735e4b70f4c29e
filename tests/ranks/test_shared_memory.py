"""The backend `shm` does what gloo does: every operation and dtype, alone, overlapping, out of order and at the end."""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallelrun import shared_memory
from parallelrun.shared_memory import channel, collectives, messages
from tests.pool import RanksFailed, run_ranks

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64,
)  # fmt: skip
SIZES = (0, 1, 7, 1000, 30_011)  # on both sides of `collectives.SMALL`
SUM, MAX, MIN, PRODUCT = dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT
Operation = Callable[..., list[Tensor]]


def part(dtype: torch.dtype, numel: int, rank: int, part_number: int = 0) -> Tensor:
    """Whole numbers, whose sums are exact in every dtype."""
    made = torch.Generator().manual_seed(1000 * rank + part_number)
    return torch.randint(1, 4, (numel,), generator=made).to(dtype)


def all_reduce(group: Any, dtype: torch.dtype, numel: int, op: Any = SUM) -> list[Tensor]:
    tensor = part(dtype, numel, dist.get_rank())
    dist.all_reduce(tensor, op, group=group)
    return [tensor]


def reduce(group: Any, dtype: torch.dtype, numel: int, root: int) -> list[Tensor]:
    tensor = part(dtype, numel, dist.get_rank())
    dist.reduce(tensor, root, group=group)
    return [tensor] if dist.get_rank() == root else []


def broadcast(group: Any, dtype: torch.dtype, numel: int, root: int) -> list[Tensor]:
    tensor = part(dtype, numel, dist.get_rank())
    dist.broadcast(tensor, root, group=group)
    return [tensor]


def all_gather(group: Any, dtype: torch.dtype, numel: int) -> list[Tensor]:
    world = dist.get_world_size()
    outputs = [torch.zeros(numel, dtype=dtype) for _ in range(world)]
    dist.all_gather(outputs, part(dtype, numel, dist.get_rank()), group=group)
    whole = torch.zeros(world * numel, dtype=dtype)
    dist.all_gather_into_tensor(whole, part(dtype, numel, dist.get_rank()), group=group)
    return [*outputs, whole]


def reduce_scatter(group: Any, dtype: torch.dtype, numel: int) -> list[Tensor]:
    world, rank = dist.get_world_size(), dist.get_rank()
    output, whole = torch.zeros(numel, dtype=dtype), torch.zeros(numel, dtype=dtype)
    dist.reduce_scatter(output, [part(dtype, numel, rank, n) for n in range(world)], group=group)
    dist.reduce_scatter_tensor(whole, part(dtype, world * numel, rank), group=group)
    return [output, whole]


def all_to_all(group: Any, dtype: torch.dtype, numel: int) -> list[Tensor]:
    """Equal parts, uneven parts, and some that are empty."""
    world, rank = dist.get_world_size(), dist.get_rank()
    equal = torch.zeros(world * numel, dtype=dtype)
    dist.all_to_all_single(equal, part(dtype, world * numel, rank), group=group)
    leaving = [(rank * number) % 3 * numel for number in range(world)]
    arriving = [(rank * number) % 3 * numel for number in range(world)]
    uneven = torch.zeros(sum(arriving), dtype=dtype)
    dist.all_to_all_single(uneven, part(dtype, sum(leaving), rank), arriving, leaving, group=group)
    return [equal, uneven]


def gather(group: Any, dtype: torch.dtype, numel: int, root: int) -> list[Tensor]:
    is_root = dist.get_rank() == root
    outputs = [torch.zeros(numel, dtype=dtype) for _ in range(dist.get_world_size())] if is_root else []
    dist.gather(part(dtype, numel, dist.get_rank()), outputs or None, dst=root, group=group)
    return outputs


def scatter(group: Any, dtype: torch.dtype, numel: int, root: int) -> list[Tensor]:
    output = torch.zeros(numel, dtype=dtype)
    parts = [part(dtype, numel, root, n) for n in range(dist.get_world_size())] if dist.get_rank() == root else None
    dist.scatter(output, parts, src=root, group=group)
    return [output]


def messages_around(group: Any, dtype: torch.dtype, numel: int) -> list[Tensor]:
    world, rank = dist.get_world_size(), dist.get_rank()
    received = torch.zeros(numel, dtype=dtype)
    batch = [
        dist.P2POp(dist.isend, part(dtype, numel, rank), (rank + 1) % world, group),
        dist.P2POp(dist.irecv, received, (rank - 1) % world, group),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    return [received]


def strided(group: Any, dtype: torch.dtype, numel: int) -> list[Tensor]:
    """Tensors that are not contiguous are reduced, broadcast and gathered in place."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tensors = [part(dtype, 2 * numel, rank).view(-1, 2).t() for _ in range(3)]
    dist.all_reduce(tensors[0], group=group)
    dist.broadcast(tensors[1], world - 1, group=group)
    return [one.contiguous() for one in tensors]


def without_strides(group: Any, dtype: torch.dtype, numel: int) -> list[Tensor]:
    """The same for gloo, which refuses them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tensors = [part(dtype, 2 * numel, rank).view(-1, 2).t().contiguous() for _ in range(3)]
    dist.all_reduce(tensors[0], group=group)
    dist.broadcast(tensors[1], world - 1, group=group)
    return tensors


OPERATIONS: dict[str, tuple[Operation, tuple[Any, ...]]] = {
    "all_reduce sum": (all_reduce, (SUM,)),
    "all_reduce max": (all_reduce, (MAX,)),
    "all_reduce min": (all_reduce, (MIN,)),
    "all_reduce product": (all_reduce, (PRODUCT,)),
    "reduce": (reduce, (1,)),
    "reduce to the last": (reduce, (2,)),
    "broadcast": (broadcast, (1,)),
    "all_gather": (all_gather, ()),
    "reduce_scatter": (reduce_scatter, ()),
    "all_to_all": (all_to_all, ()),
    "gather": (gather, (1,)),
    "scatter": (scatter, (1,)),
    "messages": (messages_around, ()),
    "strided": (strided, ()),
}


def beside_gloo(name: str) -> list[str]:
    """The cases in which shared memory gives something else than gloo."""
    operation, arguments = OPERATIONS[name]
    assert shared_memory.is_shared(dist.group.WORLD)
    gloo, found = dist.new_group(backend="gloo"), []
    for dtype in DTYPES:
        for numel in SIZES:
            mine = operation(None, dtype, numel, *arguments)
            reference = without_strides if operation is strided else operation
            theirs = reference(gloo, dtype, numel, *arguments)
            if len(mine) != len(theirs) or not all(map(torch.equal, mine, theirs)):
                found.append(f"{dtype} {numel}")
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_and_dtype_equals_gloo_bit_for_bit(name: str, world: int) -> None:
    if world == 2 and name == "reduce to the last":
        return
    assert run_ranks(world, beside_gloo, name) == [[]] * world


def bitwise(dtype: torch.dtype) -> list[Tensor]:
    found = []
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        found += all_reduce(None, dtype, 1000, op)
    mask = part(torch.int32, 10, dist.get_rank()) > 2
    dist.all_reduce(mask, MAX)
    mean = part(torch.float32, 10, dist.get_rank())
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    numbers = torch.complex(torch.ones(3), torch.full((3,), float(dist.get_rank())))
    dist.all_reduce(numbers)
    return [*found, mask, mean, numbers]


def test_the_other_reductions() -> None:
    world = 3
    parts = [part(torch.int32, 1000, rank) for rank in range(world)]
    for band, bor, bxor, mask, mean, numbers in run_ranks(world, bitwise, torch.int32):
        assert torch.equal(band, parts[0] & parts[1] & parts[2])
        assert torch.equal(bor, parts[0] | parts[1] | parts[2])
        assert torch.equal(bxor, parts[0] ^ parts[1] ^ parts[2])
        assert torch.equal(mask, torch.stack([part(torch.int32, 10, rank) for rank in range(world)]).amax(0) > 2)
        expected = torch.stack([part(torch.float32, 10, rank) for rank in range(world)]).mean(0)
        assert torch.allclose(mean, expected) and torch.equal(numbers, torch.full((3,), 3 + 3j))


def random_sums(numel: int, dtype: torch.dtype) -> list[Tensor]:
    rank, world = dist.get_rank(), dist.get_world_size()
    numbers = torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)
    summed, mine = numbers.clone(), torch.zeros(numel // world, dtype=dtype)
    dist.all_reduce(summed)
    dist.reduce_scatter_tensor(mine, numbers)
    return [numbers, summed, mine]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [20, 40_000])
def test_sums_are_in_rank_order_and_equal_on_every_rank(numel: int, dtype: torch.dtype) -> None:
    results = run_ranks(4, random_sums, numel, dtype)
    total = results[0][0].float()
    for numbers, _, _ in results[1:]:
        total = total + numbers  # in the order of the ranks, in fp32
    for rank, (_, summed, mine) in enumerate(results):
        assert torch.equal(summed, total.to(dtype))
        assert torch.equal(mine, total.to(dtype).chunk(4)[rank])


def uneven_and_objects() -> tuple[list[int], Any, Any, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    outputs = [torch.zeros(number + 1) for number in range(world)]
    dist.all_gather(outputs, torch.full((rank + 1,), float(rank)))
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, {"rank": rank, "text": "x" * rank})
    said = [{"from": rank}]
    dist.broadcast_object_list(said, src=1)
    gathered: list[Any] | None = [None] * world if rank == 0 else None
    dist.gather_object(rank, gathered, dst=0)
    given: list[Any] = [None]
    dist.scatter_object_list(given, list("abcd")[:world] if rank == 0 else None, src=0)
    return [int(one.sum()) for one in outputs], everyone, (said, gathered), given


def test_uneven_gathers_and_python_objects() -> None:
    for rank, (sums, everyone, (said, gathered), given) in enumerate(run_ranks(3, uneven_and_objects)):
        assert sums == [0, 2, 6] and everyone == [{"rank": n, "text": "x" * n} for n in range(3)]
        assert said == [{"from": 1}] and gathered == ([0, 1, 2] if rank == 0 else None) and given == ["abc"[rank]]


def out_of_order(seed: int) -> None:
    """Groups that overlap; what is issued is waited for in another order on every rank, or not at all."""
    rank = dist.get_rank()
    groups = [dist.new_group(list(ranks)) for ranks in ((0, 1), (1, 2, 3), (0, 2), (0, 1, 2, 3))]
    ranks_of = [dist.get_process_group_ranks(one) if one != dist.GroupMember.NON_GROUP_MEMBER else [] for one in groups]
    order, local = random.Random(seed), random.Random(seed + rank)
    pending: list[tuple[Any, Tensor, float]] = []
    for number in range(200):
        which, numel = order.randrange(4), order.choice([1, 100, 20_000])
        if rank in ranks_of[which]:
            tensor = torch.full((numel,), float(rank + number))
            work = dist.all_reduce(tensor, group=groups[which], async_op=True)
            pending.append((work, tensor, float(sum(ranks_of[which]) + number * len(ranks_of[which]))))
        if pending and local.random() < 0.3:
            work, tensor, expected = pending.pop(local.randrange(len(pending)))
            work.wait()
            assert torch.equal(tensor, torch.full_like(tensor, expected)), (number, tensor[0], expected)
    local.shuffle(pending)
    for work, tensor, expected in pending[: len(pending) // 2]:
        work.wait()
        assert torch.equal(tensor, torch.full_like(tensor, expected))
    dist.barrier()
    shared_memory.finish()
    for work, tensor, expected in pending[len(pending) // 2 :]:
        assert work.is_completed() and work.is_success() and torch.equal(tensor, torch.full_like(tensor, expected))


@pytest.mark.parametrize("seed", range(3))
def test_overlapping_groups_complete_in_any_order(seed: int) -> None:
    run_ranks(4, out_of_order, seed)


def never_waited() -> float:
    """Rank 0 issues what the others need in two phases, waits for none of it, and blocks in a collective elsewhere."""
    rank, other = dist.get_rank(), dist.new_group([0, 1, 2])
    tensor = torch.ones(50_000)
    work = dist.all_reduce(tensor, group=other, async_op=True)
    if rank:
        work.wait()
    dist.barrier()
    return float(tensor.sum())


def test_what_nobody_waits_for_completes_while_its_rank_waits_elsewhere() -> None:
    assert run_ranks(3, never_waited)[1:] == [150_000.0] * 2


def destroyed_before_its_end() -> float:
    tensor = torch.ones(50_000)
    work = dist.all_reduce(tensor, async_op=True)
    if dist.get_rank():
        time.sleep(0.2)
        work.wait()
    dist.destroy_process_group()
    return float(tensor.sum())


def test_what_nobody_waits_for_completes_before_its_group_is_destroyed() -> None:
    assert run_ranks(3, destroyed_before_its_end, fresh=True) == [150_000.0] * 3


def by_threads() -> list[str]:
    """Three threads per rank, each with a group of its own, in collectives and messages."""
    rank, groups, errors = dist.get_rank(), [dist.new_group() for _ in range(3)], []

    def use(number: int) -> None:
        try:
            for turn in range(60):
                tensor = torch.full((5000,), float(rank + turn))
                dist.all_reduce(tensor, group=groups[number])
                assert torch.equal(tensor, torch.full_like(tensor, 1.0 + 2 * turn)), (number, turn)
                sent = dist.isend(torch.full((10,), float(turn)), 1 - rank, group=groups[number], tag=number)
                received = torch.zeros(10)
                dist.recv(received, 1 - rank, group=groups[number], tag=number)
                sent.wait()
                assert (received == turn).all()
        except Exception as error:
            errors.append(repr(error))

    threads = [threading.Thread(target=use, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_threads_wait_at_the_same_time() -> None:
    assert run_ranks(2, by_threads) == [[], []]


def tagged() -> None:
    """More messages than a ring holds, received by another tag first, from any rank, and before they are sent."""
    rank, num = dist.get_rank(), 3 * messages._SLOTS
    if rank == 0:
        works = [dist.isend(torch.full((4,), float(number)), 1, tag=1) for number in range(num)]
        works += [dist.isend(torch.full((4,), -1.0), 1, tag=2)]
        for work in works:
            work.wait()
    if rank == 1:
        late = torch.zeros(4)
        dist.recv(late, 0, tag=2)
        assert (late == -1).all()
        for number in range(num):
            dist.recv(late, 0, tag=1)
            assert (late == number).all(), (number, late)
    dist.barrier()
    if rank:
        dist.send(torch.full((2,), float(rank)), 0, tag=7)
    else:
        buffer, seen = torch.zeros(2), []
        for _ in range(2):
            source = dist.recv(buffer, tag=7)
            assert int(buffer[0]) == source
            seen.append(source)
        assert sorted(seen) == [1, 2]
    posted = [torch.zeros(3) for _ in range(3 * messages._SLOTS)]
    if rank == 0:
        works = [dist.irecv(one, 1) for one in posted]
        dist.barrier()
        for number, work in enumerate(works):
            work.wait()
            assert (posted[number] == number).all(), number
    else:
        dist.barrier()
        for number in range(len(posted) if rank == 1 else 0):
            dist.send(torch.full((3,), float(number)), 0)


def test_messages_match_by_sender_and_tag_in_order() -> None:
    run_ranks(3, tagged)


def many_at_once() -> None:
    """More collectives under way than the ring of descriptors has slots; roots that run ahead."""
    tensors = [torch.full((3,), float(number)) for number in range(5 * channel._SLOTS)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for number, (work, tensor) in enumerate(zip(works, tensors)):
        work.wait()
        assert (tensor == number * dist.get_world_size()).all()
    for number in range(3 * channel._SLOTS):
        tensor = torch.full((3,), float(number)) if dist.get_rank() == 0 else torch.zeros(3)
        dist.broadcast(tensor, 0)
        assert (tensor == number).all()


def test_more_operations_than_the_rings_hold() -> None:
    run_ranks(3, many_at_once)


def left_alone(how: str) -> tuple[str, float]:
    """Rank 1 dies; how the others are told, and after how many seconds."""
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        if how == "leaves":
            dist.group.WORLD.shutdown()
            time.sleep(3)
            return "", 0.0
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        if how == "in a message" and dist.get_rank() == 0:
            dist.recv(torch.zeros(2), 1)
        else:
            dist.all_reduce(torch.ones(100_000))
    except RuntimeError as error:
        time.sleep(0.1)
        print(f"told after {time.monotonic() - began:.1f}: {error}")
        if how == "leaves":
            return str(error), time.monotonic() - began
        raise
    return "", 0.0


@pytest.mark.parametrize("how", ["in a collective", "in a message"])
def test_a_dead_peer_is_noticed_at_once_and_the_survivors_are_victims(how: str, capfd: Any) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(3, left_alone, how)
    first, *others = failed.value.failures
    assert first.rank == 1 and first.kind == "SIGKILL"
    assert others and all("Connection closed by peer" in one.message and one.is_victim for one in others)
    assert max(float(line.split()[4].rstrip(":")) for line in capfd.readouterr().out.splitlines() if "told" in line) < 1


def test_a_peer_that_has_left_the_group_is_missed() -> None:
    for message, seconds in run_ranks(3, left_alone, "leaves")[::2]:
        assert "Connection closed by peer" in message and seconds < 2


def waits_in_vain() -> str:
    group = dist.new_group(timeout=torch.distributed.constants.timedelta(seconds=0.3))
    if dist.get_rank() == 0:
        try:
            dist.barrier(group=group)
        except RuntimeError as error:
            return str(error)
        finally:
            dist.barrier()
        return ""
    dist.barrier()
    return ""


def test_the_timeout_of_a_group() -> None:
    told = run_ranks(2, waits_in_vain)[0]
    assert "Timed out waiting 300ms for barrier" in told


def differ(how: str) -> str:
    rank = dist.get_rank()
    try:
        if how == "bytes":
            dist.all_reduce(torch.ones(10 + rank))
        elif rank == 0:
            dist.all_reduce(torch.ones(10))
        else:
            dist.broadcast(torch.ones(10), 0)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("how", ["bytes", "operation"])
def test_collectives_that_do_not_match_are_refused(how: str) -> None:
    told = run_ranks(2, differ, how, fresh=True)[1]
    assert "rank 1 of the group issued" in told and "rank 0 all_reduce of 40 bytes" in told


def on_hosts(name: str) -> tuple[bool, bool, float]:
    os.environ["PARALLELRUN_TEST_HOST"] = name if dist.get_rank() == 0 else ""
    everyone, pair = dist.new_group(), dist.new_group([1, 2])
    tensor = torch.ones(10)
    dist.all_reduce(tensor, group=everyone)
    return shared_memory.is_shared(everyone), shared_memory.is_shared(pair), float(tensor.sum())


def test_a_group_over_several_hosts_uses_gloo_and_one_within_a_host_does_not() -> None:
    assert run_ranks(3, on_hosts, "elsewhere")[1:] == [(False, True, 30.0)] * 2
    assert run_ranks(3, on_hosts, "")[1:] == [(True, True, 30.0)] * 2


def without_memory(how: str) -> tuple[bool, float, str]:
    """Rank 1 cannot have the memory that a group or a collective needs."""
    from parallelrun.shared_memory import arena, engine

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    if dist.get_rank() == 1 and how == "of the group":
        engine.current().process.arena.allocate = refuse
    group = dist.new_group()
    if dist.get_rank() == 1 and how == "of a collective":
        arena.os = SimpleNamespace(posix_fallocate=refuse)
    tensor = torch.ones(1_000_000)
    try:
        dist.all_reduce(tensor, group=group)
    except Exception as error:
        return shared_memory.is_shared(group), 0.0, f"{type(error).__name__} {getattr(error, 'exit_code', '')}: {error}"
    return shared_memory.is_shared(group), float(tensor.sum()), ""


def test_a_group_without_memory_uses_gloo_on_every_rank() -> None:
    assert run_ranks(2, without_memory, "of the group", fresh=True) == [(False, 2e6, "")] * 2


def test_a_collective_without_memory_is_a_clear_error() -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, without_memory_raised, fresh=True)
    first = failed.value.failures[0]
    assert (
        first.rank == 1 and first.kind == "EnvironmentProblem" and "no shared memory for a collective" in first.message
    )
    assert first.exception is None or getattr(first.exception, "exit_code", 3) == 3


def without_memory_raised() -> None:
    told = without_memory("of a collective")[2]
    if dist.get_rank() == 1:
        from parallelrun.errors import EnvironmentProblem

        assert told.startswith("EnvironmentProblem 3"), told
        raise EnvironmentProblem(told)


def idle(seconds: float) -> float:
    """CPU seconds of a rank while all others wait for rank 0, which sleeps."""
    dist.barrier()
    began = sum(os.times()[:2])
    if dist.get_rank() == 0:
        time.sleep(seconds)
    dist.all_reduce(torch.ones(10))
    return sum(os.times()[:2]) - began


def test_waiting_ranks_do_not_burn_cores() -> None:
    assert sum(run_ranks(16, idle, 2.0)) < 1.0  # of 32 seconds of waiting


def over_many() -> int:
    world = dist.get_world_size()
    for number in range(20):
        tensor = torch.full((3000,), float(number))
        dist.all_reduce(tensor)
        assert (tensor == number * world).all()
    return world


def test_32_ranks() -> None:
    assert run_ranks(32, over_many, timeout=120) == [32] * 32


def test_no_name_is_left_or_ever_made() -> None:
    before = set(os.listdir("/dev/shm"))
    run_ranks(2, over_many)
    assert not {one for one in set(os.listdir("/dev/shm")) - before if "parallelrun" in one}
    assert SIZES[-2] * 8 < collectives.SMALL < SIZES[-1] * 2  # bytes: the sizes are on both sides of it
