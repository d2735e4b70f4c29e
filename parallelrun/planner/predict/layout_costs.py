"""The tensor layouts side by side: what one layer and one microbatch of a plan would cost in each. Torch-free, pure.

The tensor strategy of each layout predicts it, as for a run, with the plan's own batch, precision and recomputation.
Volumes are bytes that a rank receives, forward and backward, under bandwidth-optimal algorithms.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, inf

from parallelrun.base.precision import BYTES, Precision
from parallelrun.base.wording import divisors
from parallelrun.config.schema.run_schema import Config, TensorStrategyConfig
from parallelrun.config.schema.strategy_keys import kinds, narrowed
from parallelrun.planner.contract.classes import tensor_strategy
from parallelrun.planner.contract.mesh_shape import MeshShape
from parallelrun.planner.contract.parameters import module_layout
from parallelrun.planner.contract.plan import BatchSizes, Collective, Plan
from parallelrun.planner.contract.request import Request
from parallelrun.planner.contract.tensor_strategy import LayoutChoice
from parallelrun.planner.model.model_spec import BlockSpec
from parallelrun.planner.model.product import Transfer
from parallelrun.planner.predict import prediction

NODE = 8  # devices of a host, where the cluster does not say
MOVED_WEIGHTS = ("weights", "weight_gradients")
ONE_DIMENSIONAL = LayoutChoice("1d", TensorStrategyConfig())  # what the others are measured against
LARGE = 2**40  # rows: so many that only what grows with them decides between forms


@dataclass(frozen=True)
class Figures:
    """Figures of one layer and one microbatch on the rank that holds most. moved_weight_bytes: the part of
    received_bytes that weights and their gradients make. once_bytes: received once a step besides (2.5D sums gradients
    over depth). steps: messages one after the other. weight_bytes, saved_bytes: held, the latter for backward
    (attention too)."""

    received_elements: int
    received_bytes: int
    moved_weight_bytes: int
    once_bytes: int
    steps: int
    weight_bytes: int
    saved_bytes: int


@dataclass(frozen=True)
class Row:
    """One layout. reason: why it is not legal here (then without figures). chosen: the plan's own. break_even: rows of
    a microbatch per hidden feature (M/h) above which it receives fewer bytes than 1D; None: never, or 1D itself."""

    layout: str
    kind: str
    chosen: bool
    figures: Figures | None = None
    break_even: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class InsideNode:
    """The same ranks and samples with 1D inside a node and data parallelism outside: bytes that a rank receives per
    layer and step, sums of gradients included, against the plan's own; and weights a rank holds of the layer."""

    tp: int
    dp: int
    node: int
    received_bytes: int
    plan_received_bytes: int
    weight_bytes: int
    plan_weight_bytes: int
    divides: bool  # the batch of a data replica divides by dp

    @property
    def wins(self) -> bool:
        return self.received_bytes < self.plan_received_bytes


@dataclass(frozen=True)
class Comparison:
    """layer: the block that is compared, one of many alike. rows: M, positions of a microbatch (on a rank of cp)."""

    layer: str
    rows: int
    hidden: int
    tp: int
    layouts: tuple[Row, ...]
    inside_node: InsideNode | None

    @property
    def chosen(self) -> Row:
        return next(row for row in self.layouts if row.chosen)


def compare(plan: Plan, config: Config) -> Comparison | None:
    """The comparison for a language model whose layers are split over tp; None where there is nothing to compare."""
    block = next((block for block in plan.spec.blocks if _is_compared(block)), None)
    tp = plan.mesh.size("tp")
    if tp == 1 or plan.spec.kind != "tokens" or block is None:
        return None
    ends = {one.name: one for one in (plan.spec.blocks[0], block, plan.spec.blocks[-1])}
    case = _Case(replace(plan, spec=replace(plan.spec, blocks=tuple(ends.values()))), config, block)
    rows: list[Row] = []
    for layout in [choice for kind in kinds("tensor") for choice in tensor_strategy(kind).layout_choices(tp)]:
        if not any(row.reason and row.layout == layout.variant_of for row in rows):
            rows.append(_row(layout, case.resolve(layout), case))
    if not any(row.chosen for row in rows):
        rows.append(_row(_own_layout(case), case.plan, case))
    return Comparison(block.name, case.plan.num_rows, plan.spec.hidden, tp, tuple(rows), _inside_node(case))


