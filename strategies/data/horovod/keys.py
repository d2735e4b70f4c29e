"""The keys of `strategy.data` with kind=horovod. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from parallelrun.config.schema.field import key

from ..common.keys import AlgorithmKeys


@dataclass
class HorovodConfig(AlgorithmKeys):
    """Keys of `strategy.data` with kind=horovod."""

    kind: str = "horovod"
    reduction: str = key("average", "horovod: how gradients are combined", choices=("average", "adasum"))
    timeline: bool = key(False, "horovod: write timeline.json, a Chrome trace of the reducer")
    stall_warn_s: float = key(60.0, "horovod: warn if a tensor waits this long for other ranks; 0: never", least=0)
    worker_batches: list[int] = key(list, "horovod: batches of each worker before it joins; []: enough")
    join_divisor: str = key("initial", "horovod: divide by all workers or the active", choices=("initial", "active"))
    process_sets: list[list[int]] = key(list, "horovod: workers that average among themselves; []: all")
