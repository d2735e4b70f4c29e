"""The ep axis: its degree, which divides dp, and the mesh dims that dp is then flattened from.

The experts of a layer are sharded over ep ranks, which are also data replicas: ep adds no ranks. Each expert is
replicated over `expert_dp`, the ranks of dp that have the same ep rank; every other parameter is replicated over dp
(GShard, Lepikhin et al. 2020; the "expert data parallel" groups of DeepSpeed-MoE and Megatron). With
`strategy.expert.tp=1` a group of ep is `ep_dp` x tp, consecutive ranks: complete tp groups of `ep_dp` ranks of dp.
"""

from __future__ import annotations

from math import gcd, prod

from parallelrun.base.errors import Problem
from parallelrun.base.layout import Layout
from parallelrun.base.wording import divisors, either, nearest
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.contract.data_strategy import DataStrategy, FlattenedDims, MeshDims
from parallelrun.planner.contract.degrees import Degrees
from parallelrun.planner.contract.plan import EXPERT_DP, Plan
from parallelrun.planner.contract.request import Request
from parallelrun.planner.model import definitions

EP, DP, CP, TP, EXPERT = "ep", "dp", "cp", "tp", "expert_"
SPANS = "strategy.expert.tp=1"
EP_DP = "ep_dp"  # the part of ep (on two levels, of ep_inner) that lies in dp x cp, where ep spans tp
EP_DATA = "ep_data"  # on two levels, ep_outer x ep_dp
EXPERT_CP = "expert_cp"  # cp without ep: the copies of an expert in the ranks of a sequence


