"""The bytes of one block in its backward pass, from what each of its layers needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from parallelrun.base.precision import BYTES
from parallelrun.planner.contract.parameters import block_dtypes, uses_rounded
from parallelrun.planner.contract.plan import Plan, once
from parallelrun.planner.contract.tensor_strategy import LayerBackward
from parallelrun.planner.memory.stack_memory import of_stack, saved_plan
from parallelrun.planner.model.model_spec import MEASURED
from parallelrun.planner.model.model_spec.layers import AHEAD


@dataclass(frozen=True)
class BackwardBlock:
    """The bytes of a block in its backward pass.

    kept: saved by every microbatch in flight. passes: its layers in forward order. again: saved tensors that are
    recomputed first. forward: what recomputing them needs besides. on_host: saved in host memory. beside: what is there
    during all of the pass. sending: of rows that are on their way to or from experts.
    """

    kept: int
    passes: tuple[LayerBackward, ...]
    again: int = 0
    forward: int = 0
    on_host: int = 0
    beside: int = 0
    sending: int = 0

    @property
    def apart(self) -> int:
        """Bytes from a pass for input gradients to that for weights, beyond `kept`."""
        return self.again + sum(layer.reads for layer in self.passes)

    def working_bytes(self, accumulates: bool) -> int:
        """The peak of the pass beyond `kept`.

        accumulates: weight gradients are kept until the pass ends; else each is added to a sum and freed.
        """
        return max([self.again + self.beside + self.forward, *self.pass_bytes(accumulates)])

    def pass_bytes(self, accumulates: bool) -> list[int]:
        """The bytes beyond `kept` in each layer's pass, from the last layer on."""
        freed, produced, sizes = 0, self.again + self.beside, []
        for layer in reversed(self.passes):
            sizes.append(layer.arriving + layer.giving + layer.scratch + layer.of_weights + produced - freed)
            produced += layer.weights if accumulates else 0
            freed += layer.kept
        return sizes

    @property
    def input_bytes(self) -> int:
        """The peak of the pass for input gradients alone, beyond `kept`, of which it frees nothing."""
        most, reads = self.forward, 0
        for layer in reversed(self.passes):
            most = max(most, reads + layer.arriving + layer.giving + layer.scratch)
            reads += layer.reads
        return self.again + most

    def least_bytes(self, plan: Plan) -> int:
        """A lower bound of `working_bytes`: with every weight's gradient in the compute dtype alone, the least that any
        data strategy needs."""
        stored, compute = BYTES[plan.precision.stored], BYTES[plan.precision.compute]
        if stored == compute:
            return self.working_bytes(accumulates=False)
        most, freed = self.forward, 0
        for layer in reversed(self.passes):
            beside = layer.scratch + layer.of_weights - layer.weights
            weights = max(beside, layer.weights * compute // stored)
            most = max(most, layer.arriving + layer.giving + weights - freed)
            freed += layer.kept
        return self.again + self.beside + most


def backward_blocks(names: Sequence[str], plan: Plan, receives: bool) -> list[BackwardBlock]:
    """The blocks of a stage. receives: its input comes from another stage, and never waits on the host."""
    alike, rounded = plan.spec.first_alike, keeps_rounded(plan)
    blocks = {alike[name]: backward_block(name, plan, rounded) for name in dict.fromkeys(map(alike.__getitem__, names))}
    in_order = [blocks[alike[name]] for name in names]
    if plan.recompute == "offload":
        if receives:
            in_order[0] = backward_block(names[0], plan.sharing(recompute="full"), rounded)
        first = next((i for i, block in enumerate(in_order) if block.on_host), 0)  # has none to bring back before it
        in_order[first] = replace(in_order[first], beside=in_order[first].beside - in_order[first].on_host)
    return in_order


def keeps_rounded(plan: Plan) -> bool:
    """Whether a second forward rounds weights and keeps them: not gathered ones, nor where backward is split
    (`recompute.KEPT`)."""
    rounds = uses_rounded(plan) and not plan.pipeline.splits_backward
    gathered = plan.data.shards_weights and plan.data.exchange_form(plan).gathers_rounded
    return plan.runs_again and rounds and not gathered


def backward_block(name: str, plan: Plan, rounded: bool) -> BackwardBlock:
    """The block's backward pass, computed once for equal blocks; the last block also computes the loss. rounded: see
    `keeps_rounded`."""

    def compute() -> BackwardBlock:
        block = plan.spec.block(name)
        as_saved = saved_plan(plan)
        passes = plan.tensor.layer_backwards(block, as_saved)
        extra = plan.expert.saved_bytes(block, as_saved) if plan.expert else 0
        kept = plan.tensor.saved_bytes(block, as_saved) + extra
        own = kept if plan.tensor.saves_input(block, plan) else 0  # of what the passes keep
        again = sum(layer.kept for layer in passes) - own if plan.runs_again and block.is_recomputed else 0
        kept, again = of_stack(block, kept, again, plan)
        if again > 0 and rounded and (copies := plan.tensor.rounded_again_bytes(block, plan)):
            again, passes = again + copies, _with_rounded(passes, copies)
        forward = plan.tensor.recomputed_bytes(block, plan) if again > 0 else 0
        sending = 0
        if plan.expert and (exchanged := plan.expert.exchange_bytes(block, plan)):
            forward = max(forward, exchanged) if again > 0 else 0
            rows = plan.expert.num_computed(plan) * plan.spec.hidden * BYTES[plan.precision.compute]
            sending = exchanged - 2 * rows  # arrived rows and results are saved
        on_host = kept if plan.recompute == "offload" and block.is_recomputed else 0
        on_host -= sum(layer.kept for layer in passes[1:]) if on_host and block.kind == MEASURED else 0  # the loss
        # An input on the host is brought back, and, during the pass, that of the block before it. What the head gives
        # for the inputs of multi-token prediction waits for its blocks.
        waiting = plan.spec.mtp_depth * name.startswith(AHEAD) * prod(plan.tensor.boundary_shape(plan))
        beside = on_host + waiting * BYTES[plan.precision.compute]
        return BackwardBlock(kept - on_host, passes, max(0, again) + on_host, forward, on_host, beside, sending)

    is_last, dtypes = name == plan.spec.blocks[-1].name, block_dtypes(name, plan)
    key = "backward block", plan.spec.first_alike[name], is_last, plan.recompute, rounded, dtypes
    return once(plan.blocks_cache, key, compute)


def _with_rounded(passes: tuple[LayerBackward, ...], rounded: int) -> tuple[LayerBackward, ...]:
    """With the rounded weights that a second forward keeps. What a layer has saved is freed before the gradient of its
    weights, in the compute dtype until then, is there in the stored one, too."""
    weights, changed = sum(layer.weights for layer in passes), []
    for layer in passes:
        part = layer.weights / weights if weights else 1 / len(passes)  # of frozen weights: equal parts
        saved = layer.kept + int(rounded * part)
        beside = layer.weight_scratch + layer.widened - min(2 * layer.widened, saved)
        changed.append(replace(layer, kept=saved, weight_scratch=beside, widened=0))
    return tuple(changed)
