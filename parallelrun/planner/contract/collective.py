"""A predicted collective: what one rank sends in a step over one axis for one purpose."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Collective:
    """One rank's predicted communication in a training step over one axis for one purpose.

    operation: all_reduce | all_gather | reduce_scatter | broadcast | reduce | all_to_all | send | recv. payload_bytes:
    the sum of the calls' buffers (all-reduce, broadcast, reduce: the tensor; all-gather, reduce-scatter, all-to-all:
    the full-size buffer; point to point: counted at the sender, `recv` rows have 0). most_bytes: None if the payload is
    exact. If it depends on the data (dropless experts), payload_bytes assumes an even load and most_bytes is the bound.
    """

    axis: str
    operation: str
    purpose: str
    calls: int
    payload_bytes: int
    most_bytes: int | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """(axis, operation, purpose), which is unique among the rows of a rank."""
        return self.axis, self.operation, self.purpose

    def allows(self, calls: int, payload_bytes: int) -> bool:
        """Return whether the measured calls and bytes match this prediction.

        Calls must be equal, and bytes too, unless they depend on the data: then they must not exceed the bound.
        """
        within = payload_bytes == self.payload_bytes if self.most_bytes is None else payload_bytes <= self.most_bytes
        return calls == self.calls and within
