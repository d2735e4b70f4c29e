"""Seconds of one microbatch of one block on one rank, by pass and by kind of work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import dropwhile
from math import prod

from parallelrun.base.precision import BYTES
from parallelrun.config.schema.cluster_schema import ClusterConfig
from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.contract.tensor_strategy import BACKWARD, FORWARD, RECOMPUTATION
from parallelrun.planner.memory.stack_memory import products_of
from parallelrun.planner.model.model_spec import BlockSpec, LayerSpec
from parallelrun.planner.model.model_spec.attention import ROWS
from parallelrun.planner.model.product import Product
from parallelrun.planner.pieces import sample_sets
from parallelrun.planner.pieces.hosts import stays_in_node
from parallelrun.planner.predict import prediction
from parallelrun.planner.predict.step_time import experts, host, other_blocks, streaming
from parallelrun.planner.predict.step_time.kernels import FP8_CAST, FP8_CASTS, attention_s, product_s, streaming_s
from parallelrun.planner.predict.step_time.links import collective_s
from parallelrun.planner.predict.step_time.offload import OFFLOAD, inputs_s
from parallelrun.planner.predict.step_time.overlap import SLOWED, exposed_s, tensor_s
from parallelrun.planner.predict.step_time.rates import Rates

PRODUCTS, ATTENTION, MEMORY_BOUND, HOST = "products", "attention", "memory-bound", "host"
TENSOR, EXPERT, STATISTICS = "tensor communication", "expert communication", "statistics communication"
CONTEXT = "context communication"
COMPUTED = (PRODUCTS, ATTENTION, MEMORY_BOUND)
Parts = dict[str, float]
Shape = tuple[int, int, int]  # rows, inner, columns of a product

# Bytes of a 16-bit score in attention that keeps them, forward and backward: a kernel for scale, mask and softmax
# (Narayanan et al. 2021, 4.2), and dropout with its mask.
SCORE_BYTES = (9, 11)
BACKWARD_OF_ATTENTION = 2.8  # fused: five products for two, at a lower rate


@dataclass(frozen=True)
class BlockTime:
    """Seconds by kind of work. again: of recomputation, before backward. waits: the seconds of each, in this order, in
    which it waits for rows of experts, which another pass may hide."""

    forward: Parts = field(default_factory=dict)
    backward: Parts = field(default_factory=dict)
    again: Parts = field(default_factory=dict)
    waits: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])


def block_time(block: BlockSpec, plan: Plan, cluster: ClusterConfig, rates: Rates) -> BlockTime | None:
    """Return the time of a block; None if the cluster gives no rate for a link it needs."""
    shapes, linear = list(_shapes(block, plan)), (rates.fp8 if block.kind == "transformer" else None) or rates
    forward, backward = _products(shapes, plan, linear), _products(shapes, plan, linear, backward=True)
    of_experts = experts.shapes(block, plan) if block.kind == "transformer" else None
    grouped = experts.products_s(of_experts, plan, rates) if of_experts else (0.0, 0.0)
    if block.kind == "transformer":
        _add_attention(forward, backward, block, plan, rates)
        for parts, added in zip((forward, backward), grouped):
            parts[PRODUCTS] += added
    else:
        _add_others(forward, backward, block, plan, cluster, rates)
    _add_streaming(forward, backward, shapes, block, plan, rates)
    time = BlockTime(forward, backward, _recomputed(shapes, block, forward, plan, linear))
    calls, checks = [0.0, 0.0], [0.0, 0.0]
    sent_s = cache(partial(collective_s, plan=plan, cluster=cluster, rates=rates))  # many layers send alike
    for kind, parts, row, share in _traffic(block, plan, time):
        crossing = experts.sent(row, plan, cluster) if kind == EXPERT else 1.0
        seconds = sent_s(row, crossing=crossing)
        if seconds is None:
            return None
        if kind == EXPERT and not rates.synchronous:
            seconds *= plan.stack.expert_imbalance
        if rates.synchronous and kind == TENSOR:
            seconds += host.around_layers_s(row, plan, rates)
        parts[kind] = parts.get(kind, 0.0) + share * seconds
        if experts.waits(row, plan, rates):
            time.waits[parts is backward or 2 * (parts is time.again)] += share * seconds
        if parts is not time.again:
            calls[parts is backward] += share * row.calls
            checks[parts is backward] += share * row.calls * host.check_s(prediction.group_size(plan, row.axis), plan)
    for parts, is_backward in ((forward, False), (backward, True)):
        if parts.get(TENSOR) and not rates.synchronous:
            inside = stays_in_node(plan, cluster, "tp")
            parts[TENSOR] = tensor_s(parts[TENSOR], parts[PRODUCTS], plan, is_backward, inside)
    if plan.expert and not rates.synchronous:
        _hide_all_to_alls(time, grouped, shapes, block, plan, linear)
    for parts in (forward, backward, time.again):
        if plan.context and parts.get(CONTEXT) and not rates.synchronous:
            parts[CONTEXT] = plan.context.exposed_s(parts[CONTEXT], parts.get(ATTENTION, 0.0), plan)
    for parts, before in ((forward, ()), (backward, time.again.values())):
        if seconds := inputs_s(block, sum(parts.values()) + sum(before), plan, rates):
            parts[OFFLOAD] = seconds
    _add_host(time, calls, checks, block, plan, rates)
    return time


def _hide_all_to_alls(
    time: BlockTime, grouped: tuple[float, float], shapes: Sequence[Shape], block: BlockSpec, plan: Plan, linear: Rates
) -> None:
    """Leave what no other layer hides of the all-to-alls of experts, or no computation of theirs. grouped: seconds of
    the experts' products (forward, backward); linear: the rates of other products."""
    assert plan.expert
    behind = {layer.name for layer in dropwhile(lambda layer: layer.layer_role != "expert", block.layers)}
    shared = [shape for (layer, _), shape in zip(_dense_layers(block, plan), shapes) if layer.name in behind]
    for number, parts in enumerate((time.forward, time.backward, time.again)):
        sent, is_backward = parts.get(EXPERT, 0.0), number == 1
        if sent and plan.stack.expert_overlap:
            hidden = plan.stack.expert_overlap * sent
            parts[EXPERT] += exposed_s(hidden, sum(parts.get(name, 0.0) for name in COMPUTED)) - hidden
        elif sent and plan.expert.overlap:
            beside = _products(shared, plan, linear, is_backward)[PRODUCTS]
            left = experts.exposed_s(sent, grouped[is_backward], beside, plan.expert.chunks)
            parts[EXPERT] = left + SLOWED * (sent - left)
            time.waits[number] *= parts[EXPERT] / sent


