"""The run time: Megatron's, which follows the plan."""

from parallelrun.strategies.tensor.megatron.runtime import parallelize

__all__ = ["parallelize"]
