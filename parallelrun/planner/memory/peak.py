"""The peak memory of a worker in a step, from a traversal of its schedule's backward passes.

Memory is highest in backward: a stage's backward pass begins with the activations of all its microbatches in flight,
and adds gradients of activations and weights block by block. Forward needs less than the backward pass that follows it,
unless it computes the gradients of the loss (`loss_chunks`), and so does the optimizer, unless a step has hardly any
activations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from math import prod
from typing import Any

from parallelrun.base.precision import BYTES
from parallelrun.planner.contract.caching import cached
from parallelrun.planner.contract.memory import Memory
from parallelrun.planner.contract.parameters import HeldParameter, distinct_parameters, element_bytes
from parallelrun.planner.contract.pipeline_schedule import Action
from parallelrun.planner.contract.plan import Plan, Stage, Value, once
from parallelrun.planner.memory import paired_passes
from parallelrun.planner.memory.backward_block import backward_blocks
from parallelrun.planner.pieces import orthogonalising

ROUNDS = 3  # of pp microbatches, after which a schedule that repeats itself has held as much as it ever will
ROUNDING_BYTES = 16  # of an element of the tensor that is rounded: widened, and what random bits are mixed from
INDEX_BYTES = 8  # of a token, of a target and of a sample's index


def gradient_bytes(plan: Plan, parameters: Iterable[HeldParameter], coordinate: dict[str, int]) -> int:
    """Bytes of the gradients that backward produces: in the weights' dtype, not sharded by the data strategy."""
    sizes, trained = plan.mesh.sizes, (p for p in parameters if not p.spec.frozen)
    return sum(
        element_bytes(p.spec, plan, p.layout) * p.layout.local_numel(p.spec.shape, sizes, coordinate) for p in trained
    )


@cached("weights_cache")
def first_alike_ranks(plan: Plan) -> list[int]:
    """By pp rank: the first one with equal blocks and neighbours, whose ranks send and store the same."""
    last, alike, stages = len(plan.stages) - 1, plan.spec.first_alike, plan.stages
    shapes: list[tuple[object, ...]] = [()] * plan.mesh.size("pp")
    for index, stage in enumerate(stages):
        holds_before = index == 0 or stages[index - 1].pp_rank == stage.pp_rank
        holds_next = index == last or stages[index + 1].pp_rank == stage.pp_rank
        own = holds_before, holds_next, tuple(alike[name] for name in stage.blocks)
        shapes[stage.pp_rank] += (own,)
    first: dict[object, int] = {}
    return [first.setdefault(own, pp_rank) for pp_rank, own in enumerate(shapes)]


def within_stage(coordinate: dict[str, int]) -> tuple[tuple[str, int], ...]:
    """Return a rank's index on every axis but pp."""
    return tuple(sorted((axis, index) for axis, index in coordinate.items() if axis != "pp"))


