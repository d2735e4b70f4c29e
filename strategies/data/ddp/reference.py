"""The reference of ddp with compressed gradients."""

from ..common.compression.reference import rule

__all__ = ["rule"]
