"""The time of a step: stages in the pipeline's schedule, then what no computation hides."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from parallelrun.base.precision import BYTES
from parallelrun.config.schema.cluster_schema import ClusterConfig
from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.contract.plan import Plan, Stage, once
from parallelrun.planner.model.model_spec import BlockSpec
from parallelrun.planner.pieces.hosts import stays_in_node
from parallelrun.planner.predict import prediction, simulate
from parallelrun.planner.predict.step_time import cores, host, other_blocks, overlap, pairs, servers, spread
from parallelrun.planner.predict.step_time.blocks import EXPERT, TENSOR, BlockTime, Parts, block_time
from parallelrun.planner.predict.step_time.kernels import streaming_s
from parallelrun.planner.predict.step_time.links import collective_s, copies_s, sharing_s
from parallelrun.planner.predict.step_time.matrices import orthogonalising_s
from parallelrun.planner.predict.step_time.offload import update_s
from parallelrun.planner.predict.step_time.rates import Rates, not_given, rates_of
from parallelrun.planner.predict.step_time.shared_times import of_blocks, of_stages, of_weights
from parallelrun.planner.predict.step_time.spread import BUBBLE, DATA, FIXED, OPTIMIZER, PIPELINE, RECOMPUTE


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, and of its parts, which add up to it. mfu: model FLOPs over what the devices could do at their
    peak."""

    step_s: float
    p10_s: float
    p90_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    parts: Mapping[str, float]


@dataclass(frozen=True)
class StageTime:
    """Seconds of one microbatch. parts: of both passes together. passes: forward and backward, with their waits."""

    forward: float
    backward: float
    parts: Parts
    passes: tuple[pairs.PassTime, pairs.PassTime]


CountedBlocks = tuple[tuple[str, int], ...]  # of a stage: the first equal block of the model, and how many of them


def step_time(plan: Plan, cluster: ClusterConfig) -> StepTime | None:
    """Predict a step; None for the reasons that `why_unknown` gives."""
    return StepModel(cluster).step_time(plan)


