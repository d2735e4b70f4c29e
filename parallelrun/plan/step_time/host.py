"""The number of operations that torch issues for a block on a CPU, where their number adds to the time. Torch-free.

Counted with a dispatch mode (views included) as the difference of two depths of each model, on torch 2.13: 132 for a
layer of gpt, 238 of llama, 32 of an mlp. A layer with experts has 295, which take 1.8 times as long as others: each
router and expert is several lines of Python.
"""

from __future__ import annotations

from parallelrun.model_spec import BlockSpec, ModelSpec

FORWARD = 0.4  # the part of the operations in forward
OF_GPT, OF_LLAMA, OF_EXPERTS, OF_MLP, OF_ENDS = 132, 238, 530, 32, 30
OF_SIMPLE_LAYER = 14  # of a convolution, a norm, or a linear layer with what stands between it and the next
OF_COLLECTIVE = 6  # of a collective inside a block: copies around it, and its place in the graph


# A device waits for its host while short kernels follow each other, even if the long ones would leave the host time
# enough: the longer of both times, rounded off by a norm of this degree.
SHARPNESS = 4


def waited_s(issuing: float, computing: float) -> float:
    """Seconds that a device waits for a host that takes `issuing` for kernels that take `computing`."""
    if not issuing:
        return 0.0
    longer, shorter = max(issuing, computing), min(issuing, computing)
    together = longer * (1 + (shorter / longer) ** SHARPNESS) ** (1 / SHARPNESS)
    return float(together - computing)


def operations(block: BlockSpec, spec: ModelSpec) -> tuple[float, float]:
    """The operations of one microbatch of a block (forward, backward)."""
    total = _total(block, spec)
    return FORWARD * total, (1 - FORWARD) * total


def _total(block: BlockSpec, spec: ModelSpec) -> int:
    if any(layer.layer_role == "router" for layer in block.layers):
        return OF_EXPERTS + (OF_LLAMA - OF_GPT) * (spec.norm == "rmsnorm")
    if block.kind == "transformer":
        return OF_LLAMA if spec.norm == "rmsnorm" else OF_GPT
    if block.kind == "mlp":
        return OF_MLP
    return max(OF_ENDS, OF_SIMPLE_LAYER * len(block.layers))
