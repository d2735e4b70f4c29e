"""Observers of collectives, and dispatch modes, across threads."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

_NOTHING = nullcontext()


class _Observers:
    """The observers of this thread, outermost first; each has `collective`, which `observe` describes.

    torch hands its own thread-local objects to the threads in which autograd runs backward (on GPUs), as it does with
    dispatch modes. A ContextVar would be empty there.
    """

    _KEY = "parallelrun_observers"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.num_threads = 0  # that have observers: mostly none, and torch's storage is slow

    def get(self) -> tuple[Any, ...]:
        if not self.num_threads or not torch._C._is_key_in_tls(self._KEY):
            return ()
        stored: tuple[Any, ...] = torch._C._get_obj_in_tls(self._KEY)
        return stored

    def set(self, installed: tuple[Any, ...]) -> None:
        with self._lock:
            self.num_threads += bool(installed) - bool(self.get())
            _stash(self._KEY, (*installed,))


def _stash(key: str, value: tuple[Any, ...]) -> None:
    """Keep a new tuple in torch's storage of this thread. torch 2.11 releases it later, but does not hold it before."""
    references = sys.getrefcount(value)
    torch._C._stash_obj_in_tls(key, value)
    if value and sys.getrefcount(value) == references:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


observers = _Observers()


def observe(operations: Iterable[str]) -> Callable[[], None]:
    """Let `observers` see some operations of c10d, until the function that is returned is called.

    `observer.collective(name, args)` returns a context to enter around an operation, or None. A dispatch mode would see
    every other operation, too, at 12 microseconds each. The kernels registered here precede those of all devices.
    """
    library = torch.library.Library("c10d", "IMPL")
    for name in filter(partial(hasattr, torch.ops.c10d), operations):
        kernel = partial(_observed, name, getattr(torch.ops.c10d, name).default)
        library.impl(name, kernel, "BackendSelect", with_keyset=True)
    return library._destroy


def _observed(name: str, operation: Any, keyset: Any, *args: Any) -> Any:
    with _all_of(_contexts(name, args)):
        return operation.redispatch(keyset.remove(torch._C.DispatchKey.BackendSelect), *args)


def is_observed() -> bool:
    """Return whether this thread has `observers` or dispatch modes."""
    return (observers.num_threads > 0 and bool(observers.get())) or torch._C._len_torch_dispatch_stack() > 0


def observed(operation: str, arguments: tuple[Any, ...]) -> AbstractContextManager[object]:
    """Let the `observers` see an operation of c10d by a group that is written in Python; suspend dispatch modes inside.

    torch calls the methods of such a group directly, so that `observe` does not see them. Modes do not see how torch's
    own groups copy and sum.
    """
    contexts = _contexts(operation, arguments)
    if torch._C._len_torch_dispatch_stack() > 0:
        from torch.utils._python_dispatch import _disable_current_modes

        contexts.append(_disable_current_modes())
    return _all_of(contexts)


def _contexts(operation: str, arguments: tuple[Any, ...]) -> list[AbstractContextManager[object]]:
    contexts = [observer.collective(operation, arguments) for observer in observers.get()]
    return [context for context in contexts if context is not None]


def _all_of(contexts: list[AbstractContextManager[object]]) -> AbstractContextManager[object]:
    """Enter all contexts; mostly there are none."""
    return dispatch_modes(contexts) if contexts else _NOTHING


@contextmanager
def dispatch_modes(contexts: list[Any]) -> Iterator[None]:
    """Enter contexts, such as the dispatch modes and observers of another thread: torch keeps them per thread."""
    with ExitStack() as entered:
        for context in contexts:
            entered.enter_context(context)
        yield


def current_dispatch_modes() -> list[Any]:
    """Return the active dispatch modes and observers of this thread, outermost first."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return [*_get_current_dispatch_mode_stack(), *observers.get()]
