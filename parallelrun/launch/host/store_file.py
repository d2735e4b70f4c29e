"""The file in which the ranks of one host meet: nothing listens, and only its user can open it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


@contextlib.contextmanager
def store_file() -> Iterator[int]:
    """Make a file without a name for `file_store`, open until the ranks have inherited its descriptor."""
    descriptor = os.memfd_create("parallelrun-store")
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def file_store(descriptor: int) -> Store:
    """Return the store in an inherited file. A rank that waits for a key looks every 10 ms."""
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    store: Store = FileStore(f"/proc/self/fd/{descriptor}")
    return store