def _add_host(
    time: BlockTime, calls: Sequence[float], checks: Sequence[float], block: BlockSpec, plan: Plan, rates: Rates
) -> None:
    """Add the host's time to issue the operations of a pass, where it exceeds the device's time for them. On CPU, the
    host computes each operation after issuing it, so the two times add up."""
    forward, backward = host.operations(block, plan.spec)
    if plan.mesh.size("tp") > 1 and block.kind == "transformer":
        forward += plan.stack.tensor_operations[0] / plan.stack.operations
        backward += plan.stack.tensor_operations[1] / plan.stack.operations
    again = forward + plan.stack.recompute_operations / plan.stack.operations
    issued = (
        (time.forward, forward, calls[0], checks[0]),
        (time.backward, backward, calls[1], checks[1]),
        (time.again, again, calls[0], checks[0]),
    )
    for parts, number, sent, checking in issued:
        if PRODUCTS not in parts:
            continue  # nothing is computed again, or not all
        if rates.synchronous:
            parts[HOST] = number * rates.operation_s
        else:
            seconds = (plan.stack.operations * number + host.OF_COLLECTIVE * sent) * rates.operation_s + checking
            parts[HOST] = host.waited_s(seconds, sum(parts.values()))


def _traffic(block: BlockSpec, plan: Plan, time: BlockTime) -> Iterator[tuple[str, Parts, Collective, float]]:
    """(kind of work, pass, collective, the part of it that belongs to one microbatch in that pass)."""
    passes = {FORWARD: time.forward, RECOMPUTATION: time.again, BACKWARD: time.backward}
    if plan.mesh.size("tp") > 1:
        for collective in plan.tensor.traffic(block, plan):
            yield TENSOR, passes[collective.during], collective.row, 1.0
    if plan.expert:  # rows are dispatched and combined alike in every pass
        used = [
            time.forward,
            time.backward,
            *([time.again] if plan.runs_again and block.is_recomputed else []),
        ]
        for row in plan.expert.collectives((block,), plan):
            for parts in used:
                yield EXPERT, parts, row, 1 / len(used) / plan.batch.microbatches
    if plan.context:
        in_forward, in_backward = plan.context.traffic(block, plan)
        again = [time.again] if plan.runs_again and block.is_recomputed else []
        for parts in (time.forward, *again):
            yield from ((CONTEXT, parts, row, 1.0) for row in in_forward)
        yield from ((CONTEXT, time.backward, row, 1.0) for row in in_backward)
    for row in sample_sets.collectives((block,), plan):
        for parts in (time.forward, time.backward):
            yield STATISTICS, parts, row, 1 / 2 / plan.batch.microbatches


