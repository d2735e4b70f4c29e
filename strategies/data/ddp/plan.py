"""The plan of ddp: a `BucketedAllReduce` with the backend's own all-reduce."""

from __future__ import annotations

from dataclasses import dataclass

from ..common.bucketed_plan import BucketedAllReduce
from ..common.keys import DDPConfig


@dataclass(frozen=True)
class DDP(BucketedAllReduce):
    """One all-reduce of the backend per bucket."""

    kind = "ddp"
    is_searched = True
    config_class = DDPConfig
