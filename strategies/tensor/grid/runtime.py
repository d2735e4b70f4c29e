"""What the grid tensor strategies do: `parallelize` swaps role layers for their forms on the grid."""

from __future__ import annotations

from .place import parallelize

__all__ = ["parallelize"]
