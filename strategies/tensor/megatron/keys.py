"""The keys of `strategy.tensor` with kind=megatron. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from parallelrun.config.schema.field import key
from parallelrun.config.schema.run_schema import TensorStrategyConfig


@dataclass
class MegatronConfig(TensorStrategyConfig):
    """Keys of `strategy.tensor` with kind=megatron."""

    kind: str = "megatron"
    sequence_parallel: bool = key(False, "1d: shard norms and dropout along the sequence")
