"""The program whose steps are predicted: the section `stack`. The defaults are what this program does."""

from __future__ import annotations

from dataclasses import dataclass, replace

from parallelrun.base.precision import Precision
from parallelrun.config.schema.field import key

OWN = "parallelrun"
SELECTIVE = ("elementwise", "attention", "products")


@dataclass
class StackConfig:
    """The program that runs a plan: what of it changes the time and memory of a step on the same devices."""

    name: str = OWN
    description: str = ""
    fused_attention: bool = key(True, "attention keeps no scores in memory")
    attention: float = key(1.0, "rate of attention, relative to cluster.attention_efficiency", above=0)
    fused_elementwise: bool = key(False, "one kernel rotates queries and keys, one multiplies by SwiGLU's gate")
    fp8: str = key("dense", "precision=fp8 is that of linear layers in blocks, of those but experts, or none",
                   choices=("all", "dense", "none"))  # fmt: skip
    fp8_copies: bool = key(False, "inputs in fp8 are kept for backward, weights in fp8 through a step")
    separate_gate: bool = key(False, "SwiGLU is two operations, both of whose results are kept for backward")
    norm_bytes: list[float] = key(
        lambda: [4.0, 8.0], "bytes read and written for each element of a norm, forward and backward"
    )  # one kernel each way, and its weight's gradient
    logit_bytes: list[float] = key(
        lambda: [18.0, 26.0], "bytes read and written for each logit, forward and backward"
    )  # rounding, softmax and loss in fp32, as torch's kernels move them
    operations: float = key(1.0, "operations that the host issues for a block, relative to parallelrun's", above=0)
    tensor_operations: list[float] = key(
        lambda: [0.0, 0.0], "further operations of a block, forward and backward, where tp splits it"
    )
    recompute_operations: float = key(0.0, "further operations to recompute a block", least=0)
    stops_early: bool = key(True, "recomputation ends at the last tensor that backward needs")
    selective: str = key(
        "elementwise", "recompute=selective repeats norms and activations, attention, or every second product",
        choices=SELECTIVE,
    )  # fmt: skip
    partitioned_activations: bool = key(False, "recompute=full keeps a part of a block's input on each tp rank")
    rounded_weights: bool = key(False, "weights are in the compute dtype; optimizers keep another copy")
    rounded_gradients: bool = key(False, "gradients are added up and summed over ranks in the compute dtype")
    separate_sums: bool = key(False, "gradients of a microbatch stay beside their sums")
    fused_accumulation: bool = key(False, "a product adds the gradient of its weights to those before")
    bucket: int | None = key(None, "gradients that travel together; null: as the strategy says", least=1)
    data_overlap: bool = key(True, "the data strategy sends while backward and forward compute")
    gather_overlap: bool = key(True, "the new weights of a sharded optimizer travel while forward computes")
    copied_buffers: bool = key(True, "FSDP copies gathered weights out of, and gradients into, buffers of its messages")
    whole_sums: bool = key(False, "a sharded optimizer sums all gradients after backward, and gathers in one call")
    gradient_overlap: bool = key(True, "an input's gradient is summed over tp while that of the weights is computed")
    tensor_overlap: float = key(
        0.0, "part of sequence parallelism's gathers and reduce-scatters that run under products", least=0, most=1
    )
    # FEPLB (2026), figure 1: with 128 experts on 16 H100, 18.6 % of a layer's time is waiting: 1 / (1 - 0.186) = 1.23.
    expert_imbalance: float = key(1.25, "rows of the busiest rank of ep over the mean", least=1)
    rows_once_a_host: bool = key(False, "a token's row is sent once to each host that has experts of it (DeepEP)")
    expert_overlap: float = key(0.0, "part of the all-to-alls of experts that run under other layers", least=0, most=1)
    scattered_messages: bool = key(False, "tp ranks with equal activations each send a part to the next stage")
    checked_collectives: bool = key(False, "ranks compare what they call before each collective, over TCP")

    def keeps_copy(self, own: Precision) -> bool:
        """Whether the optimizer keeps a copy of the weights in a more accurate dtype than the modules."""
        return self.rounded_weights and own.compute != own.stored

    def precision(self, own: Precision) -> Precision:
        """`own` with the dtypes in which the program stores weights and sums gradients."""
        stored = own.compute if self.rounded_weights else own.stored
        return replace(own, stored=stored, reduce=own.compute if self.rounded_gradients else own.reduce)
