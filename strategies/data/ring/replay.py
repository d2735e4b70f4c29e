"""The rule of ring with compressed gradients: ddp's."""

from ..ddp.replay import rule

__all__ = ["rule"]
