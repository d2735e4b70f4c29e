"""Seconds of the blocks of models that are no transformers: mlp and image classifiers."""

from __future__ import annotations

from parallelrun.base.precision import BYTES
from parallelrun.config.schema.cluster_schema import ClusterConfig
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.model.model_spec import BlockSpec
from parallelrun.planner.predict.step_time.kernels import streaming_s
from parallelrun.planner.predict.step_time.rates import Rates

# How often simple kernels read or write a tensor that is kept for backward: a norm or an activation function reads and
# writes it in forward, and reads it, the arriving gradient and the norm's sums in backward.
FORWARD_PASSES, BACKWARD_PASSES = 3, 5


def streaming(block: BlockSpec, plan: Plan, rates: Rates) -> tuple[float, float]:
    """Seconds (forward, backward) of the simple kernels of one microbatch of a block."""
    elements = block.saved_on_rank(plan.mesh.size("tp")) * plan.batch.micro_batch
    saved = elements * BYTES[plan.precision.compute]
    kernels = 2 * len(block.layers)
    return streaming_s(FORWARD_PASSES * saved, kernels, rates), streaming_s(BACKWARD_PASSES * saved, 2 * kernels, rates)


def why_unknown(plan: Plan, cluster: ClusterConfig) -> str:
    """Return why the time of this kind of model is unknown; empty if it is not."""
    if not plan.spec.forward_flops:
        return "the model does not say its FLOPs"
    if plan.spec.has_convolutions and not cluster.convolution_efficiency:
        return "the model has convolutions, and cluster.convolution_efficiency is not given"
    return ""
