"""The plan of ring: all-reduce by messages between the ranks (Gibiansky 2017; Sergeev and Del Balso 2018)."""

from __future__ import annotations

from dataclasses import dataclass

from ..common.allreduce.plan import AlgorithmAllReduce
from ..common.allreduce.rings import RingAllReduce
from ..common.keys import RingConfig


@dataclass(frozen=True)
class Ring(AlgorithmAllReduce):
    """A ring all-reduce per bucket, unless another algorithm is chosen."""

    kind = "ring"
    config_class = RingConfig
    default_algorithm = RingAllReduce
    compared = ({}, *({"algorithm": name} for name in ("halving_doubling", "tree", "hierarchical")))
