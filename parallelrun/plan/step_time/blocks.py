"""Seconds of one microbatch of one block on one rank, by pass and by kind of work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from parallelrun.config.schema import ClusterConfig
from parallelrun.model_spec import BlockSpec, LayerSpec
from parallelrun.plan import sample_sets
from parallelrun.plan.step_time import host, other_blocks
from parallelrun.plan.step_time.kernels import attention_s, product_s, streaming_s
from parallelrun.plan.step_time.links import collective_s
from parallelrun.plan.step_time.rates import Rates
from parallelrun.plan.structure import Collective, Plan
from parallelrun.plan.tensor_strategy import BACKWARD, FORWARD, RECOMPUTATION
from parallelrun.precision import BYTES
from parallelrun.product import Product

PRODUCTS, ATTENTION, MEMORY_BOUND, HOST = "products", "attention", "memory-bound", "host"
TENSOR, EXPERT, STATISTICS = "tensor communication", "expert communication", "statistics communication"
Parts = dict[str, float]

# Bytes per element that the simple kernels of a transformer block read and write in forward, for 16-bit numbers: norms,
# dropout, residual sums (22 per element of the residual stream) and the activation function (5 per element it reads).
# Korthikanti et al. 2022 count the tensors.
RESIDUAL_BYTES, ACTIVATION_BYTES = 22, 5
# Unfused attention reads and writes each score so often: scale, mask, softmax, dropout.
SCORE_BYTES = 14
LOGIT_BYTES, LOGIT_GRADIENT_BYTES = 14, 8  # of a logit: softmax and loss in fp32
EMBEDDING_BYTES = 8
# Operations that torch issues, forward and backward; on small tensors their number decides.
OPERATIONS = {"transformer": (45, 50), "head": (8, 8), "embedding": (4, 4)}
OPERATIONS_OF_TENSOR_PARALLEL = 8
BACKWARD_OF_ATTENTION = 2.8  # fused: five products for two, at a lower rate
BACKWARD_OF_STREAMING = 1.5


@dataclass(frozen=True)
class BlockTime:
    """Seconds by kind of work. again: of recomputation, before backward."""

    forward: Parts = field(default_factory=dict)
    backward: Parts = field(default_factory=dict)
    again: Parts = field(default_factory=dict)


def block_time(block: BlockSpec, plan: Plan, cluster: ClusterConfig, rates: Rates, fused: bool) -> BlockTime | None:
    """Return the time of a block; None if the cluster gives no rate for a link it needs. fused: attention keeps no
    scores."""
    forward, backward = _products(block, plan, rates), _products(block, plan, rates, backward=True)
    if block.kind == "transformer":
        _add_attention(forward, backward, block, plan, rates, fused)
    else:
        _add_convolutions(forward, backward, block, plan, cluster, rates)
    _add_streaming(forward, backward, block, plan, rates)
    several = plan.mesh.size("tp") > 1
    for parts, issued in zip((forward, backward), OPERATIONS.get(block.kind, (4, 4))):
        operations = issued + OPERATIONS_OF_TENSOR_PARALLEL * several
        busy = sum(parts.values())
        parts[HOST] = max(0.0, operations * rates.operation_s - busy)
    if rates.synchronous:
        for parts, number in zip((forward, backward), host.operations(block, plan.spec)):
            parts[HOST] = number * rates.operation_s
    time = BlockTime(forward, backward, _recomputed(block, forward, plan, fused))
    for kind, parts, row, share in _traffic(block, plan, time):
        seconds = collective_s(row, plan, cluster, rates)
        if seconds is None:
            return None
        parts[kind] = parts.get(kind, 0.0) + share * seconds
    return time


def _traffic(block: BlockSpec, plan: Plan, time: BlockTime) -> Iterator[tuple[str, Parts, Collective, float]]:
    """(kind of work, pass, collective, the part of it that belongs to one microbatch in that pass)."""
    passes = {FORWARD: time.forward, RECOMPUTATION: time.again, BACKWARD: time.backward}
    if plan.mesh.size("tp") > 1:
        for one in plan.tensor.traffic(block, plan):
            yield TENSOR, passes[one.during], one.row, 1.0
    if plan.expert:  # rows are dispatched and combined alike in every pass
        used = [
            time.forward,
            time.backward,
            *([time.again] if plan.recompute == "full" and block.is_recomputed else []),
        ]
        for row in plan.expert.collectives((block,), plan):
            for parts in used:
                yield EXPERT, parts, row, 1 / len(used) / plan.batch.microbatches
    for row in sample_sets.collectives((block,), plan):
        for parts in (time.forward, time.backward):
            yield STATISTICS, parts, row, 1 / 2 / plan.batch.microbatches


def _recomputed(block: BlockSpec, forward: Parts, plan: Plan, fused: bool) -> Parts:
    if not block.is_recomputed or plan.recompute == "none":
        return {}
    if plan.recompute == "selective":
        return {} if fused else {ATTENTION: forward.get(ATTENTION, 0.0)}
    return dict(forward)


def _products(block: BlockSpec, plan: Plan, rates: Rates, backward: bool = False) -> Parts:
    width, seconds = BYTES[plan.precision.compute], 0.0
    for rows, inner, columns in _shapes(block, plan):
        if backward:
            seconds += product_s(rows, columns, inner, width, rates) + product_s(columns, rows, inner, width, rates)
        else:
            seconds += product_s(rows, inner, columns, width, rates)
    return {PRODUCTS: seconds}


def _dense_layers(block: BlockSpec, plan: Plan) -> Iterator[tuple[LayerSpec, Product]]:
    """The layers that multiply, without experts, which are counted apart."""
    for layer in block.layers:
        product = plan.tensor.product_of(layer, plan)
        if product and not product.lookup and not layer.layer_role.startswith(("expert", "router")):
            yield layer, product


def _shapes(block: BlockSpec, plan: Plan) -> Iterator[tuple[int, int, int]]:
    """(rows, inner, columns) of every product that a rank computes in forward."""
    for layer, product in _dense_layers(block, plan):
        rows, _ = product.gathered_x.local(plan.num_rows, layer.in_features, plan.mesh.sizes)
        shape = (layer.out_features, layer.in_features)
        columns, inner = product.gathered_weight.local_shape(shape, plan.mesh.sizes, {})
        yield rows, layer.in_features if product.panels else inner, columns


def _add_attention(forward: Parts, backward: Parts, block: BlockSpec, plan: Plan, rates: Rates, fused: bool) -> None:
    """Attention, an equal share for each tp rank; what FLOPs then remain are those of experts."""
    tp, width, spec = plan.mesh.size("tp"), BYTES[plan.precision.compute], plan.spec
    flops = 4.0 * plan.num_rows * spec.seq * spec.hidden
    if fused:
        computed = flops if spec.mask_token is not None else flops / 2  # a causal mask halves the work
        forward[ATTENTION] = attention_s(computed / tp, rates)
        backward[ATTENTION] = BACKWARD_OF_ATTENTION * forward[ATTENTION]
    else:
        scores = plan.batch.micro_batch * spec.heads * spec.seq**2 / tp
        moved = streaming_s(SCORE_BYTES * width / 2 * scores, 4, rates)
        forward[ATTENTION] = attention_s(flops / tp, rates) + moved
        backward[ATTENTION] = 2 * attention_s(flops / tp, rates) + moved
    dense = sum(2.0 * plan.num_rows * layer.in_features * layer.out_features for layer, _ in _dense_layers(block, plan))
    of_experts = block.forward_flops * plan.batch.micro_batch - dense - flops
    if of_experts > 1e-3 * flops:
        seconds = of_experts / tp / (rates.peak_flops * rates.product_efficiency)
        forward[PRODUCTS] += seconds
        backward[PRODUCTS] += 2 * seconds


def _add_convolutions(
    forward: Parts, backward: Parts, block: BlockSpec, plan: Plan, cluster: ClusterConfig, rates: Rates
) -> None:
    """What of a block's FLOPs no matrix product does."""
    dense = sum(2.0 * plan.num_rows * layer.in_features * layer.out_features for layer, _ in _dense_layers(block, plan))
    left = block.forward_flops * plan.batch.micro_batch - dense
    if left > 1e-3 * dense:
        seconds = other_blocks.convolution_s(left, cluster, rates)
        forward[PRODUCTS] += seconds
        backward[PRODUCTS] += 2 * seconds


