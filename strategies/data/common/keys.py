"""The keys of `strategy.data`: first those that several strategies read, then the class of each kind."""

from __future__ import annotations

from dataclasses import dataclass

from parallelrun.config.schema.field import key
from parallelrun.config.schema.run_schema import CONSISTENCIES, DataStrategyConfig


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

    compression: str = key("none", "gradient compression", choices=("none", "fp16", "bf16", "powersgd"))
    powersgd_rank: int | None = key(None, "rank of PowerSGD's factors; null: 4", least=1)


@dataclass
class AlgorithmKeys(CompressionKeys):
    """Keys of strategies that choose the algorithm of their all-reduce."""

    algorithm: str | None = key(None, "native | ring | halving_doubling | hierarchical | tree; null: ring or native")
    group_size: int | None = key(None, "hierarchical: dp ranks per inner group; null: those of one host", least=1)


@dataclass
class PeriodicKeys(BucketKeys):
    """Keys of strategies whose replicas train independently between two synchronisations."""

    sync_every: int | None = key(None, "local_sgd, diloco: local steps between averages; null: 8 or 10", least=1)


@dataclass
class NaiveDDPConfig(DataStrategyConfig):
    kind: str = "naive_ddp"


@dataclass
class DDPConfig(CompressionKeys):
    kind: str = "ddp"


@dataclass
class ZeRO1Config(BucketKeys):
    kind: str = "zero1"


@dataclass
class ZeRO2Config(BucketKeys):
    kind: str = "zero2"


@dataclass
class FSDPConfig(DataStrategyConfig):
    kind: str = "fsdp"
    shard: int | None = key(
        None, "fsdp: ranks that share one copy of the weights (HSDP); null: all dp ranks", least=1, of_degrees=True
    )
    reshard_after_forward: bool | None = key(None, "fsdp: free gathered weights after forward; null: only if pp=1")
    reduce_each_microbatch: bool | None = key(None, "fsdp: reduce in every backward; null: except with zero bubble")


@dataclass
class RingConfig(AlgorithmKeys):
    kind: str = "ring"


@dataclass
class HorovodConfig(AlgorithmKeys):
    kind: str = "horovod"
    reduction: str = key("average", "horovod: operation that combines gradients", choices=("average", "adasum"))
    timeline: bool = key(False, "horovod: write timeline.json, a Chrome trace of the reducer")
    worker_batches: list[int] = key(list, "horovod: number of batches of each worker; []: enough for all steps")
    process_sets: list[list[int]] = key(list, "horovod: workers that average among themselves; []: all")


@dataclass
class ParameterServerConfig(DataStrategyConfig):
    kind: str = "ps"
    servers: int | None = key(None, "ps: number of parameter servers; null: 1", least=1)
    consistency: str | None = key(None, "ps: consistency; null: sync, or ssp with staleness", choices=CONSISTENCIES)
    staleness: int | None = key(None, "ps, ssp: number of steps that the fastest worker may be ahead", least=0)
    backup_workers: int | None = key(None, "ps, sync: number of late gradients that a step does not wait for", least=0)
    delays: list[float] = key(list, "ps: seconds that workers 0, 1, ... sleep in each step")
    shard_min_kb: float = key(256.0, "ps: smallest part of a tensor that is split over servers, in kB", least=0)


@dataclass
class LocalSGDConfig(PeriodicKeys):
    kind: str = "local_sgd"


@dataclass
class DiLoCoConfig(PeriodicKeys):
    kind: str = "diloco"
    outer_lr: float = key(0.7, "diloco: learning rate of the outer SGD", above=0)
    outer_momentum: float = key(0.9, "diloco: momentum of the outer SGD", least=0, below=1)
    outer_nesterov: bool = key(True, "diloco: Nesterov momentum in the outer SGD")
