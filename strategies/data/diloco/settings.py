"""What a plan says of DiLoCo. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from ..local_sgd.settings import IndependentWay


@dataclass(frozen=True)
class DilocoWay(IndependentWay):
    """outer_*: of the SGD that updates the shared weights by the replicas' mean movement of a round."""

    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    outer_nesterov: bool = True
