"""Lower bounds of a candidate's time and memory, by which a search leaves out most candidates.

They come from the same predictions as a plan's own figures: of blocks alone, without what depends on the whole plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from parallelrun.config.schema.cluster_schema import ClusterConfig
from parallelrun.config.schema.run_schema import DataStrategyConfig
from parallelrun.planner.contract.caching import once_for
from parallelrun.planner.contract.classes import data_strategy, pipeline_schedule, tensor_strategy
from parallelrun.planner.contract.data_strategy import DataStrategy
from parallelrun.planner.contract.memory import Memory
from parallelrun.planner.contract.parameters import distinct_parameters
from parallelrun.planner.contract.plan import BatchSizes, Plan, Stage, once
from parallelrun.planner.contract.request import Request
from parallelrun.planner.memory import device_memory
from parallelrun.planner.memory.backward_block import backward_block
from parallelrun.planner.memory.peak import gradient_bytes
from parallelrun.planner.pieces import context_axes
from parallelrun.planner.predict import cluster_cost, prediction
from parallelrun.planner.predict.step_time.step import StepModel, why_unknown
from parallelrun.planner.resolve.draft import REFERENCE_SCHEDULE
from parallelrun.planner.search.legal import OF_STAGES, Legal, LegalGroup, tensor_of

BlockSeconds = tuple[float, float, float]
IN_ROW = 2  # equal blocks that show what a data strategy holds beside one of many


class BlockBytes(NamedTuple):
    """Bytes, or fewer, of a microbatch of the commonest block. kept: for backward. working: of its backward pass
    besides; summing: if that keeps its gradients. apart: from a pass for input gradients to that for weights, besides.
    """

    kept: int
    working: int
    summing: int
    apart: int


class DataBytes(NamedTuple):
    """Bytes, or fewer, of a rank's part of the commonest block. held: throughout a step. gradients: that stay until the
    schedule ends. beside: of weights and gradients beside the last such blocks of a stage, the last first: during the
    first backward pass of each, and when that ends."""

    held: int
    gradients: int = 0
    beside: tuple[tuple[int, int], ...] = ()


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
        equal = [alike[block.name] == self._commonest for block in legal.spec.blocks]
        names = [block.name for block, is_equal in zip(legal.spec.blocks, equal) if is_equal]
        are_in_row = all(equal[equal.index(True) :][: len(names)])
        self._row = tuple(names[: IN_ROW if are_in_row else 1])

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

    def seconds(self, group: LegalGroup, micro_batch: int, with_waits: bool) -> BlockSeconds:
        """(forward, backward, recomputation) of one microbatch of the model's commonest block; recomputation in the
        form that repeats most. with_waits: for rows of experts, which a pass of another stage may hide. Zeros where the
        cluster gives no rates."""
        # With sharded weights a block takes least, then with rounded ones: see `streaming.of_weights`.
        of_data = partial(max, group.datas, key=lambda data: _spares(data_strategy(data.kind)))
        least: DataStrategyConfig = once(self._cache, ("least", *map(id, group.datas)), of_data)
        spares = _spares(data_strategy(least.kind))
        several = not spares[0] and self._legal.space.global_batch // group.dp // micro_batch > 1
        key = "seconds", tensor_of(group), micro_batch, spares, several
        both: dict[bool, BlockSeconds] = once(self._cache, key, lambda: self._seconds(group, micro_batch, least))
        return both[with_waits]

    def _seconds(self, group: LegalGroup, micro_batch: int, data: DataStrategyConfig) -> dict[bool, BlockSeconds]:
        """Return the bounds with and without waits for `data`, which stands for all data strategies that treat weights
        alike."""
        plan = self._legal.plan(group, micro_batch, self._most, data)
        is_unknown = why_unknown(plan, self._cluster)
        time = None if is_unknown else self._times.block_time(plan, self._blocks[self._commonest])
        if time is None:
            return dict.fromkeys((True, False), (0.0, 0.0, 0.0))
        forward, backward, again = (sum(parts.values()) for parts in (time.forward, time.backward, time.again))
        waits = time.waits
        return {True: (forward, backward, again), False: (forward - waits[0], backward - waits[1], again - waits[2])}

    def _number(self, stage: Stage) -> int:
        alike = self._legal.spec.first_alike
        return sum(alike[name] == self._commonest for name in stage.blocks)

    @once_for(*OF_STAGES)
    def ranks(self, group: LegalGroup) -> list[tuple[int, int, int]]:
        """(pp rank, how many of the commonest block it has, the fewest of its stages) of the pp ranks that may hold
        most: those with more than all before them, which have more microbatches in flight."""
        numbers: dict[int, list[int]] = {}
        for stage in self._legal.stages(group)[0]:
            numbers.setdefault(stage.pp_rank, []).append(self._number(stage))
        fuller: list[tuple[int, int, int]] = []
        for rank, own in sorted(numbers.items()):
            if sum(own) > (fuller[-1][1] if fuller else 0):
                fuller.append((rank, sum(own), min(own)))
        return fuller

    def num_bytes(self, group: LegalGroup, micro_batch: int, recompute: str, limit: float) -> list[int]:
        """By data strategy, bytes of the pp rank that holds most, or fewer, from those of the commonest block; [] where
        saved activations alone exceed `limit`."""
        schedule, samples = group.schedule, self._legal.space.global_batch // group.dp
        several = samples > micro_batch
        begun = partial(schedule.least_in_flight, group.pp, group.virtual_stages, samples // micro_batch)
        ranks = [(rank, number, fewest, fewest * begun(rank)) for rank, number, fewest in self.ranks(group)]
        for alike in (with_plain_schedule(group), group):  # the former, of more groups, keeps no more
            block = self._of_backward(alike, micro_batch, recompute)
            if block.kept * max(flight for *_, flight in ranks) > limit:
                return []
        bounds = []
        # The form of a product over a grid, and so what is padded, depends on the micro-batch.
        size = group.micro_batches[0] if tensor_strategy(group.tensor.kind).is_one_dimensional else micro_batch
        for data in once(
            self._cache, ("datas", id(group), size, several), partial(self._of_datas, group, size, several)
        ):
            most, beyond = 0, [block.working]
            for freed, (during, closing) in enumerate(data.beside):
                beyond.append(max(block.summing + during, closing - block.kept) - freed * block.kept)
            for rank, number, fewest, flight in ranks:
                at_first, at_last = flight * block.kept, number * data.gradients
                if schedule.splits_backward:  # stage 0 has no pass for input gradients
                    at_first += fewest * block.apart if rank or group.virtual_stages > 1 else 0
                    at_last += fewest * block.kept if rank and several else 0
                else:
                    at_first += max(beyond) if flight else 0
                most = max(most, number * data.held + max(at_first, at_last))
            bounds.append(most)
        return bounds

    def _of_backward(self, group: LegalGroup, micro_batch: int, recompute: str) -> BlockBytes:
        def compute() -> BlockBytes:
            plan = self._plan(group, micro_batch, recompute)
            rounds = (False, True) if plan.runs_again else (False,)  # by data strategy
            # of a stage's first block, beside whose pass no other input is brought back from the host
            blocks = [replace(backward_block(self._commonest, plan, rounded), beside=0) for rounded in rounds]
            return BlockBytes(
                blocks[0].kept,
                max(0, min(block.least_bytes(plan) for block in blocks)),
                min(block.working_bytes(accumulates=True) for block in blocks),
                min(block.apart for block in blocks),
            )

        saved: BlockBytes = once(self._cache, ("kept", tensor_of(group), micro_batch, recompute), compute)
        return saved

    def _plan(self, group: LegalGroup, micro_batch: int, recompute: str) -> Plan:
        """A plan whose blocks are those of the candidates with this tensor strategy, micro-batch and recomputation."""
        key = "group", tensor_of(group), micro_batch
        first: LegalGroup = once(self._cache, key, lambda: group)
        return self._legal.plan(first, micro_batch, recompute, first.datas[0])

    def _of_datas(self, group: LegalGroup, size: int, several: bool) -> list[DataBytes]:
        """By data strategy. several: a step has more than one microbatch."""
        row, datas = min(fewest for _, _, fewest in self.ranks(group)), []
        for data in group.datas:
            request = self._legal.request_of(group, data)
            strategy = data_strategy(data.kind).resolve(request)
            blocks = self._row[: max(1, row)] if strategy.shards_weights else self._row[:1]
            some = self._plan(group, size, self._plainest)
            key = "data", tensor_of(group), some.tensor, group.dp, several, strategy, len(blocks)
            plan = partial(self._of_one_stage, request, some, strategy, 1 + several)
            datas.append(once(self._cache, key, partial(_of_data, plan, blocks)))
        return datas

    def _of_one_stage(
        self, request: Request, plan: Plan, data: DataStrategy, microbatches: int, blocks: tuple[str, ...]
    ) -> Plan:
        """A plan of one stage of so many blocks, as on a pp rank: where pp=1, the last one's weights stay gathered."""
        context = plan.context.mesh_dims(request) if plan.context else None
        ep = plan.expert.mesh_dims(request) if plan.expert else ((), ())
        of_data, of_tensor = data.mesh_dims(request.num_data_ranks), plan.tensor.mesh_dims(request)
        mesh = context_axes.mesh_shape(2, of_data, context, ep, of_tensor)
        batch = BatchSizes(plan.batch.global_batch, plan.batch.micro_batch, microbatches)
        changed = replace(plan, data=data, mesh=mesh, batch=batch, stages=(Stage(0, 0, blocks),))
        vars(changed)["blocks_cache"] = plan.blocks_cache
        return changed