def _recomputed(shapes: Sequence[Shape], block: BlockSpec, forward: Parts, plan: Plan, rates: Rates) -> Parts:
    """Return the time of recomputation in backward. Its host time and collectives are added later."""
    if not block.is_recomputed or plan.recompute == "none":
        return {}
    if plan.recompute == "selective":
        if plan.stack.selective == "attention":
            return {ATTENTION: forward[ATTENTION]}
        if plan.stack.selective == "elementwise":
            return {MEMORY_BOUND: streaming.recomputed(plan, forward[MEMORY_BOUND])}
        sizes = [weight.numel for _, weight in products_of(block)]
        share = sum(sizes[1::2]) / sum(sizes)
        return {PRODUCTS: share * forward[PRODUCTS], MEMORY_BOUND: forward[MEMORY_BOUND]}
    again = dict(forward)
    if plan.stack.stops_early and shapes:
        again[PRODUCTS] -= product_s(*shapes[-1], BYTES[plan.precision.compute], rates)
    return again


def _products(shapes: Sequence[Shape], plan: Plan, rates: Rates, backward: bool = False) -> Parts:
    width, seconds = BYTES[plan.precision.compute], 0.0
    for rows, inner, columns in shapes:
        if backward:
            seconds += product_s(rows, columns, inner, width, rates) + product_s(columns, rows, inner, width, rates)
        else:
            seconds += product_s(rows, inner, columns, width, rates)
    return {PRODUCTS: seconds}


def _dense_layers(block: BlockSpec, plan: Plan) -> Iterator[tuple[LayerSpec, Product]]:
    """The layers that multiply, without convolutions and experts, which are counted apart."""
    for layer in block.layers:
        product = None if layer.areas else plan.tensor.product_of(layer, plan)
        if product and not product.lookup and not layer.layer_role.startswith(("expert", "router", "shared")):
            yield layer, product


def _shapes(block: BlockSpec, plan: Plan) -> Iterator[Shape]:
    """Yield the shape of every matrix product that a rank computes in forward."""
    for layer, product in _dense_layers(block, plan):
        rows, _ = product.gathered_x.local(plan.num_rows, layer.in_features, plan.mesh.sizes)
        shape = (layer.out_features, layer.in_features)
        columns, inner = product.gathered_weight.local_shape(shape, plan.mesh.sizes, {})
        yield rows, layer.in_features if product.panels else inner, columns