class StepModel:
    """The step times of plans on one cluster. Parts that plans share are computed once.

    The plans differ in nothing but degrees, strategies, batch and recomputation: they have one model, precision,
    optimizer, partition and stack.
    """

    def __init__(self, cluster: ClusterConfig):
        self._cluster = cluster
        self._cache: dict[object, Any] = {}

    def step_time(self, plan: Plan, least: bool = False) -> StepTime | None:
        """Predict a step. least: with a lower bound of the schedule's length, which is not simulated."""
        rates = self._rates(plan)
        if rates is None:
            return None
        stages, messages = self.stages(plan), self.messages(plan)
        of_data = "data", of_weights(plan), plan.batch.microbatches
        data = once(self._cache, of_data, lambda: _data(plan, self._cluster, rates))
        if stages is None or messages is None or data is None:
            return None
        key = "schedule", least, plan.pipeline, plan.batch.microbatches, of_stages(plan)
        compute = partial(_schedule, plan, self._cluster, stages, messages, least)
        makespan, busy, hidden = once(self._cache, key, compute)
        parts = _parts_of(plan, stages)
        parts[EXPERT] = parts.get(EXPERT, 0.0) - hidden
        parts[PIPELINE] = messages * plan.batch.microbatches
        parts[BUBBLE] = makespan - busy
        parts[DATA] = sum(data[:3]) if rates.synchronous else _exposed(plan, data, stages)  # a CPU hides nothing
        parts[DATA] += host.around_data_s(plan, rates)
        if parts.get(TENSOR) and not stays_in_node(plan, self._cluster, "tp"):
            parts[TENSOR] += _contention_s(parts[TENSOR], data.gathers + data.sums - parts[DATA], busy)
        weights, _, states = prediction.held_bytes(plan, plan.mesh.coordinate(0))
        stored, accurate = BYTES[plan.precision.stored], BYTES[plan.precision.accurate]
        # The factors below are of weights in the accurate dtype, of which a state may have a copy.
        weights = prediction.stored_bytes(plan) if plan.data.rounds_weights else weights * accurate // stored
        states -= states // plan.optimizer_states if stored != accurate and not plan.precision.rounding else 0
        muon = once(self._cache, ("muon", of_weights(plan)), lambda: orthogonalising_s(plan, self._cluster, rates))
        if muon is None:
            return None
        on_device = not plan.offloads_optimizer
        parts[OPTIMIZER] = streaming_s(2 * states + 3 * weights, 20, rates) if on_device else update_s(plan, rates)
        parts[OPTIMIZER] += muon
        parts[FIXED] = rates.step_s + host.of_microbatches_s(plan, rates)
        if plan.servers:
            exchanged = servers.exchange(plan, self._cluster, rates, makespan)
            if exchanged is None:
                return None
            parts[DATA], parts[OPTIMIZER] = exchanged
        total = sum(parts.values())
        tokens = plan.batch.global_batch * max(plan.spec.seq, 1) / total / plan.world
        flops = 3 * plan.spec.forward_flops * plan.batch.global_batch
        mfu = flops / total / plan.num_workers / (rates.fp8 or rates).peak_flops
        shown = {name: seconds for name, seconds in parts.items() if seconds}
        return StepTime(total, *spread.bounds(shown), tokens, mfu, shown)

    def least_s(self, plan: Plan) -> float | None:
        """A lower bound of the schedule's length, and so of a step; None as `step_time`."""
        if self._rates(plan) is None:
            return None
        stages, messages = self.stages(plan), self.messages(plan)
        return None if stages is None or messages is None else _schedule(plan, self._cluster, stages, messages, True)[0]

    def stages(self, plan: Plan) -> list[StageTime] | None:
        """The stages of a plan; None if the cluster gives no rate for a link that a block needs."""
        key = "blocks of stages", plan.mesh.size("pp"), plan.pipeline.kind, len(plan.stages)
        blocks = once(self._cache, key, lambda: [_counted(stage, plan) for stage in plan.stages])
        time_of = partial(self.block_time, plan)
        return once(self._cache, ("stages", of_stages(plan)), lambda: _stages(plan, blocks, time_of))

    def block_time(self, plan: Plan, block: BlockSpec) -> BlockTime | None:
        """The seconds of a block of a plan whose time is known (`why_unknown`), apart from its schedule."""
        rates = self._rates(plan)
        assert rates is not None, "asked only where the cluster gives the rates"
        name, layers = plan.spec.first_alike[block.name], block.layers
        is_expert = once(self._cache, ("experts", name), lambda: any(x.layer_role == "expert" for x in layers))
        key = "block", of_blocks(plan, is_expert, block.is_recomputed), name
        return once(self._cache, key, lambda: block_time(block, plan, self._cluster, rates))

    def messages(self, plan: Plan) -> float | None:
        """Seconds that a pp rank in the middle spends on the messages of one microbatch."""
        rates = self._rates(plan)
        if plan.mesh.size("pp") == 1 or rates is None:
            return 0.0
        return once(self._cache, ("messages", of_stages(plan)), lambda: _messages(plan, self._cluster, rates))

    def _rates(self, plan: Plan) -> Rates | None:
        """The rates of one rank; None if the time of a step is unknown."""

        def compute() -> Rates | None:
            rates = rates_of(self._cluster, plan.precision.name)
            if rates is None or why_unknown(plan, self._cluster):
                return None
            return cores.of_a_rank(rates, plan, self._cluster)

        return once(self._cache, ("rates", plan.world, plan.servers), compute)


def why_unknown(plan: Plan, cluster: ClusterConfig) -> str:
    """Return why the time of a step cannot be predicted; empty if it can."""
    reason = other_blocks.why_unknown(plan, cluster) or servers.why_unknown(plan, cluster)
    return reason or not_given(plan, cluster)


def _contention_s(tensor: float, hidden: float, busy: float) -> float:
    """Seconds by which tensor communication between hosts is slower for data communication at the same time.

    Both send through the same port, and each gets half of it. hidden: of data communication, beside what else a pp rank
    is busy with.
    """
    return tensor * min(1.0, max(0.0, hidden) / max(busy - tensor, tensor))


def _counted(stage: Stage, plan: Plan) -> CountedBlocks:
    return tuple(Counter(plan.spec.first_alike[name] for name in stage.blocks).items())


def _stages(
    plan: Plan, blocks: list[CountedBlocks], time_of: Callable[[BlockSpec], BlockTime | None]
) -> list[StageTime] | None:
    """Stages with equal blocks take equally long."""
    times: dict[CountedBlocks, StageTime] = {}
    for counted in dict.fromkeys(blocks):
        forward = backward = 0.0
        parts: Parts = defaultdict(float)
        times_of_blocks: list[tuple[BlockTime, int]] = []
        for name, number in counted:
            time = time_of(plan.spec.block(name))
            if time is None:
                return None
            again = sum(time.again.values())
            forward += number * sum(time.forward.values())
            backward += number * (sum(time.backward.values()) + again)
            for kind, seconds in (*time.forward.items(), *time.backward.items(), (RECOMPUTE, again)):
                parts[kind] += number * seconds
            times_of_blocks.append((time, number))
        times[counted] = StageTime(forward, backward, dict(parts), pairs.passes(forward, backward, times_of_blocks))
    return [times[counted] for counted in blocks]