class ScheduleTraversal:
    """The memory of one rank along its step. A stage is measured once; the actions give the microbatches in flight."""

    def __init__(self, plan: Plan, pp_rank: int, coordinate: dict[str, int]):
        self._plan, self._pp_rank, self._coordinate = plan, pp_rank, coordinate
        stages = {stage.index: stage for stage in plan.stages_of(pp_rank)}
        self._number = {index: number for number, index in enumerate(stages)}  # of a stage on this rank
        # Equal pp ranks differ only in the microbatches in flight, so everything else is computed once for them.
        key = "peak", first_alike_ranks(plan)[pp_rank], within_stage(coordinate)
        self._shared: dict[object, Any] = once(plan.cache, key, dict)
        of_weights: dict[object, Any] = once(plan.weights_cache, key, dict)
        self._gradients = {
            index: once(of_weights, self._number[index], partial(_by_block, stage, plan, pp_rank, coordinate))
            for index, stage in stages.items()
        }
        self._blocks = {index: backward_blocks(stage.blocks, plan, index > 0) for index, stage in stages.items()}
        self._kept = {
            index: sum(block.kept for block in self._blocks[index]) + _input_beside(stage, plan)
            for index, stage in stages.items()
        }
        self._in_forward = {
            index: blocks[-1].passes[-1].in_forward if blocks[-1].passes else 0
            for index, blocks in self._blocks.items()
        }
        self._waiting = {index: self._waits(index, 0) for index in stages}

    def _once(self, quantity: str, index: int, number: int, compute: Callable[[], Value]) -> Value:
        """Return `compute()` for backward pass `number` of a stage, computed once for equal pp ranks."""
        return once(self._shared, (quantity, self._number[index], number), compute)

    def peak(self, has_messages: bool) -> Memory:
        """The memory when the rank holds most, without weights, optimizer state and the data strategy's buffers.

        has_messages: False for a lower bound without buffers of messages, which needs this rank's actions alone.
        """
        begun: Counter[int] = Counter()  # backward passes by stage
        batch, gradients = batch_bytes(self._plan, self._pp_rank), 0
        # After which passes a stage's gradients are reduced; without split passes, block by block in `_compute_beyond`.
        reduced_after = "BW" if self._plan.pipeline.splits_backward else ""
        reduced: set[int] = set()  # stages whose sums have begun
        apart = 0  # of microbatches whose weight gradients are not computed yet, beside what is saved for them
        bytes_apart = {index: self._apart(index) for index in self._blocks}
        data, peak, before = self._plan.data, Memory(0, 0, 0, 0), ""
        reducing = {index: data.reducing_bytes(index, self._coordinate, self._plan) for index in self._blocks}
        for (kind, index, _), activations in self._live_bytes(has_messages):
            paired, before = self._plan.pipeline.overlaps_passes and before + kind == "FB", kind
            split, number = kind in "IW" and index > 0, begun[index]
            if (kind == "F" and not self._in_forward[index]) or (kind == "I" and not split):
                continue
            if kind == "F":
                beyond = self._end_of_forward(index, number)
            elif kind == "I":
                beyond = self._of_inputs(index)
            else:
                beyond = self._of_weights(index, number) if split else self._beyond_kept(index, number, paired)
            temporary = batch + apart + beyond
            if gradients + activations + temporary > peak.tensors:
                peak = Memory(0, gradients, 0, activations, temporary)
            if kind in "BW":
                gradients += 0 if begun[index] or reducing[index] is not None else self._complete(index)
                begun[index] += 1 if reducing[index] is None else 0  # each pass of others is as the first
            if split:
                apart += bytes_apart[index] if kind == "I" else -bytes_apart[index]
            if kind in reduced_after and (sizes := reducing[index]) is not None:
                left, temporary = activations - self._kept[index], batch + apart + self._complete(index) + sizes[0]
                if gradients + left + temporary > peak.tensors:
                    peak = Memory(0, gradients, 0, left, temporary)
                gradients += 0 if index in reduced else sizes[1]
                reduced.add(index)
        plan = self._plan
        last = plan.data.ending_bytes(self._pp_rank, self._coordinate, plan) if plan.num_data_ranks > 1 else 0
        if updating := self._updating(plan):  # beside gradients that are final
            last = max(last, updating + (0 if plan.data.keeps_gradients(plan) else last))
        end = Memory(0, gradients, 0, 0, last + batch)
        return end if end.tensors > peak.tensors else peak

    def _updating(self, plan: Plan) -> int:
        """The bytes that the update needs beside weights, gradients and state."""
        if not plan.precision.rounding:
            return orthogonalising.step_bytes(plan, self._coordinate)
        parameters = distinct_parameters(plan, self._pp_rank)
        layouts = ((plan.data.state_layout(p.spec, p.layout, plan), p.spec.shape) for p, _ in parameters)
        numels = (layout.local_numel(shape, plan.mesh.sizes, self._coordinate) for layout, shape in layouts)
        return ROUNDING_BYTES * max(numels, default=0)

    def host_bytes(self) -> int:
        """Bytes of the inputs of blocks that wait in host memory, at most."""
        each = {index: sum(block.on_host for block in blocks) for index, blocks in self._blocks.items()}
        live = most = 0
        for kind, index, _ in self._plan.pipeline.order(self._plan, self._pp_rank):
            live += each[index] if kind == "F" else -each[index] if kind in "BI" else 0
            most = max(most, live)
        return most

    def _live_bytes(self, has_messages: bool) -> Iterable[tuple[Action, int]]:
        """The rank's actions, each with the bytes of activations, and messages, that are held when it begins."""
        if has_messages:
            yield from self._plan.pipeline.live_bytes(self._plan, self._pp_rank, self._kept)
            return
        live = 0
        for action in self._plan.pipeline.order(self._plan, self._pp_rank):
            yield action, live
            if action.kind != "I":
                live += self._kept[action.stage] if action.kind == "F" else -self._kept[action.stage]

    def _apart(self, index: int) -> int:
        """Bytes that a microbatch of a stage holds from its I to its W pass, beyond the saved activations: without what
        it saved behind its last layer with weights, as for the loss, which is freed when the I pass ends."""
        passes = [layer for block in self._blocks[index] for layer in block.passes]
        last = max((place for place, layer in enumerate(passes) if layer.weights), default=len(passes))
        return sum(block.apart for block in self._blocks[index]) - sum(layer.kept for layer in passes[last + 1 :])

    def _of_inputs(self, index: int) -> int:
        """The peak of a stage's I pass beyond the saved activations."""
        most = apart = 0
        for block in reversed(self._blocks[index]):
            most = max(most, apart + block.input_bytes)
            apart += block.apart
        return most

    def _of_weights(self, index: int, number: int) -> int:
        """Bytes of weight gradients in W pass `number` of a stage before they are added up, beyond what it began with:
        of two layers, as torch holds one's until it has the next's, and what computing one needs. torch takes the
        layers in forward order, and frees what each read."""
        is_first = number == 0  # the first become the sums

        def compute() -> int:
            layers = [layer for block in self._blocks[index] for layer in block.passes if layer.weights]
            if is_first:
                return max((layer.of_weights for layer in layers), default=0)
            most = before = freed = 0
            for layer in layers:
                most = max(most, before + layer.of_weights - freed)
                before = layer.weights
                freed += layer.kept + layer.reads
            return most

        return self._once("weights", index, 0 if is_first else 1, compute)

    def _waits(self, index: int, number: int) -> list[int] | None:
        plan = self._plan
        if plan.num_data_ranks == 1 or plan.pipeline.splits_backward:
            return None
        compute = partial(plan.data.backward_bytes, index, number, self._coordinate, plan)
        return self._once("waits", index, number, compute)

    def _complete(self, index: int) -> int:
        """Bytes of gradients of a stage whose backward has run, unless the data strategy takes them away."""
        return sum(self._gradients[index]) if self._waiting[index] is None else 0

    def _beyond_kept(self, index: int, number: int, paired: bool) -> int:
        """The peak of backward pass `number` of a stage beyond the saved activations of all microbatches in flight.
        paired: it takes turns with the forward pass of the rank's other stage."""
        middle = 0 < number < self._plan.batch.microbatches - 1  # all equal from the third on
        number = min(number, 2) if middle else number
        compute = self._compute_paired if paired else self._compute_beyond
        return self._once(f"beyond{paired}", index, number, partial(compute, index, number))

    def _end_of_forward(self, index: int, number: int) -> int:
        """The bytes at the end of a stage's forward pass before its backward pass `number`, beyond what the forward
        began with: its input, if received."""
        plan, waiting = self._plan, self._waits(index, number)
        received = prod(plan.tensor.boundary_shape(plan)) * BYTES[plan.precision.compute] if index > 0 else 0
        return self._kept[index] + self._in_forward[index] - received + (waiting[-1] if waiting else 0)

    def _compute_beyond(self, index: int, number: int) -> int:
        plan, blocks, gradients = self._plan, self._blocks[index], self._gradients[index]
        waiting = self._waits(index, number)
        closing = plan.data.closing_bytes(index, number, self._coordinate, plan) if waiting is not None else []
        accumulates = number == 0 or waiting is not None
        left = [] if accumulates else self._left(index)
        distinct = {id(block): block for block in blocks}
        working = {key: block.working_bytes(accumulates) for key, block in distinct.items()}
        freed = produced = most = 0
        for i in reversed(range(len(blocks))):
            other = waiting[i] if waiting is not None else produced
            most = max(most, working[id(blocks[i])] + other - freed)
            freed += blocks[i].kept
            most = max(most, closing[i] - freed) if closing else most
            produced += gradients[i] if accumulates else left[i]
        return most

    def _compute_paired(self, index: int, number: int) -> int:
        (forward,) = (blocks for other, blocks in self._blocks.items() if other != index)
        produced = self._left(index) if number else self._gradients[index]
        return paired_passes.beyond_kept(self._blocks[index], forward, produced, number == 0)

    def _left(self, index: int) -> list[int]:
        """Bytes, by block of a stage, of gradients that wait for the block that shares the weight: autograd adds both
        before it adds them to the sum over microbatches."""
        plan, (stage,) = self._plan, [stage for stage in self._plan.stages_of(self._pp_rank) if stage.index == index]
        numbers = dict.fromkeys(stage.blocks, 0)
        for parameter, _ in distinct_parameters(plan, self._pp_rank):
            reads = plan.spec.readers.get(parameter.spec.name)
            if parameter.stage == index and reads in numbers and parameter.block in numbers:
                numbers[reads] += gradient_bytes(plan, [parameter], self._coordinate)
        return [*numbers.values()]


