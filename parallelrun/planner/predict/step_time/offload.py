"""Seconds of what is offloaded: inputs of blocks, which computation hides, and the optimizer's update on the host."""

from __future__ import annotations

from parallelrun.base.precision import BYTES
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.model.model_spec import BlockSpec
from parallelrun.planner.pieces.orthogonalising import exchanges, product_dtype
from parallelrun.planner.predict import prediction
from parallelrun.planner.predict.step_time.rates import Rates

OFFLOAD = "offload"


def inputs_s(block: BlockSpec, computed: float, plan: Plan, rates: Rates) -> float:
    """Return the seconds of moving a block's input in one pass, beyond the `computed` ones that hide it; on CPU, which
    hides nothing, of a copy."""
    if plan.recompute != "offload" or not block.is_recomputed:
        return 0.0
    size = plan.tensor.saved_bytes(block, plan)
    if rates.synchronous:
        return 2 * size / rates.memory_bytes_s
    assert rates.host_bytes_s, "see `rates.not_given`"
    return max(0.0, size / rates.host_bytes_s - computed)


def update_s(plan: Plan, rates: Rates) -> float:
    """Return the seconds of an update on the host: weights and gradients go there, weights come back; in between,
    the host reads and writes weights and states, and reads gradients. Matrices to be orthogonalised go to the device
    and back."""
    coordinate = plan.mesh.coordinate(0)
    size, states = (prediction.updated_bytes(plan, coordinate, copies) for copies in (1, None))
    sizes = (exchange.sizes(plan, coordinate)[0] for exchange in exchanges(plan, coordinate["pp"]))
    matrices = 2 * BYTES[product_dtype(plan)] * sum(sizes)
    link, memory = rates.host_bytes_s, rates.host_memory_bytes_s
    if rates.synchronous:
        link, memory = rates.memory_bytes_s / 2, rates.memory_bytes_s
    assert link and memory, "see `rates.not_given`"
    return (3 * size + matrices) / link + (3 * size + 2 * states) / memory