def _of_data(of_blocks: Callable[[tuple[str, ...]], Plan], blocks: tuple[str, ...]) -> DataBytes:
    """Bound what a rank holds of one of `blocks`. of_blocks: the plan of a stage of some of them."""
    plan = of_blocks(blocks[:1])
    data, splits, coordinate = plan.data, plan.pipeline.splits_backward, plan.mesh.coordinate(0)
    held = sum(prediction.parameters_bytes(plan, coordinate)) + data.gathered_bytes(0, coordinate, plan)
    if plan.num_data_ranks > 1 and data.shards_weights and not splits:
        in_row = of_blocks(blocks) if len(blocks) > 1 else plan
        if (during := data.backward_bytes(0, 0, coordinate, in_row)) is not None:
            closing = data.closing_bytes(0, 0, coordinate, in_row)
            return DataBytes(held, 0, tuple(zip(reversed(during), reversed(closing))))
    stay = (splits or plan.num_data_ranks == 1) and not plan.stack.separate_sums  # these are held
    if not stay or data.reducing_bytes(0, coordinate, plan) is not None:
        return DataBytes(held)
    return DataBytes(held, gradient_bytes(plan, (p for p, _ in distinct_parameters(plan, 0)), coordinate))


def with_plain_schedule(group: LegalGroup) -> LegalGroup:
    """The group for bounds of one block's time: with a backward pass that is not split, which takes no longer."""
    if not (group.schedule.splits_backward and tensor_strategy(group.tensor.kind).is_one_dimensional):
        return group
    pipeline = replace(group.pipeline, kind=REFERENCE_SCHEDULE, virtual_stages=None)
    return group._replace(pipeline=pipeline, schedule=pipeline_schedule(REFERENCE_SCHEDULE))


def _spares(strategy: type[DataStrategy]) -> tuple[bool, bool]:
    """What a data strategy spares a microbatch: everything that it does to its weights, or rounding them."""
    return strategy.shards_weights, strategy.rounds_weights


def on_device(tensors: int, communicators: int, cluster: ClusterConfig) -> Memory:
    """The memory of a device of the cluster with so many bytes of tensors."""
    return device_memory.beside(Memory(tensors, 0, 0, 0), communicators, cluster)


def most_bytes(cluster: ClusterConfig) -> float:
    """The most bytes of tensors with which a rank fits its device for certain, whatever its communicators need."""
    if not cluster.memory_gb:
        return float("inf")
    low, high = 0, round(2 * cluster.memory_gb * device_memory.GIGA)
    while low < high:
        middle = (low + high + 1) // 2
        memory = on_device(middle, 0 if cluster.context_gb else 1, cluster)
        low, high = (middle, high) if cluster_cost.fits(memory, cluster) == "yes" else (low, middle - 1)
    return low
