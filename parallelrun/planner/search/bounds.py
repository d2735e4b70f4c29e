"""Lower bounds of a candidate's time and memory, by which a search leaves out most candidates.

They come from the same predictions as a plan's own figures: of blocks alone, without what depends on the whole plan.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

from parallelrun.config.schema.cluster_schema import ClusterConfig
from parallelrun.config.schema.run_schema import DataStrategyConfig
from parallelrun.planner.contract.caching import once_for
from parallelrun.planner.contract.classes import data_strategy, pipeline_schedule, tensor_strategy
from parallelrun.planner.contract.data_strategy import DataStrategy
from parallelrun.planner.contract.memory import Memory
from parallelrun.planner.contract.optimizers import update_rule
from parallelrun.planner.contract.parameters import block_layouts
from parallelrun.planner.contract.plan import BatchSizes, Plan, Stage, once
from parallelrun.planner.memory import device_memory
from parallelrun.planner.memory.backward_block import backward_block
from parallelrun.planner.model.model_spec import BlockSpec
from parallelrun.planner.pieces import context_axes
from parallelrun.planner.predict import cluster_cost, prediction
from parallelrun.planner.predict.step_time.step import StepModel, why_unknown
from parallelrun.planner.resolve.draft import REFERENCE_SCHEDULE
from parallelrun.planner.search.legal import OF_STAGES, Legal, LegalGroup, tensor_of

BlockSeconds = tuple[tuple[float, float, float], tuple[float, float, float]]


class Bounds:
    """Lower bounds of the step time and memory of a space's candidates."""

    def __init__(self, legal: Legal, cluster: ClusterConfig, times: StepModel):
        self._legal, self._cluster, self._times = legal, cluster, times
        self._cache: dict[object, Any] = {}
        alike = legal.spec.first_alike
        self._blocks = {name: legal.spec.block(name) for name in dict.fromkeys(alike.values())}
        counts = Counter(alike[block.name] for block in legal.spec.blocks)
        self._plainest, self._most = legal.space.recomputes()[0], legal.space.recomputes()[-1]
        self._commonest = max(counts, key=lambda name: (counts[name], self._blocks[name].forward_flops))

    @once_for(*OF_STAGES)
    def paths(self, group: LegalGroup) -> list[tuple[int, float, int]]:
        """Numbers of blocks, as in `simulate.least`: forward before a pp rank can begin, of its own (on average where
        pp ranks share cores), backward after its last action. Of all pp ranks, those that can be the longest."""
        own, heads, before = [0] * group.pp, [0] * group.pp, 0
        stages = self._legal.stages(group)[0]
        for stage in reversed(stages):
            heads[stage.pp_rank] = stage.index
        sums = [0]
        for stage in stages:
            number = self._number(stage)
            own[stage.pp_rank] += number
            before += number
            sums.append(before)
        if self._cluster.cores:
            return [(0, before / group.pp, 0)]
        longest: dict[int, int] = {}
        for rank, number in enumerate(own):
            longest[number] = max(longest.get(number, 0), sums[heads[rank]])
        return [(head, number, 0 if group.schedule.splits_backward else head) for number, head in longest.items()]

    def seconds(self, group: LegalGroup, micro_batch: int) -> BlockSeconds:
        """(forward, backward, recomputation) of one microbatch of the model's commonest block, and the same without
        waits that a pass of another stage may hide; recomputation in the form that repeats most. Zeros where the
        cluster gives no rates."""
        # With sharded weights a block takes least, then with rounded ones: see `streaming.of_weights`.
        of_data = partial(max, group.datas, key=lambda data: _spares(data_strategy(data.kind)))
        least: DataStrategyConfig = once(self._cache, ("least", *map(id, group.datas)), of_data)
        spares = _spares(data_strategy(least.kind))
        several = not spares[0] and self._legal.space.global_batch // group.dp // micro_batch > 1
        key = "seconds", tensor_of(group), micro_batch, spares, several
        seconds: BlockSeconds = once(self._cache, key, lambda: self._seconds(group, micro_batch, least))
        return seconds

    def _seconds(self, group: LegalGroup, micro_batch: int, data: DataStrategyConfig) -> BlockSeconds:
        """Return the bounds for `data`, which stands for all data strategies that treat weights alike."""
        plan = self._legal.plan(group, micro_batch, self._most, data)
        if why_unknown(plan, self._cluster):
            return (0.0, 0.0, 0.0), (0.0, 0.0, 0.0)
        time = self._times.block_time(plan, self._blocks[self._commonest])
        if time is None:
            return (0.0, 0.0, 0.0), (0.0, 0.0, 0.0)
        forward, backward, again = (sum(parts.values()) for parts in (time.forward, time.backward, time.again))
        waits = time.waits
        return (forward, backward, again), (forward - waits[0], backward - waits[1], again - waits[2])

    def with_plain_schedule(self, group: LegalGroup) -> LegalGroup:
        """The group for bounds of one block: with a backward pass that is not split, which takes no longer and keeps as
        much. Over a grid it may keep more (`traffic.overlaps`)."""
        if not (group.schedule.splits_backward and tensor_strategy(group.tensor.kind).is_one_dimensional):
            return group
        pipeline = replace(group.pipeline, kind=REFERENCE_SCHEDULE, virtual_stages=None)
        return group._replace(pipeline=pipeline, schedule=pipeline_schedule(REFERENCE_SCHEDULE))

    def _number(self, stage: Stage) -> int:
        alike = self._legal.spec.first_alike
        return sum(alike[name] == self._commonest for name in stage.blocks)

    @once_for(*OF_STAGES)
    def fullest(self, group: LegalGroup) -> tuple[int, int, int]:
        """The first pp rank with the most of the commonest block, how many it has, and the fewest of its stages."""
        numbers: dict[int, list[int]] = {}
        for stage in self._legal.stages(group)[0]:
            numbers.setdefault(stage.pp_rank, []).append(self._number(stage))
        rank = max(sorted(numbers), key=lambda number: sum(numbers[number]))
        return rank, sum(numbers[rank]), min(numbers[rank])

    def in_flight(self, group: LegalGroup, micro_batch: int) -> int:
        """Return how many of the commonest block (at least) have run forward on the fullest pp rank when its first
        backward begins."""
        count, (rank, _, fewest) = self._legal.space.global_batch // group.dp // micro_batch, self.fullest(group)
        return fewest * group.schedule.least_in_flight(group.pp, group.virtual_stages, count, rank)

    def held_bytes(self, group: LegalGroup, data: DataStrategyConfig, several: bool) -> int:
        """Bytes that the fullest pp rank holds of the commonest block throughout a step, or fewer. several: a step has
        more than one microbatch."""
        key = "held", tensor_of(group), group.dp, group.pp > 1, several, id(data)
        return self.fullest(group)[1] * once(self._cache, key, lambda: self._held(group, data, several))

    def kept_bytes(self, group: LegalGroup, micro_batch: int, recompute: str) -> tuple[int, int]:
        """Bytes that the commonest block keeps of one microbatch for backward, and what its backward pass needs besides
        (nothing is known of a backward pass that is split)."""

        def compute() -> tuple[int, int]:
            plan = self._plan(group, micro_batch, recompute)
            rounds = (False, True) if plan.runs_again else (False,)  # by data strategy
            blocks = [backward_block(self._commonest, plan, rounded) for rounded in rounds]
            least = 0 if group.schedule.splits_backward else min(block.least_bytes(plan) for block in blocks)
            return blocks[0].kept, least

        saved: tuple[int, int] = once(self._cache, ("kept", tensor_of(group), micro_batch, recompute), compute)
        return saved

    def _plan(self, group: LegalGroup, micro_batch: int, recompute: str) -> Plan:
        """A plan whose blocks are those of the candidates with this tensor strategy, micro-batch and recomputation."""
        key = "group", tensor_of(group), micro_batch
        first: LegalGroup = once(self._cache, key, lambda: group)
        return self._legal.plan(first, micro_batch, recompute, first.datas[0])

    def _held(self, group: LegalGroup, data: DataStrategyConfig, several: bool) -> int:
        plan = self._plan(group, group.micro_batches[0], self._plainest)
        request = self._legal.request_of(group, data)
        strategy = data_strategy(data.kind).resolve(request)
        context = plan.context.mesh_dims(request) if plan.context else None
        ep = plan.expert.mesh_dims(request) if plan.expert else ((), ())
        of_data, of_tensor = strategy.mesh_dims(request.num_data_ranks), plan.tensor.mesh_dims(request)
        mesh = context_axes.mesh_shape(2, of_data, context, ep, of_tensor)
        batch = BatchSizes(plan.batch.global_batch, plan.batch.micro_batch, 1 + several)
        # of one block on its own: where pp=1, the last one's weights stay gathered
        changed = replace(plan, data=strategy, mesh=mesh, batch=batch, stages=(Stage(0, 0, (self._commonest,)),))
        vars(changed)["blocks_cache"] = plan.blocks_cache
        gathered = strategy.gathered_bytes(0, mesh.coordinate(0), changed)
        return _block_bytes(self._blocks[self._commonest], changed) + gathered


