"""The keys of `strategy.data` with kind=diloco. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from parallelrun.config.schema.field import key

from ..common.keys import PeriodicKeys


@dataclass
class DiLoCoConfig(PeriodicKeys):
    """Keys of `strategy.data` with kind=diloco."""

    kind: str = "diloco"
    outer_lr: float = key(0.7, "diloco: learning rate of the outer SGD", above=0)
    outer_momentum: float = key(0.9, "diloco: momentum of the outer SGD", least=0, below=1)
    outer_nesterov: bool = key(True, "diloco: Nesterov momentum in the outer SGD")