def _add_attention(forward: Parts, backward: Parts, block: BlockSpec, plan: Plan, rates: Rates) -> None:
    """Attention, an equal share for each tp rank, of the cp ranks the slowest's."""
    tp, width, spec = plan.mesh.size("tp"), BYTES[plan.precision.compute], plan.spec
    attention = block.attention
    attended = attention.attended or spec.seq
    head_size = spec.qk_features // max(1, spec.heads)
    explicit = attention.softcap is not None or (attention.sinks and attention.window is not None)
    if plan.stack.fused_attention and not explicit and not (rates.synchronous and host.keeps_scores(spec)):
        causal = spec.is_causal  # which halves the work
        computed = 4.0 * plan.num_rows * attended * spec.qk_features / (2 if causal else 1)  # zeros behind values too
        most = max(1.0, rates.product_efficiency / rates.attention_efficiency)  # its products are no faster than others
        computed /= tp * min(plan.stack.attention, most)
        forward[ATTENTION] = attention_s(computed, attended, head_size, causal, rates)
        backward[ATTENTION] = BACKWARD_OF_ATTENTION * forward[ATTENTION]
    else:
        heads = max(1, plan.batch.micro_batch * spec.heads // tp)
        keys = min(spec.seq, attention.window + ROWS) if explicit and attention.window else spec.seq
        moved = [streaming_s(each * width / 2 * heads * plan.seq * keys, 2, rates) for each in SCORE_BYTES]
        multiplied = product_s(plan.seq, head_size, keys, width, rates, heads)
        multiplied += product_s(plan.seq, keys, head_size, width, rates, heads)
        forward[ATTENTION] = multiplied + moved[0]
        backward[ATTENTION] = 2 * multiplied + moved[1]
    if plan.context:
        slowest = plan.context.imbalance(plan, attention.window)
        forward[ATTENTION], backward[ATTENTION] = slowest * forward[ATTENTION], slowest * backward[ATTENTION]


def _add_others(
    forward: Parts, backward: Parts, block: BlockSpec, plan: Plan, cluster: ClusterConfig, rates: Rates
) -> None:
    """Add the FLOPs of a block outside the layers with known shapes: convolutions and attention, of which each tp rank
    that has some of the channels or heads computes an equal share, and other products of a user's module."""
    samples = plan.batch.micro_batch / plan.mesh.size("cp")
    dense = 2.0 * plan.num_rows * sum(layer.in_features * layer.out_features for layer, _ in _dense_layers(block, plan))
    left = samples * (block.forward_flops - block.convolution_flops - block.attention_flops) - dense
    products = left / rates.product_efficiency if left > 1e-3 * dense else 0.0
    if block.convolution_flops:
        assert cluster.convolution_efficiency, "cluster.convolution_efficiency is not given"
        split = [x for x in block.layers if x.areas and plan.tensor.product_of(x, plan)]
        of_others = (1 - 1 / plan.mesh.size("tp")) * sum(x.convolution_flops for x in split)
        products += samples * (block.convolution_flops - of_others) / cluster.convolution_efficiency
    forward[PRODUCTS] += products / rates.peak_flops
    backward[PRODUCTS] += 2 * products / rates.peak_flops
    if block.attention_flops:
        tp = plan.mesh.size("tp") if any(layer.layer_role == "row_parallel" for layer in block.layers) else 1
        seconds = samples * block.attention_flops / tp / (rates.peak_flops * rates.attention_efficiency)
        forward[ATTENTION], backward[ATTENTION] = seconds, BACKWARD_OF_ATTENTION * seconds


def _add_streaming(
    forward: Parts, backward: Parts, shapes: Sequence[Shape], block: BlockSpec, plan: Plan, rates: Rates
) -> None:
    if block.kind in ("transformer", "head", "embedding"):
        both = streaming.of_block(block, plan, rates)
    else:
        both = other_blocks.streaming(block, plan, rates)
    dense, rows, held = sum(inner * columns for _, inner, columns in shapes), (0.0, 0.0), 0
    if of_experts := experts.shapes(block, plan):
        held = sum(prod(matrix) for matrix in of_experts.matrices)
        rows = (0.0, 0.0) if rates.synchronous else experts.rows_s(of_experts, plan, rates)
    weights = streaming.of_weights(dense + held, plan, rates)
    casts = _casts_s(block, shapes, plan, rates) if rates.fp8 and block.kind == "transformer" else (0.0, 0.0)
    if plan.expert:  # the gradients of a chunk's weights are added to those of others
        sums = 3 * BYTES[plan.precision.compute] * held * (plan.expert.chunks - 1)
        rows = rows[0], rows[1] + streaming_s(sums, 0, rates)
    forward[MEMORY_BOUND], backward[MEMORY_BOUND] = (sum(seconds) for seconds in zip(both, weights, rows, casts))


def _casts_s(block: BlockSpec, shapes: Sequence[Shape], plan: Plan, rates: Rates) -> tuple[float, float]:
    """Seconds (forward, backward) in which operands are rounded to fp8: inputs, and gradients of results, before they
    are gathered; without copies in fp8, all operands of each product. Weights with copies are left out (`copies_s`)."""
    if not plan.stack.fp8_copies:
        operands = sum((rows + columns) * inner for rows, inner, columns in shapes)
        results = operands + sum(rows * columns for rows, _, columns in shapes)
        return streaming_s(FP8_CASTS[0] * operands, 6, rates), streaming_s(FP8_CASTS[1] * results, 6, rates)
    inputs = results = 0
    for layer, product in _dense_layers(block, plan):
        inputs += prod(product.x.local(plan.num_rows, layer.in_features, plan.mesh.sizes))
        results += prod(product.y.local(plan.num_rows, layer.out_features, plan.mesh.sizes))
    if plan.stack.fp8 == "all" and (of_experts := experts.shapes(block, plan)):
        (_, _, first), (_, _, last) = of_experts.matrices[0], of_experts.matrices[-1]
        inputs += round(of_experts.num_rows * (first + last))
        results += round(of_experts.num_rows * sum(outputs for _, outputs, _ in of_experts.matrices))
    return streaming_s(FP8_CAST * inputs, 2, rates), streaming_s(FP8_CAST * results, 2, rates)
