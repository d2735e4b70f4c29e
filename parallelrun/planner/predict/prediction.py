"""Predicted collectives and memory of a plan, in closed form.

Ranks with copies or even shards of the same tensors cost the same, and so do pp ranks with equal blocks. Each class of
ranks is computed once, so 16,384 ranks take no longer than 16 (a test compares with every rank).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

from parallelrun.base.layout import Layout
from parallelrun.base.precision import BYTES
from parallelrun.config.schema.cluster_schema import ClusterConfig
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.contract.caching import cached
from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.contract.memory import Memory
from parallelrun.planner.contract.optimizers import num_states, update_rule
from parallelrun.planner.contract.parameters import distinct_parameters, element_bytes
from parallelrun.planner.contract.plan import CONTROL_ELEMENTS, EMBEDDING, SYNC, WORLD, Plan, once
from parallelrun.planner.memory import device_memory, peak
from parallelrun.planner.model.model_spec import ParameterSpec
from parallelrun.planner.pieces import orthogonalising, sample_sets
from parallelrun.planner.pieces import router_settings as routing

CONTROL = "control"
COUNT_BYTES = BYTES["float64"]
LEAVES_OUT = (  # the first two unless the cluster's constants give them (`device_memory.on_device`)
    "the framework's own memory (CUDA context, communicators)",
    "allocator fragmentation",
    "what kernels and collectives allocate inside",
)


def wire_bytes(row: Collective, size: int) -> int:
    """Bytes that one of `size` ranks sends for `row` under a bandwidth-optimal algorithm."""
    share = (size - 1) / size  # of the full-size buffer
    share = {"all_reduce": 2 * (size - 1) / size, "send": 1, "recv": 0}.get(row.operation, share)
    return round(row.payload_bytes * share) if size > 1 else 0


def group_size(plan: Plan, axis: str) -> int:
    """Ranks in a group of `axis`: a mesh axis, several joined by `+`, `world` (the workers; of messages with servers
    two at least), `embedding`, or an axis of the data strategy."""
    own = plan.data.group_size(axis)
    if own is not None:
        return own
    if axis in (WORLD, EMBEDDING):
        return max(plan.num_workers, 2 if plan.servers else 1) if axis == WORLD else 2
    return prod(plan.mesh.size(part) for part in axis.split("+")) if "+" in axis else plan.mesh.size(axis)


def steps_between(plan: Plan, purpose: str) -> int:
    """The number of steps from one transfer of a purpose to the next: above 1 for SYNC of independent replicas."""
    return plan.data.sync_every if purpose == SYNC else 1


def collectives(plan: Plan, rank: int) -> list[Collective]:
    """Everything that `rank` sends in one steady training step, by axis, operation and purpose.

    The step is one in which every row is sent (`DataStrategy.full_step`); see `steps_between` for rarer rows. The data
    strategy's rows include the sums over partial axes and of tied copies, because its shards determine their size.
    Control numbers take one all-reduce; servers exchange them with each worker instead.
    """
    if plan.role(rank) == "server":
        return merge(plan.data.server_collectives(rank - plan.num_workers, plan))
    coordinate = plan.mesh.coordinate(rank)
    pp_rank = coordinate["pp"]
    blocks = tuple(plan.spec.block(name) for stage in plan.stages_of(pp_rank) for name in stage.blocks)
    rows = [
        *plan.tensor.collectives(blocks, plan),
        *plan.pipeline.collectives(pp_rank, plan),
        *plan.data.collectives(pp_rank, coordinate, plan),
        *sample_sets.collectives(blocks, plan),
        *(plan.expert.collectives(blocks, plan) if plan.expert else []),
        *(plan.context.collectives(blocks, plan) if plan.context else []),
        *orthogonalising.collectives(plan, coordinate),
    ]
    if plan.servers and not plan.data.in_step:
        return merge(rows)
    rows += routing.collectives(plan)
    if plan.world > 1 and not plan.servers:
        elements = CONTROL_ELEMENTS + plan.num_norms
        rows.append(Collective(WORLD, "all_reduce", CONTROL, 1, elements * BYTES["float64"]))
    if plan.spec.has_ignored and pp_rank == plan.last_stage_pp_rank and plan.num_data_ranks > 1:
        rows.append(Collective(plan.count_axis, "all_reduce", CONTROL, 1, COUNT_BYTES))  # the number of valid targets
    return merge(rows)


def merge(rows: list[Collective]) -> list[Collective]:
    """Merge rows with equal axis, operation and purpose; sort them and drop those without calls."""
    equal: dict[tuple[str, str, str], list[Collective]] = {}
    for row in rows:
        equal.setdefault(row.key, []).append(row)
    merged = []
    for key, same in sorted(equal.items()):
        calls, payload = sum(row.calls for row in same), sum(row.payload_bytes for row in same)
        bounds = [row.payload_bytes if row.most_bytes is None else row.most_bytes for row in same]
        most = None if all(row.most_bytes is None for row in same) else sum(bounds)
        merged += [Collective(*key, calls, payload, most)] if calls else []
    return merged


def matches_prediction(row: Mapping[str, Any]) -> bool:
    """Return whether a row of comm.json matches its prediction (`Collective.allows`)."""
    said = row["predicted_calls"], row["predicted_payload_bytes"], row.get("predicted_most_bytes")
    return Collective("", "", "", *said).allows(row["calls"], row["payload_bytes"])


def memory(plan: Plan, rank: int, has_messages: bool = True) -> Memory:
    """Bytes of `rank` at the peak of a step, from layouts and the schedule. Servers hold the optimizer state.

    has_messages: False for a lower bound, without the buffers of messages between stages.
    """
    if plan.role(rank) == "server":
        return plan.data.server_memory(rank - plan.num_workers, plan)
    coordinate = plan.mesh.coordinate(rank)
    pp_rank = coordinate["pp"]
    weights, gradients, states = held_bytes(plan, coordinate)
    if plan.stack.separate_sums:  # those of a microbatch and their sums, whatever the data strategy
        numel, sizes = weights // BYTES[plan.precision.stored], (plan.precision.compute, plan.precision.reduce)
        gradients = numel * sum(BYTES[dtype] for dtype in sizes)
    weights += _fp8_bytes(plan, coordinate)
    traversal = peak.ScheduleTraversal(plan, pp_rank, coordinate)
    largest = traversal.peak(has_messages)
    gradients += 0 if plan.stack.separate_sums else largest.gradients
    host = sum(updated_bytes(plan, coordinate, copies) for copies in (2, None)) if plan.offloads_optimizer else 0
    host += traversal.host_bytes() if plan.recompute == "offload" else 0
    return Memory(weights, gradients, states, largest.activations, largest.temporary, LEAVES_OUT, host=host)


def held_bytes(plan: Plan, coordinate: dict[str, int]) -> tuple[int, int, int]:
    """Bytes of weights, gradients and optimizer state that a rank holds throughout a step."""
    several = plan.batch.microbatches > 1
    key = "held", several, peak.first_alike_ranks(plan)[coordinate["pp"]], peak.within_stage(coordinate)
    return once(plan.weights_cache, key, lambda: _held_bytes(plan, coordinate))


def _held_bytes(plan: Plan, coordinate: dict[str, int]) -> tuple[int, int, int]:
    data, pp_rank = plan.data, coordinate["pp"]
    weights, gradients, states = parameters_bytes(plan, coordinate)
    weights += data.gathered_bytes(pp_rank, coordinate, plan)
    gradients += data.held_bytes(pp_rank, coordinate, plan) if plan.num_data_ranks > 1 or plan.servers else 0
    return weights, gradients, states


def parameters_bytes(plan: Plan, coordinate: dict[str, int]) -> tuple[int, int, int]:
    """The `parameter_bytes` of all parameters of a rank."""
    weights = gradients = states = 0
    sizes: dict[object, tuple[int, int, int]] = {}  # several stages of a rank have equal parameters
    for parameter, count in distinct_parameters(plan, coordinate["pp"]):
        spec, layout = parameter.spec, parameter.layout
        key = spec.shape, spec.layer_role, spec.heads, spec.frozen, spec.stored, layout, update_rule(spec, plan)
        if key not in sizes:
            sizes[key] = parameter_bytes(spec, layout, plan, coordinate)
        weight, gradient, state = sizes[key]
        weights += count * weight
        gradients += count * gradient
        states += count * state
    return weights, gradients, states


def updated_bytes(plan: Plan, coordinate: dict[str, int], copies: int | None = 1) -> int:
    """Bytes of so many copies of the weights that a rank updates, in the accurate dtype. None: of the states."""
    return BYTES[plan.precision.accurate] * sum(
        count
        * (num_states(p.spec, plan) if copies is None else copies)
        * plan.data.state_layout(p.spec, p.layout, plan).local_numel(p.spec.shape, plan.mesh.sizes, coordinate)
        for p, count in distinct_parameters(plan, coordinate["pp"])
        if not p.spec.frozen
    )


def _fp8_bytes(plan: Plan, coordinate: dict[str, int]) -> int:
    """Bytes of weights in fp8, along and across, which the microbatches of a step share; FSDP's follow each gather."""
    if not (plan.precision.others and plan.stack.fp8_copies) or plan.data.shards_weights:
        return 0
    roles = ("column_parallel", "row_parallel", "linear", "expert" if plan.stack.fp8 == "all" else "")
    return sum(
        2 * count * p.layout.local_numel(p.spec.shape, plan.mesh.sizes, coordinate)
        for p, count in distinct_parameters(plan, coordinate["pp"])
        if p.spec.layer_role in roles and 1 < len(p.spec.shape) < 4  # no bias, no convolution
    )


