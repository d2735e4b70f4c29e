"""The keys of `strategy.data` with kind=ps. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from parallelrun.config.schema.field import key
from parallelrun.config.schema.run_schema import CONSISTENCIES, DataStrategyConfig


@dataclass
class ParameterServerConfig(DataStrategyConfig):
    """Keys of `strategy.data` with kind=ps."""

    kind: str = "ps"
    servers: int | None = key(None, "ps: parameter servers; null: 1", least=1)
    consistency: str | None = key(None, "ps: null: sync, or ssp if staleness is set", choices=CONSISTENCIES)
    staleness: int | None = key(None, "ps, ssp: steps that the fastest worker may be ahead", least=0)
    backup_workers: int | None = key(None, "ps, sync: slowest gradients that a step does not wait for", least=0)
    delays: list[float] = key(list, "ps: seconds that worker 0, 1, ... sleeps in each step")
    shard_min_kb: float = key(256.0, "ps: smallest part of a tensor that is split over servers, in kB", least=0)