@dataclass(frozen=True)
class _Case:
    """The inputs of all rows. plan: of the model's ends and the compared layer alone, which gives the same answers in
    a fraction of the time."""

    plan: Plan
    config: Config
    block: BlockSpec

    @cached_property
    def slope_1d(self) -> float:
        """Bytes received per row of a microbatch in 1D; 0 where that is not legal."""
        resolved = self.resolve(ONE_DIMENSIONAL)
        return 0.0 if isinstance(resolved, str) else _line(resolved, self.block)[0]

    def resolve(self, layout: LayoutChoice, tp: int | None = None, rows: int | None = None) -> Plan | str:
        """The plan in another layout, on its tensor axes alone; or why it is not legal.

        tp: instead of the plan's. rows: as many samples of one position for a rank of cp, instead of the plan's batch.
        """
        plan, strategy, spec, batch = self.plan, self.config.strategy, self.plan.spec, self.plan.batch
        pp, dp, cp = (plan.mesh.size(axis) for axis in ("pp", "dp", "cp"))
        if rows is not None:
            batch = BatchSizes(rows * cp, rows * cp, 1)
            spec = replace(spec, seq=1, sample_shape=(1,), boundary_shape=(1, spec.hidden), targets_per_sample=1)
        tensor = replace(layout.config, overlap=plan.tensor.overlap)
        strategy = replace(strategy, tensor=tensor, pipeline=replace(strategy.pipeline, kind=plan.pipeline.kind))
        config = narrowed(replace(self.config, layout=None, grid=None, depth=None, strategy=strategy))
        stages = plan.pipeline.virtual_stages
        request = Request(config, spec, pp, dp, tp or plan.mesh.size("tp"), stages, batch, cp=cp)
        kind = tensor_strategy(tensor.kind)
        problems = kind.check(request) + plan.data.check(request)
        if plan.context and rows is None:  # what it checks does not depend on the batch
            problems += plan.context.check(request)
        if problems:
            return "; ".join(dict.fromkeys(problem.what for problem in problems))
        mesh_dims, flattened = kind.mesh_dims(request)
        mesh = MeshShape((("pp", 1), ("dp", 1), ("cp", cp), *mesh_dims), flattened)
        return replace(plan, mesh=mesh, tensor=kind.resolve(request), spec=spec, batch=batch)


def _is_compared(block: BlockSpec) -> bool:
    return block.is_recomputed and any(
        layer.layer_role in ("column_parallel", "row_parallel") for layer in block.layers
    )


def _row(layout: LayoutChoice, resolved: Plan | str, case: _Case) -> Row:
    if isinstance(resolved, str):
        return Row(layout.name, layout.config.kind, False, reason=resolved)
    chosen, figures = _is_plan(resolved, case.plan), _figures(resolved, case.block)
    return Row(layout.name, layout.config.kind, chosen, figures, _break_even(layout, resolved, case))


def _own_layout(case: _Case) -> LayoutChoice:
    """The plan's own layout, where its forms or its grid have no line of their own."""
    plan, own = case.plan, case.plan.tensor
    section = replace(case.config.strategy.tensor, kind=own.kind)
    asked = narrowed(replace(case.config, strategy=replace(case.config.strategy, tensor=section)))
    form = "" if own.asked_form(asked) == "auto" else own.asked_form(asked)
    name = " ".join(filter(None, (own.label(plan), "" if own.save_gathered else "lean", form)))
    return LayoutChoice(name, own.resolved_config(asked, plan))