@cached("weights_cache")
def stored_bytes(plan: Plan) -> int:
    """Bytes of rank 0's weights if all of them are in the accurate dtype, in which the optimizer updates them."""
    coordinate, sizes = plan.mesh.coordinate(0), plan.mesh.sizes
    parameters = distinct_parameters(plan, coordinate["pp"])
    elements = (count * p.layout.local_numel(p.spec.shape, sizes, coordinate) for p, count in parameters)
    return BYTES[plan.precision.accurate] * sum(elements)


def parameter_bytes(
    spec: ParameterSpec, layout: Layout, plan: Plan, coordinate: dict[str, int]
) -> tuple[int, int, int]:
    """Bytes of a parameter that a rank holds: weights, gradients that stay allocated, optimizer state. layout: before
    the data strategy shards it (`module_layout`)."""
    data, accurate = plan.data, BYTES[plan.precision.accurate]
    local: dict[object, Any] = {}  # most often two of the three are equal
    weight, gradient, state = (
        once(local, own.dims, partial(own.local_numel, spec.shape, plan.mesh.sizes, coordinate))
        for layout_of in (data.weight_layout, data.gradient_layout, data.state_layout)
        if (own := layout_of(spec, layout, plan))
    )
    weight *= element_bytes(spec, plan, layout)
    if spec.frozen:
        return weight, 0, 0
    keeps = plan.num_data_ranks > 1 and data.keeps_gradients(plan)
    states = 0 if plan.servers else num_states(spec, plan) * (not plan.offloads_optimizer) + data.kept_states
    return weight, gradient * BYTES[plan.precision.reduce] if keeps else 0, state * accurate * states


