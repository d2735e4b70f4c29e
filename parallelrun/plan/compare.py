"""The tensor layouts side by side: what one layer and one microbatch of a plan would cost in each. Torch-free, pure.

The tensor strategy of each layout predicts it, as for a run, with the plan's own batch, precision and recomputation.
Volumes are bytes that a rank receives, forward and backward, under bandwidth-optimal algorithms.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, inf

from parallelrun.config.schema import Config, TensorStrategyConfig
from parallelrun.config.strategy_keys import narrowed
from parallelrun.model_spec import BlockSpec, ModelSpec
from parallelrun.plan import prediction
from parallelrun.plan.comparison import Comparison, Figures, InsideNode, Row
from parallelrun.plan.load import tensor_strategy
from parallelrun.plan.mesh_shape import MeshShape
from parallelrun.plan.parameters import module_layout
from parallelrun.plan.request import Request
from parallelrun.plan.shorthands import kinds
from parallelrun.plan.structure import BatchSizes, Collective, Plan
from parallelrun.plan.tensor_strategy import LayoutChoice, MeshDims, TensorStrategy
from parallelrun.precision import BYTES, Precision
from parallelrun.product import Transfer
from parallelrun.wording import divisors

NODE = 8  # devices of a host, where the cluster does not say
MOVED_WEIGHTS = ("weights", "weight_gradients")
ONE_DIMENSIONAL = LayoutChoice("1d", TensorStrategyConfig())  # what the others are measured against
LARGE = 2**40  # rows: so many that only what grows with them decides between forms


def compare(plan: Plan, config: Config) -> Comparison | None:
    """The comparison for a language model whose layers are split over tp; None where there is nothing to compare."""
    block = next((block for block in plan.spec.blocks if _is_compared(block)), None)
    if plan.mesh.size("tp") == 1 or plan.spec.kind != "tokens" or block is None:
        return None
    case = _case(plan, config, block)
    rows: list[Row] = []
    for layout in _choices(plan.mesh.size("tp")):
        refused = any(row.reason and row.layout == layout.variant_of for row in rows)
        rows += [] if refused else [_row(layout, case)]
    if not any(row.chosen for row in rows):
        rows.append(_own_row(case))
    return Comparison(
        block.name, _rows(case.plan), plan.spec.hidden, plan.mesh.size("tp"), tuple(rows), _inside_node(case)
    )


@dataclass(frozen=True)
class _Case:
    """What all rows share. plan: with the model's ends and the compared layer alone. narrow: its spec with samples of
    one position, for break-evens. slope_1d: bytes received per row of a microbatch in 1D."""

    plan: Plan
    config: Config
    block: BlockSpec
    narrow: ModelSpec
    slope_1d: float = 0.0


def _is_compared(block: BlockSpec) -> bool:
    return block.is_recomputed and any(
        layer.layer_role in ("column_parallel", "row_parallel") for layer in block.layers
    )


def _case(plan: Plan, config: Config, block: BlockSpec) -> _Case:
    """A model of one layer answers the same questions at a fraction of the time."""
    ends = {b.name: b for b in (plan.spec.blocks[0], block, plan.spec.blocks[-1])}
    spec = replace(plan.spec, blocks=tuple(ends.values()))
    narrow = replace(spec, seq=1, sample_shape=(1,), boundary_shape=(1, spec.hidden), targets_per_sample=1)
    case = _Case(replace(plan, spec=spec), config, block, narrow)
    resolved = _resolved(ONE_DIMENSIONAL, case, spec, plan.batch)
    return case if isinstance(resolved, str) else replace(case, slope_1d=_line(resolved, block)[0])


def _choices(tp: int) -> list[LayoutChoice]:
    """Every layout worth a row, that of one dimension first: the others are measured against it."""
    return [choice for kind in kinds("tensor") for choice in tensor_strategy(kind).layout_choices(tp)]


def _rows(plan: Plan) -> int:
    return plan.batch.micro_batch * plan.spec.seq


def _request(layout: LayoutChoice, case: _Case, spec: ModelSpec, batch: BatchSizes, tp: int | None = None) -> Request:
    """Return the request for this layout with everything else as in the plan."""
    plan, strategy = case.plan, case.config.strategy
    tensor = replace(layout.config, overlap=plan.tensor.overlap)
    pipeline = replace(strategy.pipeline, kind=plan.pipeline.kind)
    config = replace(
        case.config, layout=None, grid=None, depth=None, strategy=replace(strategy, tensor=tensor, pipeline=pipeline)
    )
    size = plan.mesh.size
    config = narrowed(config)
    return Request(config, spec, size("pp"), size("dp"), tp or size("tp"), plan.pipeline.virtual_stages, batch)


def _resolved(
    layout: LayoutChoice, case: _Case, spec: ModelSpec, batch: BatchSizes, tp: int | None = None
) -> Plan | str:
    """Return the plan in another layout, on its tensor axes alone; or why it is not legal."""
    strategy = tensor_strategy(layout.config.kind)
    request = _request(layout, case, spec, batch, tp)
    problems = strategy.check(request) + case.plan.data.check(request)
    if problems:
        return "; ".join(dict.fromkeys(problem.what for problem in problems))
    return _with_layout(case.plan, strategy.resolve(request), strategy.mesh_dims(request), spec, batch)


def _with_layout(plan: Plan, tensor: TensorStrategy, axes: MeshDims, spec: ModelSpec, batch: BatchSizes) -> Plan:
    mesh_dims, flattened = axes
    mesh = MeshShape((("pp", 1), ("dp", 1), *mesh_dims), flattened)
    return replace(plan, mesh=mesh, tensor=tensor, spec=spec, batch=batch)


def _row(layout: LayoutChoice, case: _Case) -> Row:
    plan = case.plan
    resolved = _resolved(layout, case, plan.spec, plan.batch)
    if isinstance(resolved, str):
        return Row(layout.name, layout.config.kind, False, reason=resolved)
    return Row(
        layout.name,
        layout.config.kind,
        _is_plan(resolved, plan),
        _figures(resolved, case.block),
        _break_even(layout, resolved, case),
    )


def _own_row(case: _Case) -> Row:
    """The plan's own layout, where its forms or its grid have no line of their own."""
    plan, own = case.plan, case.plan.tensor
    section = replace(case.config.strategy.tensor, kind=own.kind)
    asked = narrowed(replace(case.config, strategy=replace(case.config.strategy, tensor=section)))
    config = own.resolved_config(asked, plan)
    form = "" if own.asked_form(asked) == "auto" else own.asked_form(asked)
    name = " ".join(filter(None, (own.label(plan), "" if own.save_gathered else "lean", form)))
    return Row(name, own.kind, True, _figures(plan, case.block), _break_even(LayoutChoice(name, config), plan, case))