def _add_streaming(forward: Parts, backward: Parts, block: BlockSpec, plan: Plan, rates: Rates) -> None:
    tp, width, spec = plan.mesh.size("tp"), BYTES[plan.precision.compute], plan.spec
    rows, features = plan.tensor.activation_layout(None, plan).local(plan.num_rows, spec.hidden, plan.mesh.sizes)
    if block.kind == "transformer":
        moved = (RESIDUAL_BYTES * rows * features + ACTIVATION_BYTES * plan.num_rows * spec.ffn / tp) * width / 2
        forward[MEMORY_BOUND] = streaming_s(moved, 8, rates)
        backward[MEMORY_BOUND] = BACKWARD_OF_STREAMING * forward[MEMORY_BOUND]
    elif block.kind == "head":
        logits = plan.num_rows * spec.vocab / tp
        forward[MEMORY_BOUND] = streaming_s(LOGIT_BYTES * logits, 6, rates)
        backward[MEMORY_BOUND] = streaming_s(LOGIT_GRADIENT_BYTES * logits, 3, rates)
    elif block.kind != "embedding":
        forward[MEMORY_BOUND], backward[MEMORY_BOUND] = other_blocks.streaming(block, plan, rates)
    else:
        for parts in (forward, backward):
            parts[MEMORY_BOUND] = streaming_s(EMBEDDING_BYTES * rows * features, 4, rates)