def _messages(plan: Plan, cluster: ClusterConfig, rates: Rates) -> float | None:
    seconds = 0.0
    for row in prediction.merge(plan.pipeline.collectives(plan.mesh.size("pp") // 2, plan)):
        if row.axis != "pp" or row.operation != "send":
            continue
        parts = [row]
        if plan.stack.scattered_messages and not plan.tensor.sequence_parallel:
            part = replace(row, payload_bytes=row.payload_bytes // plan.mesh.size("tp"))
            parts = [part, replace(row, axis="tp", operation="all_gather")]
        for part in parts:
            took = collective_s(part, plan, cluster, rates)
            if took is None:
                return None
            seconds += took
    return seconds / plan.batch.microbatches


def _schedule(
    plan: Plan, cluster: ClusterConfig, stages: list[StageTime], messages: float, least: bool = False
) -> tuple[float, float, float]:
    """(seconds of all microbatches in the schedule, mean seconds in which a pp rank works, mean seconds of waits that a
    pair's other pass hides). least: of the first, a lower bound."""
    pp, count = plan.mesh.size("pp"), plan.batch.microbatches
    each = messages * pp / len(stages) / 2
    forward, backward = [stage.forward + each for stage in stages], [stage.backward + each for stage in stages]
    busy = count * (sum(forward) + sum(backward)) / pp
    if pp == 1:
        return busy, busy, 0.0
    half = [seconds / 2 for seconds in backward]
    times = {"F": forward, "B": backward, "I": half, "W": half}
    if plan.pipeline.overlaps_passes:
        paired = pairs.times([stage.passes for stage in stages], plan)
        times |= {kind: [seconds + each for seconds in row] for kind, row in paired.items()}
    if least:
        return busy if cores.ranks_per_core(plan, cluster) > 1 else simulate.least(plan, times), busy, 0.0
    makespan, hidden = cores.makespan(plan, cluster, times, busy), 0.0
    if plan.pipeline.overlaps_passes:
        hidden = busy - sum(simulate.run(plan, times).busy) / pp
    return makespan, busy - hidden, hidden


def _parts_of(plan: Plan, stages: list[StageTime]) -> Parts:
    """The mean over pp ranks of the seconds of all microbatches, by kind of work."""
    parts: Parts = defaultdict(float)
    alike = Counter(map(id, stages))
    for stage in {id(stage): stage for stage in stages}.values():
        often = alike[id(stage)] * plan.batch.microbatches / plan.mesh.size("pp")
        for name, seconds in stage.parts.items():
            parts[name] += seconds * often
    return dict(parts)


class DataTime(NamedTuple):
    """Seconds of a step's data communication: gathers of weights; sums of gradients, the last ones included; late, what
    no computation can hide; shared, by which it slows down computation that hides it."""

    gathers: float
    sums: float
    late: float
    shared: float


def _data(plan: Plan, cluster: ClusterConfig, rates: Rates) -> DataTime | None:
    gathers = sums = late = shared = 0.0
    coordinate = plan.mesh.coordinate(0)
    for row in plan.data.collectives(coordinate["pp"], coordinate, plan):
        sent = _sent(row, plan)
        seconds = collective_s(sent, plan, cluster, rates)
        if seconds is None:
            return None
        often = 1 / prediction.steps_between(plan, row.purpose)
        late += often * sent.calls * host.check_s(prediction.group_size(plan, row.axis), plan)
        shared += often * (sharing_s(sent, plan, rates) if plan.data.shards_weights else overlap.SLOWED * seconds)
        late += often * copies_s(sent, plan, rates)
        if row.operation == "all_gather":
            gathers += often * seconds
        elif sent.operation != row.operation:
            late += often * seconds
        else:
            sums += often * seconds
    return DataTime(gathers, sums, late, shared)


def _sent(row: Collective, plan: Plan) -> Collective:
    """A row of the data strategy as the program sends it."""
    is_gather = row.operation == "all_gather"
    dtype = plan.precision.stored if is_gather else plan.precision.reduce
    if is_gather and plan.data.exchange_form(plan).gathers_rounded:
        dtype = plan.precision.compute
    bucket = plan.stack.bucket
    calls = row.calls if bucket is None else min(row.calls, -(-row.payload_bytes // (BYTES[dtype] * bucket)))
    if not plan.stack.whole_sums or row.operation == "all_reduce" or plan.data.shards_weights:
        return replace(row, calls=calls)
    return replace(row, calls=1, operation="all_gather" if is_gather else "all_reduce")


def _exposed(plan: Plan, data: DataTime, stages: list[StageTime]) -> float:
    """Return the seconds of the data strategy's communication that a pp rank's computation does not hide."""
    pp = plan.mesh.size("pp")
    forward, backward = (sum(getattr(stage, name) for stage in stages) / pp for name in ("forward", "backward"))
    return data.late + overlap.data_s(data.gathers, data.sums, data.shared, forward, backward, plan)
