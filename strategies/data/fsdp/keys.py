"""The keys of `strategy.data` with kind=fsdp. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from parallelrun.config.schema.field import key
from parallelrun.config.schema.run_schema import DataStrategyConfig


@dataclass
class FSDPConfig(DataStrategyConfig):
    """Keys of `strategy.data` with kind=fsdp."""

    kind: str = "fsdp"
    shard: int | None = key(
        None, "fsdp: ranks that share one copy (HSDP); null: all dp ranks", least=1, of_degrees=True
    )
    reshard_after_forward: bool | None = key(None, "fsdp: free gathered weights after forward; null: only at pp=1")
    reduce_each_microbatch: bool | None = key(None, "fsdp: reduce in every backward; null: not under zero bubble")
