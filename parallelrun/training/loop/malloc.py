"""Settings of malloc for CPU tensors: freed blocks are kept, because the next step needs the same sizes again.

glibc gives blocks of 32 MiB and more back to the system as soon as they are freed, so that the next step faults in and
clears every page of them again: in a layer with experts that took a tenth of the step.
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)
_LARGEST = 2**31 - 1  # bytes: of a C int
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


def keep_freed_memory() -> bool:
    """Let this process keep what it frees, for its next allocation. Return whether that was set.

    It is not where the user has set glibc's variables, and with other C libraries.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in _SETTINGS):
        return False
    return all([mallopt(option, _LARGEST) for option in (_TRIM_THRESHOLD, _MMAP_THRESHOLD)])
