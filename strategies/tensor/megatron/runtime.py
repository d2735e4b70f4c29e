"""What Megatron's tensor strategy does: `place` swaps role layers for their tensor-parallel forms."""

from __future__ import annotations

from .place import place

__all__ = ["place"]