def checkpoint_bytes(plan: Plan) -> int:
    """Bytes of a checkpoint, over all ranks: weights, optimizer state and state of the data strategy.

    Each element is saved once, and once more for each replica that trains independently.
    """
    trained = [p for p in plan.spec.parameters.values() if not p.frozen]
    states = sum(p.numel * num_states(p, plan) for p in trained)
    replicas = plan.num_replicas
    copies = 1 + replicas if plan.data.independent and replicas > 1 else 1
    stored = BYTES[plan.precision.stored]
    narrower = sum(p.numel * (stored - BYTES[p.stored]) for p in plan.spec.parameters.values() if p.stored)
    elements = (plan.spec.num_parameters + states) * copies + sum(p.numel for p in trained) * plan.data.kept_states
    wider = states * (BYTES[plan.precision.accurate] - stored)  # no weights of replicas are so
    return elements * stored + wider - narrower * copies + plan.data.saved_bytes(plan)


def copied_bytes(config: Config, plan: Plan) -> int:
    """Bytes of host memory, over all ranks, of the copies from which a checkpoint is written beside training."""
    settings = config.checkpoint
    return checkpoint_bytes(plan) if settings.asynchronous and 0 < settings.every < config.steps else 0


@cached("weights_cache")
def pp_rank_classes(plan: Plan) -> list[list[int]]:
    """Group pp ranks whose ranks send the same and hold the same weights (`peak.first_alike_ranks`)."""
    classes: dict[int, list[int]] = {}
    for pp_rank, first in enumerate(peak.first_alike_ranks(plan)):
        classes.setdefault(first, []).append(pp_rank)
    return list(classes.values())


