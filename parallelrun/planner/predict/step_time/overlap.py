"""Exposed time of a communication: the part that no computation hides.

A communication that runs beside a computation takes multiprocessors and memory bandwidth from it: the computation is
slowed down by a part of what it hides.
"""

from __future__ import annotations

from functools import partial

from parallelrun.planner.contract.plan import Plan

# Of hidden communication, the part by which it slows down the computation that hides it (Galvatron: 0.1 to 0.3).
SLOWED = 0.1


def exposed_s(communication: float, computation: float, pieces: float = 1.0, slowed: float = SLOWED) -> float:
    """Seconds by which a communication makes a computation beside it longer. Both in seconds; never negative.

    pieces: in which both run, where a piece can be sent only while the next one is computed; 1: side by side. slowed:
    the part of what is hidden that the computation takes longer.
    """
    window = computation * (1 - 1 / pieces) if pieces > 1 else computation
    return communication - (1 - slowed) * min(communication, window)


def tensor_s(communication: float, products: float, plan: Plan, backward: bool, inside: bool) -> float:
    """Seconds of a block's tensor communication that no product of the same pass hides.

    This program sends the gradient of a layer's input while it computes that of the weights, which is half of the
    products of a backward pass (`strategy.tensor.overlap`). With `tensor_overlap`, the gathers and reduce-scatters of
    sequence parallelism are cut into a piece for each rank and run under the products that they belong to (userbuffers
    of Transformer Engine, torch's asynchronous tensor parallelism), where a group is inside a node: both write into the
    memory of other devices (NVIDIA/TransformerEngine, issue 1071).
    """
    if plan.stack.tensor_overlap and plan.tensor.sequence_parallel and inside:
        hidden = plan.stack.tensor_overlap * communication
        return communication - hidden + exposed_s(hidden, products, plan.mesh.size("tp"))
    if backward and plan.stack.gradient_overlap and plan.tensor.overlap and not plan.pipeline.splits_backward:
        return exposed_s(communication, products / 2)
    return communication


def data_s(gathers: float, sums: float, shared: float, forward: float, backward: float, plan: Plan) -> float:
    """Seconds by which the data strategy's communication makes a step longer, beside backward and forward.

    gathers, sums: of weights and of gradients in a step. shared: by which they slow down what hides them, if all of
    them are hidden. forward, backward: seconds in which a rank computes one microbatch. Gradients travel under the last
    microbatch's backward pass, each block's while the one before it computes, or under every one where all of them
    reduce; the new weights of a sharded optimizer under the first forward pass. Sharded weights (FSDP) do so too, or in
    both passes of every microbatch where they are gathered again.
    """
    if not (plan.stack.data_overlap and plan.data.overlaps_backward):
        return gathers + sums
    exposed, total = _exposed_s(gathers, sums, forward, backward, plan), gathers + sums
    return exposed + (total - exposed) * min(1.0, shared / total) if total else 0.0


def _exposed_s(gathers: float, sums: float, forward: float, backward: float, plan: Plan) -> float:
    """The seconds of `data_s` without those by which computation is slowed down."""
    alone = partial(exposed_s, slowed=0.0)
    blocks = max(1.0, len(plan.spec.blocks) / plan.mesh.size("pp"))
    if not plan.data.shards_weights:
        late = alone(gathers, forward, blocks) if plan.stack.gather_overlap else gathers
        return alone(sums, plan.data.num_exchanges(plan) * backward, blocks) + late
    form, count = plan.data.exchange_form(plan), plan.batch.microbatches
    reducing = 1 if form.scatters_once else count  # backward passes
    if not form.gathers_again:
        return alone(gathers, forward, blocks) + alone(sums, reducing * backward, blocks)
    each = gathers / 2 / count
    rest = alone((count - reducing) * each, (count - reducing) * backward, blocks)
    in_reducing = alone(reducing * each + sums, reducing * backward, blocks)
    return alone(gathers / 2, count * forward, blocks) + rest + in_reducing
