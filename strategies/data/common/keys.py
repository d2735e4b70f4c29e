"""Configuration keys that several data strategies read; each mixes what it needs into its own config dataclass."""

from __future__ import annotations

from dataclasses import dataclass

from parallelrun.config.schema.field import key
from parallelrun.config.schema.run_schema import DataStrategyConfig


@dataclass
class BucketKeys(DataStrategyConfig):
    """Keys of strategies that exchange gradients in buckets."""

    bucket_mb: float = key(25.0, "size of gradient buckets in MB", least=0)

    @property
    def bucket_bytes(self) -> int:
        return int(self.bucket_mb * 2**20)


@dataclass
class CompressionKeys(BucketKeys):
    """Keys of strategies that can compress gradients."""

    compression: str = key("none", "gradient compression", choices=("none", "fp16", "powersgd"))
    powersgd_rank: int | None = key(None, "rank of PowerSGD's factors; null: 4", least=1)


@dataclass
class AlgorithmKeys(CompressionKeys):
    """Keys of strategies that choose the algorithm of their all-reduce."""

    algorithm: str | None = key(None, "native | ring | halving_doubling | hierarchical | tree; null: ring or native")
    group_size: int | None = key(None, "hierarchical: dp ranks per inner group; null: those of one host", least=1)


@dataclass
class PeriodicKeys(BucketKeys):
    """Keys of strategies whose replicas train independently between two synchronisations."""

    sync_every: int | None = key(None, "local_sgd, diloco: local steps per averaging; null: 8, diloco 10", least=1)
