"""Tests of observers: torch keeps them alive for as long as they observe, and no longer."""

from __future__ import annotations

import gc
import weakref

from parallelrun.distributed.torch_private.observers import observers


class Observer:
    pass


def test_torch_holds_an_observer_until_it_is_replaced() -> None:
    """torch 2.11 does not hold what its storage of a thread returns, and yet releases it."""
    seen = []
    for _ in range(100):
        observers.set((Observer(),))
        (found,) = observers.get()
        assert isinstance(found, Observer)
        seen.append(weakref.ref(found))
        del found
    observers.set(())
    gc.collect()
    assert not any(observer() for observer in seen)