def _is_plan(resolved: Plan, plan: Plan) -> bool:
    """Return whether this layout is the plan's own. The plan may have chosen forms for layers that are not compared."""
    forms = tuple(form for form in plan.tensor.forms if form in resolved.tensor.forms)
    return resolved.tensor == replace(plan.tensor, forms=forms) and _axes(resolved) == _axes(plan)


def _axes(plan: Plan) -> list[tuple[str, int]]:
    return [(axis, plan.mesh.size(axis)) for axis in plan.mesh.mesh_dims_of("tp")]


def _figures(plan: Plan, block: BlockSpec) -> Figures:
    rows = _collectives(plan, block)
    held = [(parameter, module_layout(parameter, plan)) for parameter in block.parameters]
    numels = [layout.local_numel(parameter.shape, plan.mesh.sizes, {}) for parameter, layout in held]
    summed = [
        Collective(axis, "all_reduce", "partial", 1, numel * BYTES[plan.precision.reduce])
        for (_, layout), numel in zip(held, numels)
        for axis in layout.partial
    ]
    return Figures(
        received_elements=sum(_received(row, plan) // _element(row, plan.precision) for row in rows),
        received_bytes=sum(_received(row, plan) for row in rows),
        moved_weight_bytes=sum(_received(row, plan) for row in rows if row.purpose in MOVED_WEIGHTS),
        once_bytes=sum(_received(row, plan) for row in summed),
        steps=sum(Transfer("", "", r.operation, r.axis, 0, r.calls).steps(plan.mesh.sizes) for r in rows),
        weight_bytes=sum(numels) * BYTES[plan.precision.stored],
        saved_bytes=plan.tensor.saved_bytes(block, plan),
    )


def _collectives(plan: Plan, block: BlockSpec) -> list[Collective]:
    """Of one microbatch."""
    once = replace(plan, batch=replace(plan.batch, microbatches=1))
    return plan.tensor.collectives((block,), once)


def _received(row: Collective, plan: Plan) -> int:
    return prediction.wire_bytes(row, prediction.group_size(plan, row.axis))  # as much as a rank sends


def _element(row: Collective, precision: Precision) -> int:
    dtype = {"weight_gradients": precision.reduce, "norm": precision.accurate}.get(row.purpose, precision.compute)
    return BYTES[dtype]


def _break_even(layout: LayoutChoice, resolved: Plan, case: _Case) -> float | None:
    """M/h above which the layout receives fewer bytes than 1D; 0: always; None: never.

    For fixed forms the volume is a line in M: weights move whatever M is, all else grows with it. The best forms are
    chosen anew where that line crosses 1D's; the crossing only moves down, until the forms stay.
    """
    if resolved.tensor.is_one_dimensional or not case.slope_1d:
        return None
    best = inf
    for _ in range(8):
        slope, offset = _line(resolved, case.block)
        crossing = offset / (case.slope_1d - slope) if slope < case.slope_1d else inf
        if crossing >= best < inf:
            break
        best = crossing
        rows = _divisible(LARGE if best == inf else best, case)
        again = _resolved(layout, case, case.narrow, BatchSizes(rows, rows, 1))
        if isinstance(again, str) or again.tensor == resolved.tensor:
            break
        resolved = again
    return None if best == inf else best / case.plan.spec.hidden


def _divisible(rows: float, case: _Case) -> int:
    """The next number of rows that the row axes of every layout divide."""
    tp = case.plan.mesh.size("tp")
    return max(1, ceil(rows / tp)) * tp


def _line(plan: Plan, block: BlockSpec) -> tuple[float, int]:
    """(slope, value at 0) of the volume over M, with the plan's forms."""
    received = {True: 0, False: 0}
    for row in _collectives(plan, block):
        received[row.purpose in MOVED_WEIGHTS] += _received(row, plan)
    return received[False] / _rows(plan), received[True]


def _inside_node(case: _Case) -> InsideNode | None:
    """1D at the largest tp inside a node that receives less than the plan, the other tensor ranks as data replicas; if
    there is none, at the largest legal one.

    Against 2.5D at most as many as a slice of its depth has: slices along the depth hold copies, as data replicas do.
    """
    plan, node = case.plan, case.config.cluster.gpus_per_node or NODE
    tp = plan.mesh.size("tp")
    most = min(node, tp // plan.mesh.size("depth"))
    ours, largest = _figures(plan, case.block), None
    for smaller in (n for n in reversed(divisors(tp)) if n <= most):
        candidate = _smaller(smaller, node, ours, case)
        if candidate and (candidate.wins or (plan.tensor.is_one_dimensional and smaller == tp)):
            return candidate
        largest = largest or candidate
    return largest


def _smaller(smaller: int, node: int, ours: Figures, case: _Case) -> InsideNode | None:
    """1D at tp = `smaller`; None where that is not legal."""
    plan = case.plan
    resolved = _resolved(ONE_DIMENSIONAL, case, plan.spec, plan.batch, tp=smaller)
    if isinstance(resolved, str):
        return None
    theirs = _figures(resolved, case.block)
    replicas, dp = plan.mesh.size("tp") // smaller, plan.mesh.size("dp")
    microbatches = plan.batch.microbatches
    return InsideNode(
        tp=smaller,
        dp=dp * replicas,
        node=node,
        received_bytes=microbatches * theirs.received_bytes // replicas + _gradient_sum(theirs, dp * replicas, plan),
        plan_received_bytes=microbatches * ours.received_bytes + ours.once_bytes + _gradient_sum(ours, dp, plan),
        weight_bytes=theirs.weight_bytes,
        plan_weight_bytes=ours.weight_bytes,
        divides=plan.batch.replica_batch % replicas == 0,
    )


def _gradient_sum(figures: Figures, dp: int, plan: Plan) -> int:
    """Bytes received to sum a layer's gradients over dp, once a step."""
    payload = figures.weight_bytes // BYTES[plan.precision.stored] * BYTES[plan.precision.reduce]
    return prediction.wire_bytes(Collective("dp", "all_reduce", "gradients", 1, payload), dp)
