"""The plan of ddp: a `BucketedAllReduce` with the backend's own all-reduce."""

from __future__ import annotations

from dataclasses import dataclass

from parallelrun.config.schema.run_schema import DataStrategyConfig

from ..common.bucketed_plan import BucketedAllReduce
from ..common.keys import DDPConfig


@dataclass(frozen=True)
class DDP(BucketedAllReduce):
    """One all-reduce of the backend per bucket."""

    kind = "ddp"
    config_class = DDPConfig
    description = (
        "Each rank computes the gradients of its own samples. Backward fills buckets from the last layer to the first; "
        "a full bucket is summed over the replicas by one all-reduce while the rest of backward runs.",
        "Li et al. 2020 (PyTorch Distributed)",
    )

    @classmethod
    def choices(cls, dp: int, pp: int, in_node: int) -> list[DataStrategyConfig]:
        return [DDPConfig()]
