"""The keys of `strategy.data` with kind=naive_ddp. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from parallelrun.config.schema.run_schema import DataStrategyConfig


@dataclass
class NaiveDDPConfig(DataStrategyConfig):
    """It has no keys of its own."""

    kind: str = "naive_ddp"
