"""Operations in shared memory overlap, end in any order, notice ended peers, and cost little while they wait."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from parallelrun.distributed import shared_memory
from parallelrun.distributed.shared_memory import channel, engine, messages
from tests.overlapping_groups import out_of_order
from tests.pool import RanksFailed, run_ranks


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
    """More messages than a ring holds, received by another tag first."""
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


def test_messages_match_by_sender_and_tag_in_order() -> None:
    run_ranks(2, tagged)


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


def left_by_rank_1() -> tuple[str, float]:
    """How the others are told that rank 1 has left the group, and after how many seconds."""
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        dist.group.WORLD.shutdown()
        time.sleep(3)
        return "", 0.0
    began = time.monotonic()
    try:
        dist.all_reduce(torch.ones(100_000))
    except RuntimeError as error:
        return str(error), time.monotonic() - began
    return "", 0.0


def posted_first() -> None:
    """Both post equal receives while the other's messages arrive: the first receive gets the first message."""
    other = 1 - dist.get_rank()
    for _ in range(5):
        received = [torch.zeros(2) for _ in range(5 * messages._SLOTS)]
        works = [dist.irecv(one, other) for one in received]
        works += [dist.isend(torch.full((2,), float(number)), other) for number in range(len(received))]
        for work in works:
            work.wait()
        assert [int(one[0]) for one in received] == list(range(len(received)))


def test_receives_that_are_posted_first_match_in_order() -> None:
    run_ranks(2, posted_first)


def test_a_peer_that_has_left_the_group_is_missed() -> None:
    for message, seconds in run_ranks(3, left_by_rank_1)[::2]:
        assert "Connection closed by peer" in message and seconds < 3  # when it ends; the timeout is 90


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


def without_memory(how: str) -> tuple[bool, float, str]:
    """Rank 1 cannot have the memory that a group or a collective needs."""
    from parallelrun.distributed.shared_memory import arena

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
        return shared_memory.is_ours(group), 0.0, f"{type(error).__name__} {getattr(error, 'exit_code', '')}: {error}"
    return shared_memory.is_ours(group), float(tensor.sum()), shared_memory.refusal(group)


def test_a_group_without_memory_uses_gloo_on_every_rank() -> None:
    why = "OSError: [Errno 12] no memory"
    assert run_ranks(2, without_memory, "of the group", fresh=True) == [(False, 2e6, why)] * 2


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
        from parallelrun.base.errors import EnvironmentProblem

        assert told.startswith("EnvironmentProblem 3"), told
        raise EnvironmentProblem(told)


def idle(seconds: float) -> tuple[float, int]:
    """CPU seconds of a rank while all others wait for rank 0, which sleeps; how often it looked meanwhile."""
    running, looked = engine.current(), [0]
    look = running.progress

    def count() -> None:
        looked[0] += 1
        look()

    dist.barrier()
    running.progress = count
    began = sum(os.times()[:2])
    if dist.get_rank() == 0:
        time.sleep(seconds)
    dist.all_reduce(torch.ones(10))
    del running.progress
    return sum(os.times()[:2]) - began, looked[0]


def test_waiting_ranks_do_not_burn_cores() -> None:
    found = run_ranks(16, idle, 2.0)
    assert sum(used for used, _ in found) < 1.0  # of 32 seconds of waiting
    assert max(looked for _, looked in found) < 8 * 2.0 / engine.SLEEP_S


def memory_of_a_rank() -> tuple[str, int, int, int]:
    """Where the memory of this rank is, its mode and its names, and how many peers this rank maps."""
    process = engine.current().process
    path = f"/proc/self/fd/{process.arena.descriptor}"
    facts = os.stat(path)
    return os.readlink(path), stat.S_IMODE(facts.st_mode), facts.st_nlink, len(process.peers)


def test_memory_is_private_and_has_no_name() -> None:
    for path, mode, num_names, num_peers in run_ranks(3, memory_of_a_rank, fresh=True):
        assert path == "/memfd:parallelrun (deleted)" and mode == 0o600 and num_names == 0 and num_peers == 2