def memories(plan: Plan, cluster: ClusterConfig | None = None) -> dict[int, Memory]:
    """Per pp rank, the Memory of its first rank, which holds most; with what a device of `cluster` holds besides."""
    tensors = {pp_rank: _memory_of(plan, pp_rank, True) for pp_rank in range(plan.mesh.size("pp"))}
    if cluster is None:
        return tensors
    return {pp_rank: device_memory.on_device(memory, plan, pp_rank, cluster) for pp_rank, memory in tensors.items()}


def heaviest(plan: Plan, cluster: ClusterConfig) -> Memory:
    """The largest of `memories`: of pp ranks with equal blocks and neighbours, the first holds most microbatches, and
    the last most weight gradients that wait."""
    ends = (0, -1) if plan.pipeline.splits_backward else (0,)
    pp_ranks = {ranks[end] for ranks in pp_rank_classes(plan) for end in ends}
    tensors = {pp_rank: _memory_of(plan, pp_rank, True) for pp_rank in sorted(pp_ranks)}
    on_device = (device_memory.on_device(memory, plan, pp_rank, cluster) for pp_rank, memory in tensors.items())
    return max(on_device, key=lambda memory: memory.total)


def least_bytes(plan: Plan, limit: float) -> int:
    """A lower bound of the bytes of tensors on the rank that holds most. Ends with the first rank above `limit`."""
    most = 0
    for ranks in reversed(pp_rank_classes(plan)):
        most = max(most, _memory_of(plan, ranks[0], False).tensors)
        if most > limit:
            break
    return most


@cached("cache")
def _memory_of(plan: Plan, pp_rank: int, has_messages: bool) -> Memory:
    """The Memory of a pp rank's first rank. Where a schedule repeats itself, a shorter step holds as much at its peak;
    only the batch is smaller."""
    short = _shortened(plan)
    needed = memory(short, plan.mesh.rank(pp=pp_rank), has_messages)
    batch = peak.batch_bytes(plan, pp_rank) - peak.batch_bytes(short, pp_rank)
    return replace(needed, temporary=needed.temporary + batch)


@cached("cache")
def _shortened(plan: Plan) -> Plan:
    """The plan with fewer microbatches, in equal rounds, if its schedule then repeats itself; else the plan."""
    pp, count = plan.mesh.size("pp"), plan.batch.microbatches
    rounds = peak.ROUNDS * pp
    if not plan.pipeline.repeats or count <= rounds or (count % pp and plan.pipeline.virtual_stages > 1):
        return plan
    return plan.sharing(batch=replace(plan.batch, microbatches=rounds))
