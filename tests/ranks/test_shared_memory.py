"""The backend `shm` does what gloo does: every operation and dtype, alone, overlapping, out of order and at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallelrun.distributed import shared_memory
from parallelrun.distributed.shared_memory import collectives
from tests.matrix import FULL, shared
from tests.pool import run_ranks

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64,
)  # fmt: skip
SIZES = (0, 1, 7, 1000, 30_011)
CASES = [(dtype, numel) for dtype in DTYPES for numel in SIZES]
if not FULL:  # every dtype on both ways, that of few bytes and that of many; every size in 4 bytes and in 2
    CASES = [
        (dtype, numel) for dtype, numel in CASES if dtype in (torch.float32, torch.bfloat16) or numel in SIZES[2::2]
    ]
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
    """Tensors that are not contiguous are reduced, broadcast and gathered in place. gloo, which refuses them, gets
    contiguous ones."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tensors = [part(dtype, 2 * numel, rank).view(-1, 2).t() for _ in range(3)]
    if group is not None:
        tensors = [one.contiguous() for one in tensors]
    dist.all_reduce(tensors[0], group=group)
    dist.broadcast(tensors[1], world - 1, group=group)
    return [one.contiguous() for one in tensors]


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
    assert shared_memory.is_ours(dist.group.WORLD), shared_memory.refusal(dist.group.WORLD)
    assert SIZES[-2] * 8 < collectives.SMALL < SIZES[-1] * 2, "bytes: the sizes are on both sides of it"
    gloo, found = dist.new_group(backend="gloo"), []
    for dtype, numel in CASES:
        mine = [operation(None, dtype, numel, *arguments) for _ in both_ways()]
        theirs = operation(gloo, dtype, numel, *arguments)
        if any(len(one) != len(theirs) or not all(map(torch.equal, one, theirs)) for one in mine):
            found.append(f"{dtype} {numel}")
    return found


def both_ways() -> Iterator[bool]:
    """Yield True, False, while the world's group reduces as ranks do that share cores, and as those that do not."""
    make = dist.group.WORLD._make
    given = make.shares_cores
    for make.shares_cores in (True, False):
        yield make.shares_cores
    make.shares_cores = given


@pytest.mark.parametrize("world", [2, 3, 4] if FULL else [2, 3])
@pytest.mark.parametrize("name", shared(OPERATIONS))
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
    mine, sums = torch.zeros(numel // world, dtype=dtype), []
    dist.reduce_scatter_tensor(mine, numbers)
    for _ in both_ways():
        sums.append(numbers.clone())
        dist.all_reduce(sums[-1])
    return [numbers, mine, *sums]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [20, 40_000])
def test_sums_are_in_rank_order_and_equal_on_every_rank(numel: int, dtype: torch.dtype) -> None:
    results = run_ranks(4, random_sums, numel, dtype)
    total = results[0][0].float()
    for numbers, *_ in results[1:]:
        total = total + numbers  # in the order of the ranks, in fp32
    for rank, (_, mine, *sums) in enumerate(results):
        assert all(torch.equal(one, total.to(dtype)) for one in sums)
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