def degree(config: Config, requested: int | None, degrees: Degrees, experts: int, problems: list[Problem]) -> int:
    """ep as the user set it, or as a preset of experts fills it; 1, with the violations appended, if it is illegal.

    experts: number in a layer of the model, 0 for none. A preset fills an unset ep with the largest common divisor of
    dp x cp and the experts; where ep spans tp, of dp x cp x tp, of which ep takes complete tp groups.
    """
    dp, spanned = degrees.dp, ranks_inside(config, degrees.cp, degrees.tp)
    tp = spanned // degrees.cp
    ranks, of = dp * spanned, "dp" + " x cp" * (degrees.cp > 1) + " x tp" * (tp > 1)
    if experts < 1:
        if config.strategy.expert.fills or (requested or 1) > 1:
            said = f"ep={requested}" if (requested or 1) > 1 else f"strategy={config.strategy.name}"
            message = f"{said} shards the experts of a layer, and model={config.model.preset} has none"
            fixes = ["model.experts=8"] if "experts" in (definitions.model(config).own_keys or ()) else []
            fixes += ["model=moe_gpt"] if config.model.preset != "moe_gpt" else []
            fix = " or ".join(fixes)
            problems.append(Problem(message, "ep" if (requested or 1) > 1 else "strategy", fix, kind="undefined"))
        return 1
    possible = [n for n in divisors(gcd(ranks, experts)) if n % tp == 0]
    if requested is None:
        if not config.strategy.expert.fills:
            return 1
        largest = max(possible, default=1)
        degrees.filled.append(f"ep={largest} (filled: the largest that divides {of} {ranks} and {experts} experts)")
        return largest
    legal = either("ep", nearest(requested, [n for n in possible if n > 1] or [1]))
    violations = []
    if requested > 1 and requested % tp:  # ep=tp x n, or features over tp, gives a rank as many weights of experts
        message = f"{SPANS}: ep={requested} is not made of complete groups of tp={tp}; parts of them are not built"
        violations.append(Problem(message, "ep", f"{legal} or leave {SPANS} out", kind="not_built"))
    for key, number, message in (
        ("model.experts", experts, f"{experts} experts of a layer are not divisible by ep={requested}"),
        (of, ranks, f"ep={requested} does not divide {of}={ranks}, whose ranks hold the experts"),
    ):
        if number % requested:
            around = sorted({max(1, number // requested) * requested, -(-number // requested) * requested})
            message += f"; divisors: {_listed(number)}"
            step = requested // gcd(requested, spanned)
            around = around if key != of or spanned == 1 else sorted({max(1, dp // step) * step, -(-dp // step) * step})
            key = "dp" if key == of else key
            violations.append(Problem(message, "ep", f"{legal} or {either(key, around)}", kind="arithmetic"))
    problems += violations
    return 1 if violations else requested


def ranks_inside(config: Config, cp: int, tp: int) -> int:
    """The ranks of a data replica over which a group of ep is taken: those of cp, and of tp where ep spans it."""
    return cp * (tp if config.strategy.expert.tp == 1 else 1)


def _listed(number: int) -> str:
    degrees = divisors(number)
    return ", ".join(map(str, degrees if len(degrees) <= 12 else [*degrees[:6], "...", *degrees[-3:]]))


def check(request: Request, strategy: type[DataStrategy]) -> list[Problem]:
    """Check that a data strategy allows experts that are sharded over its ranks.

    Replicas must step together, because tokens are exchanged, and ep must divide the innermost mesh dim of dp (under
    HSDP, the ranks that share one copy).
    """
    if strategy.check(request):  # reported on their own: an illegal strategy cannot be resolved
        return []
    data, problems = strategy.resolve(request), []
    if not data.takes_experts:
        where = "strategy.data.kind"
        said = f"{where}={data.kind}" + (f" ({data.detail})" if data.detail else "")
        kind, message = "not_built", f"ep={request.ep}: {said} does not support experts that are sharded over dp"
        if not data.in_step:
            sends = f"ep={request.ep} sends tokens to other ranks of dp in every step"
            kind, message = "undefined", f"{sends}; replicas are not in step under {said}"
        problems.append(Problem(message, where, f"{where}=ddp or ep=1", kind=kind))
    axis, size = data.mesh_dims(request.num_data_ranks)[0][-1]
    if axis != DP and size % request.ep_data_ranks:
        shard, cp = "strategy.data.shard", request.cp
        of = f"dp={request.dp}" if cp == 1 else f"dp x cp={request.num_data_ranks}"
        tp = request.ep // request.ep_data_ranks
        legal = [n for n in divisors(request.num_data_ranks) if n % request.ep_data_ranks == 0]
        of_ep = [n for n in divisors(gcd(size * tp, request.spec.experts)) if n % tp == 0]
        fixes = [either("ep", nearest(request.ep, of_ep)), either(shard, legal[:2])]
        message = f"ep={request.ep} does not divide {shard}={size}{f' x tp={tp}' * (tp > 1)}, the inner part of {of}"
        problems.append(Problem(message, "ep", " or ".join(filter(None, fixes)), kind="arithmetic"))
    return problems


def joined(flattened: FlattenedDims, tensor: tuple[MeshDims, FlattenedDims]) -> FlattenedDims:
    """The flattened dims of ep and dp, made of mesh dims alone, and those of tp, of which ep may be made."""
    parts_of = dict((*flattened, *tensor[1]))

    def mesh_dims(axis: str) -> tuple[str, ...]:
        return tuple(name for part in parts_of[axis] for name in (mesh_dims(part) if part in parts_of else (part,)))

    return (*((axis, mesh_dims(axis)) for axis, _ in flattened), *tensor[1])


def split(
    data_dims: MeshDims, data_flattened: FlattenedDims, ep_dims: MeshDims, ep_flattened: FlattenedDims
) -> tuple[MeshDims, FlattenedDims]:
    """(mesh dims, flattened dims) of dp with ep: the innermost mesh dim of dp becomes `expert_<dim>` x ep.

    data_*: the data strategy's dims of dp. ep_*: the expert dispatcher's dims of ep (one level or two), empty without
    ep. `expert_dp` is dp without ep.
    """
    if not ep_dims:
        return data_dims, data_flattened
    *outer, (minor, size) = data_dims
    inner = prod(part for _, part in ep_dims)
    assert size % inner == 0, f"ep={inner} does not divide {minor}={size}"
    rest, names = EXPERT + minor, tuple(name for name, _ in ep_dims)
    mesh_dims = (*outer, (rest, size // inner), *ep_dims)
    flattened = {minor: (rest, *names)}
    for axis, parts in data_flattened:
        flattened[axis] = tuple(mesh_dim for part in parts for mesh_dim in flattened.get(part, (part,)))
    if minor != DP:
        flattened[EXPERT + DP] = tuple(mesh_dim for mesh_dim in flattened[DP] if mesh_dim not in names)
    return mesh_dims, (*ep_flattened, *flattened.items())


def is_of_experts(axis: str) -> bool:
    """Return whether the axis exists only because of ep: ep, its two levels, or `expert_dp` and its parts."""
    return axis.partition("_")[0] in (EP, EXPERT.rstrip("_"))


def num_data_ranks(plan: Plan) -> int:
    """The ranks of dp x cp that a group of ep covers."""
    return plan.mesh.size(EP) // (plan.mesh.size(TP) if plan.ep_spans_tp else 1)


def is_sharded(layout: Layout, plan: Plan) -> bool:
    """Whether a layout is that of experts of which the ranks of dp x cp have different ones."""
    return plan.expert is not None and EP in layout.axes and num_data_ranks(plan) > 1


def replica_axis(layout: Layout, plan: Plan) -> str:
    """The axis over which a parameter is replicated and the data strategy combines its gradients: `plan.data_axis`; of
    experts that are sharded over ranks of dp x cp `expert_dp`, or dp if the copies in a worker are summed before.
    Gradients need no division: losses are sums, scaled by the global count before."""
    if not is_sharded(layout, plan):
        return plan.data_axis
    return EXPERT_DP if not plan.sums_workers_first or plan.mesh.size(EXPERT_DP) < plan.mesh.size(DP) else DP


def inner_axis(layout: Layout, plan: Plan) -> str:
    """The axis of a worker's ranks that have copies of a parameter, if they sum its gradients first; else ""."""
    if not plan.sums_workers_first:  # a single worker that trains as others would by themselves
        is_one = plan.num_replicas == 1 and (plan.data.independent or plan.data.has_servers)
        return replica_axis(layout, plan) if is_one else ""
    if is_sharded(layout, plan):
        return EXPERT_CP
    inside = set(plan.mesh.mesh_dims_of(plan.count_axis)) - set(plan.mesh.mesh_dims_of(plan.worker_axis))
    return next(axis for axis in (CP, EP, EP_DP, EP_DATA) if set(plan.mesh.mesh_dims_of(axis)) == inside)


def axis_views(plan: Plan) -> dict[str, str]:
    """Return a description of what each axis shards or replicates, if ep splits dp into several views; else empty."""
    ep, experts = plan.mesh.size(EP), plan.spec.experts
    if ep == 1:
        return {}
    texts = {
        "pp": "stages",
        "dp": "replicas of the data",
        "dp_replicate": "copies of each shard",
        "dp_shard": "shards of all but experts",
        "expert_dp": "copies of the same experts",
        EP_DP: "parts of ep, each of complete tp groups",
        EP_DATA: "ranks of dp in a group of ep",
        "expert_dp_shard": "shards of the same experts",
        "ep": f"{experts} experts, {experts // ep} each",
        "ep_outer": f"groups of {plan.mesh.size('ep_inner')} ranks of ep",
        "ep_inner": "ranks of ep inside a group",
        "tp": "features",
    }
    names = (*plan.mesh.mesh_dim_names, *(axis for axis, _ in plan.mesh.flattened))
    return {axis: texts[axis] for axis in names if axis in texts}