def _is_plan(resolved: Plan, plan: Plan) -> bool:
    """Return whether this layout is the plan's own. The plan may have chosen forms for layers that are not compared."""
    forms = tuple(form for form in plan.tensor.forms if form in resolved.tensor.forms)
    axes, own = ({axis: one.mesh.size(axis) for axis in one.mesh.mesh_dims_of("tp")} for one in (resolved, plan))
    return resolved.tensor == replace(plan.tensor, forms=forms) and axes == own


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
    """Return the collectives of one microbatch."""
    return plan.tensor.collectives((block,), replace(plan, batch=replace(plan.batch, microbatches=1)))


def _received(row: Collective, plan: Plan) -> int:
    return prediction.wire_bytes(row, prediction.group_size(plan, row.axis))  # as much as a rank sends


def _element(row: Collective, precision: Precision) -> int:
    dtype = {"weight_gradients": precision.reduce, "norm": precision.accurate}.get(row.purpose, precision.compute)
    return BYTES[dtype]


def _line(plan: Plan, block: BlockSpec) -> tuple[float, int]:
    """(slope, value at 0) of the volume over M, with the plan's forms: weights move whatever M is, all else grows."""
    received = {True: 0, False: 0}
    for row in _collectives(plan, block):
        received[row.purpose in MOVED_WEIGHTS] += _received(row, plan)
    return received[False] / plan.num_rows, received[True]


def _break_even(layout: LayoutChoice, resolved: Plan, case: _Case) -> float | None:
    """M/h above which the layout receives fewer bytes than 1D; 0: always; None: never.

    For fixed forms the volume is a line in M. The best forms are chosen anew where that line crosses 1D's; the crossing
    only moves down, until the forms stay.
    """
    if resolved.tensor.is_one_dimensional or not case.slope_1d:
        return None
    best, tp = inf, case.plan.mesh.size("tp")
    for _ in range(8):
        slope, offset = _line(resolved, case.block)
        crossing = offset / (case.slope_1d - slope) if slope < case.slope_1d else inf
        if crossing >= best < inf:
            break
        best = crossing
        divisible = max(1, ceil((LARGE if best == inf else best) / tp)) * tp  # by the row axes of every layout
        again = case.resolve(layout, rows=divisible)
        if isinstance(again, str) or again.tensor == resolved.tensor:
            break
        resolved = again
    return None if best == inf else best / case.plan.spec.hidden


def _inside_node(case: _Case) -> InsideNode | None:
    """1D at the largest tp inside a node that receives less than the plan, the other tensor ranks as data replicas; if
    there is none, at the largest legal one.

    Against 2.5D at most as many as a slice of its depth has: slices along the depth hold copies, as data replicas do.
    """
    plan, node = case.plan, case.config.cluster.gpus_per_node or NODE
    tp, dp, microbatches = plan.mesh.size("tp"), plan.mesh.size("dp"), plan.batch.microbatches
    most = min(node, tp // plan.mesh.size("depth"))
    ours, largest, summed = _figures(plan, case.block), None, plan.num_data_ranks
    for smaller in (n for n in reversed(divisors(tp)) if n <= most):
        resolved = case.resolve(ONE_DIMENSIONAL, tp=smaller)
        if isinstance(resolved, str):
            continue
        theirs, replicas = _figures(resolved, case.block), tp // smaller
        received = microbatches * theirs.received_bytes // replicas + _gradient_sum(theirs, summed * replicas, plan)
        candidate = InsideNode(
            tp=smaller,
            dp=dp * replicas,
            node=node,
            received_bytes=received,
            plan_received_bytes=microbatches * ours.received_bytes
            + ours.once_bytes
            + _gradient_sum(ours, summed, plan),
            weight_bytes=theirs.weight_bytes,
            plan_weight_bytes=ours.weight_bytes,
            divides=plan.batch.replica_batch % replicas == 0,
        )
        if candidate.wins or (plan.tensor.is_one_dimensional and smaller == tp):
            return candidate
        largest = largest or candidate
    return largest


def _gradient_sum(figures: Figures, dp: int, plan: Plan) -> int:
    """Bytes received to sum a layer's gradients over dp, once a step."""
    payload = figures.weight_bytes // BYTES[plan.precision.stored] * BYTES[plan.precision.reduce]
    return prediction.wire_bytes(Collective("dp", "all_reduce", "gradients", 1, payload), dp)
