"""The runtime of ddp: a `BucketedRuntime` whose sums are collectives of the backend."""

from __future__ import annotations

from ..common.compression.runtime import CompressedRuntime


class DDPRuntime(CompressedRuntime):
    """Each bucket is summed by one all-reduce, or by those of its compressed parts."""


RUNTIME = DDPRuntime
