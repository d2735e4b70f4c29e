"""Planted bugs of stages that run a module's own forward."""

from __future__ import annotations

from typing import Any

from parallelrun.models.module.own_forward import OwnForwardNetwork, StandIn


def received_at_the_embedding() -> None:
    """What a stage receives takes the place of what modules before the blocks return, and absent blocks pass it on:
    positions and scales of the embedding come again on every stage."""
    right = StandIn.forward

    def wrong(self: StandIn, *inputs: Any, **named: Any) -> Any:
        network: OwnForwardNetwork = self.answer.__self__
        right(self, *inputs, **named)
        return inputs[0] if self.name.startswith("layers.") else network._received

    StandIn.forward = wrong


def sent_from_the_next_block() -> None:
    """A stage sends what the first block of the next one would get: what runs between the two is applied twice."""
    right = StandIn.forward

    def wrong(self: StandIn, *inputs: Any, **named: Any) -> Any:
        network: OwnForwardNetwork = self.answer.__self__
        if network._result:
            network._result[:] = [(inputs[0], network._result[0][1])]
        return right(self, *inputs, **named)

    StandIn.forward = wrong
