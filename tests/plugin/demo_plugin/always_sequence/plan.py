"""The prediction: Megatron's, under another name and with one setting fixed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from parallelrun.plan.request import Request
from parallelrun.strategies.tensor.megatron.plan import Megatron1D


@dataclass(frozen=True)
class AlwaysSequence(Megatron1D):
    """Layout `1d_sequence`."""

    kind = "always_sequence"
    layout_name = "1d_sequence"
    reads = ("overlap",)
    is_one_dimensional = False

    @classmethod
    def resolve(cls, request: Request) -> AlwaysSequence:
        return replace(super().resolve(request), sequence_parallel=request.tp > 1)
