"""The shared memory of a process gives back what it no longer needs, and nothing else."""

from __future__ import annotations

import os

import torch

from parallelrun.distributed.shared_memory import arena as arenas
from parallelrun.distributed.shared_memory.arena import Arena

MIB = 2**20


def held_bytes(arena: Arena) -> int:
    return os.fstat(arena.descriptor).st_blocks * 512


def use(arena: Arena, times: int, num_bytes: int = 1000) -> None:
    for _ in range(times):
        arena.free(arena.allocate(num_bytes))


def test_memory_that_was_needed_once_is_given_back() -> None:
    arena = Arena()
    arena.free(arena.allocate(64 * MIB))
    assert held_bytes(arena) >= 64 * MIB
    use(arena, 2 * arenas._WINDOW)
    assert held_bytes(arena) < MIB
    again = arena.allocate(64 * MIB)
    arena.tensor(again, torch.uint8, 64 * MIB).fill_(7)
    assert held_bytes(arena) >= 64 * MIB


def test_memory_that_is_in_use_or_used_again_stays() -> None:
    arena = Arena()
    first, last = arena.allocate(32 * MIB), arena.allocate(1000)
    arena.tensor(last, torch.uint8, 1000).fill_(7)
    arena.free(first)
    use(arena, 3 * arenas._WINDOW)
    assert (arena.tensor(last, torch.uint8, 1000) == 7).all(), "a block behind free memory is in use"
    arena.free(last)
    for _ in range(3):
        use(arena, arenas._WINDOW - 10)
        use(arena, 1, 32 * MIB)
        assert held_bytes(arena) >= 32 * MIB, "what every window needs is not given back"


def test_a_little_surplus_stays() -> None:
    arena = Arena()
    arena.free(arena.allocate(arenas._SURPLUS - MIB))
    use(arena, 3 * arenas._WINDOW)
    assert held_bytes(arena) >= arenas._SURPLUS - MIB
