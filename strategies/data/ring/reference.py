"""The reference of ring with compressed gradients."""

from ..common.compression.reference import rule

__all__ = ["rule"]
