"""numpy and its array type, imported when numpy is first used.

`plan` asks a dataset for the size of its vocabulary and nothing else; importing numpy for that would be the largest
part of answering a wrong plan.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
else:
    NDArray = None  # only in annotations, which are never evaluated

    class _Deferred:
        def __getattr__(self, name: str) -> Any:
            value = getattr(import_module("numpy"), name)
            setattr(self, name, value)  # the next use does not come here
            return value

    np = _Deferred()

__all__ = ["NDArray", "np"]