def _spares(strategy: type[DataStrategy]) -> tuple[bool, bool]:
    """What a data strategy spares a microbatch: everything that it does to its weights, or rounding them."""
    return strategy.shards_weights, strategy.rounds_weights


def _block_bytes(block: BlockSpec, plan: Plan) -> int:
    """Bytes of a block's matrices that a rank holds: weights, gradients that stay, optimizer state."""
    cached: dict[object, int] = {}
    total = 0
    for spec, layout in zip(block.parameters, block_layouts(block.name, plan)):
        key = spec.shape, spec.layer_role, spec.heads, spec.frozen, update_rule(spec, plan)
        if len(spec.shape) > 1:
            if key not in cached:
                cached[key] = sum(prediction.parameter_bytes(spec, layout, plan, {}))
            total += cached[key]
    return total


def most_bytes(cluster: ClusterConfig) -> float:
    """The most bytes of tensors with which a rank fits its device for certain, whatever its communicators need."""
    if not cluster.memory_gb:
        return float("inf")
    low, high = 0, round(2 * cluster.memory_gb * device_memory.GIGA)
    while low < high:
        middle = (low + high + 1) // 2
        memory = device_memory.beside(Memory(middle, 0, 0, 0), 0 if cluster.context_gb else 1, cluster)
        low, high = (middle, high) if cluster_cost.fits(memory, cluster) == "yes" else (low, middle - 1)
    return low
