"""The keys of `strategy.data` with kind=local_sgd. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from ..common.keys import PeriodicKeys


@dataclass
class LocalSGDConfig(PeriodicKeys):
    """Keys of `strategy.data` with kind=local_sgd."""

    kind: str = "local_sgd"
