"""Seconds that a layer with experts takes beside its dense layers: grouped products and what moves routed rows.

Products are of the rank with the most rows, on which the others of its ep group wait (`stack.expert_imbalance`).
"""

from __future__ import annotations

from typing import NamedTuple

from parallelrun.base.precision import BYTES
from parallelrun.config.schema.cluster_schema import ClusterConfig
from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.contract.parameters import block_layouts
from parallelrun.planner.contract.plan import Plan, once
from parallelrun.planner.model.model_spec import BlockSpec
from parallelrun.planner.pieces.hosts import ranks_in_node
from parallelrun.planner.predict import prediction
from parallelrun.planner.predict.step_time.kernels import product_s, streaming_s
from parallelrun.planner.predict.step_time.rates import Rates

OF_GROUPED = 0.85  # of the rate of one product, for those of all experts in one kernel (SimuMax, A100: 0.61 to 0.72)
# Bytes per element of a routed row in 16 bits, forward and backward: it is put into the order of experts, and their
# results back into that of tokens, weighted and added up; backward also reads both for the weights' gradients.
ROW_BYTES = (10, 14)
ROWS = "experts"  # purpose of the all-to-alls of rows


class ExpertShapes(NamedTuple):
    """Of a rank: routed rows of an expert under an even load, and its matrices (experts, outputs, inputs)."""

    rows: float
    matrices: tuple[tuple[int, int, int], ...]

    @property
    def num_rows(self) -> float:
        return self.rows * self.matrices[0][0]


def shapes(block: BlockSpec, plan: Plan) -> ExpertShapes | None:
    """The products of a block's experts on a rank; None without experts.

    Rows follow from the FLOPs: each tp rank computes an equal share, of all tokens with a part of each expert or of a
    part of the tokens with complete experts.
    """

    def compute() -> ExpertShapes | None:
        layouts, sizes = block_layouts(block.name, plan), plan.mesh.sizes
        pairs = [(spec, layout) for spec, layout in zip(block.parameters, layouts) if spec.layer_role == "expert"]
        local = [layout.local_shape(spec.shape, sizes, {}) for spec, layout in pairs if len(spec.shape) == 3]
        if not local or plan.spec.router is None:
            return None
        matrices = tuple((experts, outputs, inputs) for experts, outputs, inputs in local)
        whole = sum(spec.shape[1] * spec.shape[2] for spec, _ in pairs if len(spec.shape) == 3)
        each = sum(outputs * inputs for _, outputs, inputs in matrices)
        assignments = plan.num_rows * plan.spec.router.top_k * whole / plan.mesh.size("tp")  # in weights of an expert
        return ExpertShapes(assignments / (matrices[0][0] * each), matrices)

    return once(plan.blocks_cache, ("expert shapes", plan.spec.first_alike[block.name]), compute)


def products_s(of_experts: ExpertShapes, plan: Plan, rates: Rates) -> tuple[float, float]:
    """Seconds (forward, backward) of the experts' products of one microbatch, whose weights are read once each."""
    width, forward, backward = BYTES[plan.precision.compute], 0.0, 0.0
    # A rank with all experts has all rows.
    balance, chunks = (plan.stack.expert_imbalance, plan.expert.chunks) if plan.expert else (1.0, 1)
    rows = max(1, round(of_experts.rows * balance / chunks))
    rates = rates.fp8 if rates.fp8 and plan.stack.fp8 == "all" else rates
    for count, outputs, inputs in of_experts.matrices:
        forward += product_s(rows, inputs, outputs, width, rates, count)
        backward += product_s(rows, outputs, inputs, width, rates, count)
        backward += product_s(outputs, rows, inputs, width, rates, count)
    return chunks * forward / OF_GROUPED, chunks * backward / OF_GROUPED


def exposed_s(sent: float, computed: float, beside: float, chunks: int) -> float:
    """Seconds of a pass's all-to-alls that no computation of their layer hides, of `sent` seconds.

    All chunks' rows are being sent while the shared expert computes for `beside` seconds; a chunk's results are sent
    back while the experts, which compute for `computed` seconds in all, work on the next chunk.
    """
    each, computing, sending = sent / 2 / chunks, beside, sent / 2
    for chunk in range(1, chunks + 1):
        computing = max(computing, chunk * each) + computed / chunks
        sending = max(sending, computing) + each
    return sending - computed - beside


def rows_s(of_experts: ExpertShapes, plan: Plan, rates: Rates) -> tuple[float, float]:
    """Seconds (forward, backward) in which routed rows are reordered."""
    elements = of_experts.num_rows * plan.spec.hidden * BYTES[plan.precision.compute] / 2
    forward, backward = (streaming_s(num_bytes * elements, 4, rates) for num_bytes in ROW_BYTES)
    return forward, backward


def are_rows(row: Collective) -> bool:
    """Whether a collective is an all-to-all of rows."""
    return row.operation == "all_to_all" and row.purpose == ROWS


def waits(row: Collective, plan: Plan, rates: Rates) -> bool:
    """Whether a pass waits for a collective where a pass of another stage may compute."""
    hides = plan.expert is not None and plan.expert.overlap and not plan.stack.expert_overlap
    return hides and are_rows(row) and not rates.synchronous


def sent(row: Collective, plan: Plan, cluster: ClusterConfig) -> float:
    """The part of an all-to-all's bytes between hosts that the program sends: all, or a token's row once a host.

    DeepEP sends a row to each other host that has some of its experts, whose ranks pass it on. Of top_k choices among
    n hosts, n (1 - (1 - 1/n) ** top_k) are different ones; a router with limited groups chooses among fewer.
    """
    size = prediction.group_size(plan, row.axis)
    hosts = size // ranks_in_node(plan, cluster, row.axis)
    if not plan.stack.rows_once_a_host or hosts < 2 or plan.spec.router is None or not are_rows(row):
        return 1.0
    router = plan.spec.router
    different = hosts * (1 - (1 - 1 / hosts) ** router.top_k)
    return min(1.0, min(different, hosts * router.topk_group / router.n_group) / router.top_k)
