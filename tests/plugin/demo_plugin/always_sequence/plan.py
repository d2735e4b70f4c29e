"""The prediction: Megatron's, under another name and with one setting fixed."""

from __future__ import annotations

from dataclasses import dataclass

from parallelrun.config.schema.run_schema import Config, TensorStrategyConfig
from parallelrun.strategies.tensor.megatron.plan import Megatron1D


@dataclass
class AlwaysSequenceConfig(TensorStrategyConfig):
    """It reads no keys of its own."""

    kind: str = "always_sequence"


@dataclass(frozen=True)
class AlwaysSequence(Megatron1D):
    """Layout `1d_sequence`."""

    kind = "always_sequence"
    layout_name = "1d_sequence"
    config_class = AlwaysSequenceConfig
    is_one_dimensional = False

    @classmethod
    def asks_for_slices(cls, config: Config) -> bool:
        return True
