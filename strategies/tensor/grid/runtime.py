"""What the grid tensor strategies do: `place` swaps role layers for their forms on the grid."""

from __future__ import annotations

from .place import place

__all__ = ["place"]
