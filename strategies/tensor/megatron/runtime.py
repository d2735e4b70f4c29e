"""What Megatron's tensor strategy does: `parallelize` swaps role layers for their tensor-parallel forms."""

from __future__ import annotations

from .place import parallelize

__all__ = ["parallelize"]
