"""The runtime of ring: ddp's buckets, summed by the messages of the plan's algorithm."""

from ..common.allreduce.runtime import AlgorithmRuntime as RUNTIME

__all__ = ["RUNTIME"]
