"""Properties of a software stack that change the step time on the same devices."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SoftwareStack:
    """How the program that is predicted computes and sends. The defaults are what this program does.

    fused_attention: attention keeps no scores. attention: its rate, relative to the cluster's `attention_efficiency`.
    fused_rotation: one kernel rotates queries and keys. logit_bytes: read and written for each logit, forward and
    backward. stops_early: full recomputation ends at the last tensor that backward needs, before the last product of
    a block (`torch.utils.checkpoint` without reentrance); selective recomputation computes norms and activations
    again, else attention alone. operations: that the host issues for a block, relative to this program's;
    tensor_operations: besides, forward and backward, where tensor parallelism splits it; recompute_operations:
    besides, to recompute it (states of random numbers).

    data_overlap: the data strategy sends while backward and forward compute; gather_overlap: the new weights of a
    sharded optimizer too. bucket: gradients that travel together; None: as in the plan. gradient_overlap: tensor
    parallelism sums the gradient of an input while that of the weights is computed, as the plan asks. tensor_overlap:
    gathers and reduce-scatters of sequence parallelism run under the products beside them. scattered_messages: tp
    ranks with equal activations each send a part of them to the next stage, which gathers them. rounded_weights:
    weights are kept in the compute dtype, which is what is gathered. rounded_gradients: gradients are added up and
    summed over ranks in the compute dtype. fused_accumulation: a product adds the gradient of its weights to those
    before. whole_sums: a sharded optimizer sums all gradients by one all-reduce after the last backward pass, and
    gathers all weights by one call. checked_collectives: torch compares what the ranks of a group call before every
    collective, over TCP, while the host waits (`TORCH_DISTRIBUTED_DEBUG=DETAIL`).
    """

    fused_attention: bool = True
    attention: float = 1.0
    fused_rotation: bool = False
    logit_bytes: tuple[float, float] = (18, 26)  # rounding, softmax and loss in fp32, as torch's kernels move them
    stops_early: bool = True
    operations: float = 1.0
    tensor_operations: tuple[float, float] = (0.0, 0.0)
    recompute_operations: float = 0.0
    data_overlap: bool = True
    gather_overlap: bool = True
    bucket: int | None = None
    gradient_overlap: bool = True
    tensor_overlap: bool = False
    scattered_messages: bool = False
    rounded_weights: bool = False
    rounded_gradients: bool = False
    fused_accumulation: bool = False
    whole_sums: bool = False
    checked_collectives: bool = False


OURS = SoftwareStack()
