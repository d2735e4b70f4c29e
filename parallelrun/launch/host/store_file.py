"""The file in which the ranks of one host meet: nothing listens, and only its user can open it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


class StoreFile(NamedTuple):
    """The file of a store for ranks that this process starts, which inherit its descriptor."""

    path: str
    descriptor: int


@contextlib.contextmanager
def store_file() -> Iterator[StoreFile]:
    """Make a file without a name for `file_store`, open until the ranks have inherited it."""
    descriptor = os.memfd_create("parallelrun-store")
    try:
        yield StoreFile(f"/proc/self/fd/{descriptor}", descriptor)
    finally:
        os.close(descriptor)


def file_store(path: str) -> Store:
    """Return the store in this file. A rank that waits for a key looks every 10 ms."""
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    store: Store = FileStore(path)
    return store