def _by_block(stage: Stage, plan: Plan, pp_rank: int, coordinate: dict[str, int]) -> list[int]:
    """Bytes of gradients per block of a stage. A tied weight counts in the block that reads it, which runs first."""
    alike = plan.spec.first_alike
    first = {
        alike[block]: block for block in reversed(stage.blocks)
    }  # of equal blocks; one with a tied weight has none
    sizes = dict.fromkeys(first.values(), 0)
    for parameter, _ in distinct_parameters(plan, pp_rank):
        if parameter.stage == stage.index:
            reads = plan.spec.readers.get(parameter.spec.name)
            block = reads if reads in sizes else parameter.block
            sizes[block] += gradient_bytes(plan, [parameter], coordinate)
    return [sizes[first[alike[block]]] for block in stage.blocks]


def _input_beside(stage: Stage, plan: Plan) -> int:
    """Bytes of a stage's input that its first block does not save: it may read only what it makes of it, or a block
    before it would have saved it."""
    first = plan.spec.block(stage.blocks[0])
    is_saved = plan.tensor.saves_input(first, plan) or (plan.runs_again and first.is_recomputed and not first.backward)
    if stage.index == 0 or is_saved:
        return 0
    shape = plan.input_shape(first) if first.input_shape else plan.tensor.boundary_shape(plan)
    return prod(shape) * BYTES[plan.precision.compute]


def batch_bytes(plan: Plan, pp_rank: int) -> int:
    """Bytes of the data replica's samples of a step: inputs on the first stage, targets on the last, and the
    positions of packed documents."""
    spec, samples = plan.spec, plan.batch.replica_batch
    each = INDEX_BYTES if spec.kind == "tokens" else BYTES[plan.precision.compute]
    cp = plan.mesh.size("cp")
    inputs = prod(spec.sample_shape) // cp * each if pp_rank == plan.stages[0].pp_rank else 0
    each_target = (1 + 2 * spec.mtp_depth) * INDEX_BYTES
    targets = spec.targets_per_sample // cp * each_target if pp_rank == plan.last_stage_pp_rank else 0
    positions = spec.seq * INDEX_BYTES if spec.packed else 0
    return samples * (inputs + targets + positions + INDEX_BYTES)
