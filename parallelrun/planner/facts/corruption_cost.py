"""Predicted cost of the checks for silent data corruption, and the faults that they do not cover."""

from __future__ import annotations

from dataclasses import dataclass, replace

from parallelrun.base.errors import ConfigError
from parallelrun.base.layout import Layout
from parallelrun.base.precision import BYTES
from parallelrun.base.wording import divisors
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.contract.parameters import distinct_parameters
from parallelrun.planner.contract.plan import SYNC, Plan
from parallelrun.planner.pieces.orthogonalising import MOMENTUM
from parallelrun.planner.predict.prediction import CONTROL, parameter_bytes, pp_rank_classes
from parallelrun.planner.predict.step_time.step import step_time
from parallelrun.planner.predict.traffic import traffic_of
from parallelrun.planner.resolve.resolve_config import resolve

EXCHANGES = 2  # of the weights with those of the known answers, and back
UPDATED = "parameters"  # the purpose of traffic by which ranks get updated weights
DIGESTED = 2  # times that the weights are read in every step: when they begin to rest, and before the update


@dataclass(frozen=True)
class Checks:
    """Cost of a check every `every` steps. host_bytes: copies in host memory, on the rank that holds most.

    samples: of the batch that a check computes again. share_of_flops: of a run's. check_s: seconds of a check,
    share_of_time: of a run's; without the copies to host memory, None where the cluster gives no rates. wire_bytes:
    what the busiest rank sends in a check, without digests. alone: the part of the optimizer's state that no other rank
    holds as well, in which a changed bit is not seen.
    """

    every: int
    host_bytes: int
    samples: int
    share_of_flops: float
    wire_bytes: int
    alone: float
    check_s: float | None = None
    share_of_time: float | None = None


def checks(plan: Plan, config: Config) -> Checks | None:
    """Return what the checks of a run need; None if it has none. Where experts are on several ranks, wire_bytes are
    those of an even load."""
    if not config.sdc.every:
        return None
    small, every = smallest_batch(config, plan), config.sdc.every
    flops = small.batch.global_batch / plan.batch.global_batch + config.sdc.recompute
    _, rows = traffic_of(small)
    times = {CONTROL: 0, SYNC: 0, MOMENTUM: 0, UPDATED: 0 if plan.data.independent else EXCHANGES}  # apart, none meet
    sent = sum(times.get(row.purpose, 1) * row.wire_bytes for row in rows)
    weights, states, lone = max(_bytes_of(plan, ranks[0]) for ranks in pp_rank_classes(plan))
    compressed = plan.data.saved_bytes(plan) // plan.num_workers
    copied = 2 * (weights + compressed) + states  # the state of the last check, and the first weights
    without_time = Checks(
        every, copied, small.batch.global_batch, flops / every, sent, lone / states if states else 0.0
    )
    check_step, step = step_time(small, config.cluster), step_time(plan, config.cluster)
    if check_step is None or step is None:
        return without_time
    reading = 1 / (1e9 * (config.cluster.memory_gb_s or 0))
    check_s = check_step.step_s + config.sdc.recompute * step.step_s + (2 * weights + states) * reading
    return replace(
        without_time, check_s=check_s, share_of_time=(check_s / every + DIGESTED * weights * reading) / step.step_s
    )


def _bytes_of(plan: Plan, pp_rank: int) -> tuple[int, int, int]:
    """Bytes that the first rank of a stage updates, of their state, and of the state that it alone holds."""
    coordinate = plan.mesh.coordinate(plan.mesh.rank(pp=pp_rank))
    weights = states = lone = 0
    for parameter, count in distinct_parameters(plan, pp_rank):
        layout = plan.data.state_layout(parameter.spec, parameter.layout, plan)
        numel = layout.local_numel(parameter.spec.shape, plan.mesh.sizes, coordinate)
        state = count * parameter_bytes(parameter.spec, parameter.layout, plan, coordinate)[2]
        weights += count * numel * BYTES[plan.precision.stored]
        states += state
        lone += 0 if replicated_over(layout, plan) else state
    return weights, states, lone


def replicated_over(layout: Layout, plan: Plan) -> tuple[str, ...]:
    """The mesh dims of several ranks on which all have the same part, but for stages and independent replicas."""
    shape = plan.mesh
    differ = {dim for axis in (*layout.axes, "pp") for dim in shape.mesh_dims_of(axis)}
    if plan.data.independent:
        differ |= set(shape.mesh_dims_of(plan.worker_axis))
    return tuple(dim for dim in shape.mesh_dim_names if dim not in differ and shape.size(dim) > 1)


def smallest_batch(config: Config, plan: Plan) -> Plan:
    """Return the plan with the smallest microbatches and the fewest of them that it allows.

    All else is the plan's, whose layers compute the batch: a plan of its own might choose other forms of products.
    Routing groups and sets of samples are built into layers, so that a plan that has any keeps its batch.
    """
    if plan.sample_sets is not None or plan.spec.router is not None:
        return plan
    batch, dp = plan.batch, plan.mesh.size("dp")
    for count in divisors(batch.microbatches):
        for size in divisors(batch.micro_batch):
            traced = replace(
                config, global_batch=dp * count * size, micro_batch=size, microbatches=None, local_batch=None
            )
            try:
                return replace(plan, batch=resolve(traced).batch)
            except ConfigError:
                continue
    return plan
