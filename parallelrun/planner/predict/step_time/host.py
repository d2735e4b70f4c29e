"""The number of operations that torch issues for a block on a CPU, where their number adds to the time.

Counted with a dispatch mode (views included) as the difference of two depths of each model, on torch 2.13: 132 for a
layer of gpt, 231 of llama, with latent attention 87 more, 32 of an mlp. A layer with experts has 295, which take 1.8
times as long as others: each router and expert is several lines of Python.
"""

from __future__ import annotations

from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.model.model_spec import BlockSpec, ModelSpec
from parallelrun.planner.predict.step_time.kernels import streaming_s
from parallelrun.planner.predict.step_time.rates import Rates

FORWARD = 0.4  # the part of the operations in forward
OF_GPT, OF_LLAMA, OF_EXPERTS, OF_MLP, OF_ENDS = 132, 231, 530, 32, 30
OF_LATENT = 87  # of latent attention, beside those of plain attention
OF_SIMPLE_LAYER = 14  # of a convolution, a norm, or a linear layer with what stands between it and the next
OF_COLLECTIVE = 6  # of a collective inside a block: copies around it, and its place in the graph
# On a CPU, fitted to trainings of two and four ranks, with the Python that is no operation of torch:
OF_CALL = 20  # of a collective or message in a step, beside what a collective alone takes
OF_GRID_CALL = 35  # and of one of a layer that is split over a grid of ranks
OF_UNIT = 150  # of a gather or a reduction by torch's FSDP2, which is Python for every parameter
OF_MICROBATCH = 40  # of one of several microbatches: its samples, its messages' buffers; and one for every gradient

# TORCH_DISTRIBUTED_DEBUG=DETAIL (torch/csrc/distributed/c10d/ProcessGroupWrapper.cpp): a monitored barrier, in which
# rank 0 receives from each rank and answers it, and two all-gathers around a ring, of a fingerprint's size and of the
# fingerprint.
CHECK_MESSAGES = 4  # one after the other for each further rank of the group, and as many hand-overs to Gloo's threads
CHECK_MESSAGE_S = 50e-6  # over TCP between processes, both of which wake up for it (as latency_us of cluster=ethernet)


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


def check_s(size: int, plan: Plan) -> float:
    """Seconds that a host waits before a collective of `size` ranks, while they compare what they call."""
    return CHECK_MESSAGES * size * CHECK_MESSAGE_S if plan.stack.checked_collectives else 0.0


def operations(block: BlockSpec, spec: ModelSpec) -> tuple[float, float]:
    """The operations of one microbatch of a block (forward, backward)."""
    total = _total(block, spec)
    return FORWARD * total, (1 - FORWARD) * total


def _total(block: BlockSpec, spec: ModelSpec) -> int:
    latent = OF_LATENT if spec.latent and block.kind == "transformer" else 0
    if any(layer.layer_role == "router" for layer in block.layers):
        return OF_EXPERTS + (OF_LLAMA - OF_GPT) * (spec.norm == "rmsnorm") + latent
    if block.kind == "transformer":
        return (OF_LLAMA if spec.norm == "rmsnorm" else OF_GPT) + latent
    if block.kind == "mlp":
        return OF_MLP
    return max(OF_ENDS, OF_SIMPLE_LAYER * len(block.layers))


def around_data_s(plan: Plan, rates: Rates) -> float:
    """Seconds of a step that a host spends around the data strategy's communication: what is sent is copied into and
    out of buffers, and torch's FSDP2 is Python for every unit of sharded weights."""
    if not rates.synchronous:
        return 0.0
    coordinate = plan.mesh.coordinate(0)
    rows = plan.data.collectives(coordinate["pp"], coordinate, plan)
    copied = streaming_s(2.0 * sum(row.payload_bytes for row in rows), 0, rates)
    units = sum(row.calls for row in rows) if plan.data.shards_weights else 0
    return units * OF_UNIT * rates.operation_s + copied


def around_layers_s(row: Collective, plan: Plan, rates: Rates) -> float:
    """Seconds that a host spends around the calls of a layer's collective."""
    return 0.0 if plan.tensor.is_one_dimensional else row.calls * OF_GRID_CALL * rates.operation_s


def keeps_scores(spec: ModelSpec) -> bool:
    """Whether torch computes attention by its formula on a CPU: where groups of queries share keys."""
    return spec.kv_heads not in (0, spec.heads)


def of_microbatches_s(plan: Plan, rates: Rates) -> float:
    """Seconds of a step that a host spends on having several microbatches, whose gradients it sums."""
    if not rates.synchronous or plan.batch.microbatches == 1:
        return 0.0
    blocks = [plan.spec.block(name) for stage in plan.stages_of(0) for name in stage.blocks]
    weights = sum(len(block.parameters) for block in blocks)
    return plan.batch.microbatches * (OF_MICROBATCH + weights) * rates.operation_s
