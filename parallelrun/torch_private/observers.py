"""Observers of collectives, and dispatch modes, across threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch


class _Observers:
    """The observers of this thread, outermost first; each has `collective`, which `observe` describes.

    torch hands its own thread-local objects to the threads in which autograd runs backward (on GPUs), as it does with
    dispatch modes. A ContextVar would be empty there.
    """

    _KEY = "parallelrun_observers"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_threads = 0  # that have observers: mostly none, and torch's storage is slow

    def get(self) -> tuple[Any, ...]:
        if not self._num_threads or not torch._C._is_key_in_tls(self._KEY):
            return ()
        found: tuple[Any, ...] = torch._C._get_obj_in_tls(self._KEY)
        return found

    def set(self, found: tuple[Any, ...]) -> None:
        with self._lock:
            self._num_threads += bool(found) - bool(self.get())
            torch._C._stash_obj_in_tls(self._KEY, found)


observers = _Observers()


def observe(operations: Iterable[str]) -> Callable[[], None]:
    """Let `observers` see some operations of c10d, until the function that is returned is called.

    `observer.collective(name, args)` returns a context to enter around an operation. A dispatch mode would see every
    other operation, too, at 12 microseconds each. The kernels that are registered here precede those of all devices.
    """
    library = torch.library.Library("c10d", "IMPL")
    for name in filter(partial(hasattr, torch.ops.c10d), operations):
        kernel = partial(_observed, name, getattr(torch.ops.c10d, name).default)
        library.impl(name, kernel, "BackendSelect", with_keyset=True)
    return library._destroy


def _observed(name: str, operation: Any, keyset: Any, *args: Any) -> Any:
    with ExitStack() as entered:
        for observer in observers.get():
            entered.enter_context(observer.collective(name, args))
        return operation.redispatch(keyset.remove(torch._C.DispatchKey.BackendSelect), *args)


def is_observed() -> bool:
    """Return whether this thread has `observers` or dispatch modes."""
    return bool(observers.get()) or torch._C._len_torch_dispatch_stack() > 0


@contextmanager
def observed(operation: str, arguments: tuple[Any, ...]) -> Iterator[None]:
    """Let the `observers` see an operation of c10d by a group that is written in Python; suspend dispatch modes inside.

    torch calls the methods of such a group directly, so that `observe` does not see them. Modes do not see how torch's
    own groups copy and sum.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    with ExitStack() as entered:
        for observer in observers.get():
            entered.enter_context(observer.collective(operation, arguments))
        entered.enter_context(_disable_current_modes())
        yield


@contextmanager
def dispatch_modes(modes: list[Any]) -> Iterator[None]:
    """Enter the dispatch modes and observers of another thread in this thread (torch keeps modes per thread)."""
    with ExitStack() as entered:
        for mode in modes:
            entered.enter_context(mode)
        yield


def current_dispatch_modes() -> list[Any]:
    """Return the active dispatch modes and observers of this thread, outermost first."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return [*_get_current_dispatch_mode_stack(), *observers.get()]
