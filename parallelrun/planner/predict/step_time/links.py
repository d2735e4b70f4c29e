"""Seconds of a predicted collective on the links of a cluster: a latency for each call, and bytes over the rate."""

from __future__ import annotations

from math import ceil, log2, pow

from parallelrun.base.precision import BYTES
from parallelrun.config.schema.cluster_schema import ClusterConfig
from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.pieces.hosts import ranks_in_node, stays_in_node
from parallelrun.planner.predict import prediction
from parallelrun.planner.predict.step_time.kernels import FP8_CAST
from parallelrun.planner.predict.step_time.rates import Rates

MESSAGES = ("send", "recv")
GATHERS = ("all_gather", "reduce_scatter")
OF_GATHERS = 0.9  # of the rate of an all-reduce (SimuMax, B200: 0.67 of the link to 0.74; H100: 320 GB/s, autoparallel)
# Of the multiprocessors, those that a collective over NVLink takes from products (Calculon).
CHANNELS = 0.15
MOVED = 2  # bytes of a device's memory that are read or written for each byte sent: one arrives as another leaves
SERIAL = 0.5  # the part of the shorter step of a collective in two steps that runs alone


def collective_s(
    row: Collective, plan: Plan, cluster: ClusterConfig, rates: Rates, crossing: float = 1.0
) -> float | None:
    """Seconds that all calls of a row take; None if its group leaves a node and the cluster gives no rate for that.

    crossing: the part of its bytes between nodes that travel there, where a node passes them on to several ranks.
    """
    size = prediction.group_size(plan, row.axis)
    if size == 1 or not row.calls:
        return 0.0
    is_message = row.operation in MESSAGES
    inside = stays_in_node(plan, cluster, row.axis)
    in_node = size if inside else 1 if is_message else ranks_in_node(plan, cluster, row.axis)
    latency = row.calls * latency_s(row.operation, 2 if is_message else size, in_node, rates)
    if inside:
        return prediction.wire_bytes(row, size) / intra_bytes_s(row, rates) + latency
    if rates.inter_bytes_s is None:
        return None
    if is_message:
        return prediction.wire_bytes(row, size) / min(rates.intra_bytes_s, rates.inter_bytes_s) + latency
    return bytes_s(row, size, in_node, rates, crossing) + latency


def intra_bytes_s(row: Collective, rates: Rates) -> float:
    """Bytes a second of a rank inside a node: a gather or a reduce-scatter reaches less than an all-reduce."""
    return rates.intra_bytes_s * (OF_GATHERS if row.operation in GATHERS else 1.0)


def bytes_s(row: Collective, size: int, in_node: int, rates: Rates, crossing: float = 1.0) -> float:
    """Seconds in which the bytes of a collective over several nodes travel.

    In steps: the ranks on a node exchange parts, then each sends its part between nodes through a port of its own (or
    all-to-all: as much as the other nodes' ranks need), and both steps run half beside each other (ml-engineering:
    "between the larger and the sum"). Never slower than a ring through all ranks at the rate of a node's ports, which
    carry the same data for all of its ranks, but those of an all-to-all for each rank its own. A port is slower the
    more nodes the network connects, by `cluster.congestion`.
    """
    assert rates.inter_bytes_s is not None
    nodes = size // in_node
    inside_rate, port = intra_bytes_s(row, rates), rates.inter_bytes_s * pow(nodes, -rates.congestion)
    ports = port if row.operation == "all_to_all" else in_node * port
    flat = prediction.wire_bytes(row, size) / min(inside_rate, ports)
    if in_node == 1 or nodes * in_node != size:
        return flat
    inside_s = prediction.wire_bytes(row, in_node) / inside_rate
    between_s = crossing * prediction.wire_bytes(row, nodes) / ports
    return min(flat, max(inside_s, between_s) + SERIAL * min(inside_s, between_s))


def latency_s(operation: str, size: int, in_node: int, rates: Rates) -> float:
    """Seconds that a collective of `size` ranks takes however little it sends, `in_node` of them on each node.

    NCCL sums small tensors over a tree of nodes, up and down, with a chain in each node (its cost model:
    nccl/src/graph/tuning.cc). Else data pass every rank around a ring, which has as many links between nodes as there
    are nodes. A piece of data passes all links but one, and the slowest piece passes all of those between nodes, if any
    link is inside a node.
    """
    nodes = max(1, size // max(1, in_node))
    if operation == "all_reduce":
        return rates.collective_s + 2 * (ceil(log2(nodes)) * rates.message_s + (in_node - 1) * rates.hop_s)
    between = nodes if nodes > 1 and in_node > 1 else nodes - 1
    return rates.collective_s + between * rates.message_s + (size - 1 - between) * rates.hop_s


def sharing_s(row: Collective, plan: Plan, rates: Rates) -> float:
    """Seconds by which computation beside a collective of FSDP takes longer, which runs throughout a step: both share
    multiprocessors and memory."""
    num_bytes = prediction.wire_bytes(row, prediction.group_size(plan, row.axis))
    return num_bytes * (CHANNELS / rates.intra_bytes_s + MOVED / rates.memory_bytes_s)


def copies_s(row: Collective, plan: Plan, rates: Rates) -> float:
    """Seconds in which FSDP copies a message's weights out of its buffer (and rounds them for products in fp8), or
    its gradients, rounded until then, into one. torch's FSDP2 does so among its computations
    (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py: `split_with_sizes_copy`, `chunk_cat`)."""
    if (
        rates.synchronous
        or not (plan.data.shards_weights and plan.stack.copied_buffers)
        or row.operation not in GATHERS
    ):
        return 0.0
    read = 1.0 if row.operation == "all_gather" else BYTES[plan.precision.compute] / BYTES[plan.precision.reduce]
    rounds = rates.fp8 and plan.stack.fp8_copies and row.operation == "all_gather"
    casts = FP8_CAST / BYTES[plan.precision.compute] if rounds else 0.0
    return row.payload_bytes * (1 + read + casts) / rates.memory_bytes_s
