"""ep among the axes: a degree that divides dp, and the mesh dims that dp then consists of. Torch-free.

The experts of a layer are distributed over ep ranks, which are also data replicas: ep uses ranks of dp and adds none.
The copies of an expert are on `expert_dp`, the rest of dp; every other parameter has copies on all of dp
(GShard, Lepikhin et al. 2020; the "expert data parallel" groups of DeepSpeed-MoE and Megatron).
"""

from __future__ import annotations

from math import gcd

from parallelrun import definitions
from parallelrun.config.schema import Config
from parallelrun.errors import Problem
from parallelrun.layout import Layout
from parallelrun.plan.data_strategy import DataStrategy, FlattenedDims, MeshDims
from parallelrun.plan.request import Request
from parallelrun.plan.structure import Plan
from parallelrun.wording import divisors, either, nearest

EP, DP, EXPERT = "ep", "dp", "expert_"


def degree(config: Config, asked: int | None, dp: int, experts: int, filled: list[str], problems: list[Problem]) -> int:
    """The ep of a run at that dp: as asked, or filled by an expert preset; 1, with the violations appended, if illegal.

    experts: of a layer of the model, 0 if it has none. A preset fills an unset ep with the largest divisor of dp that
    also divides the experts.
    """
    preset = config.strategy.name
    if experts < 1:
        if config.strategy.expert.fills or (asked or 1) > 1:
            said = f"ep={asked}" if (asked or 1) > 1 else f"strategy={preset}"
            what = f"{said} spreads the experts of a layer over ranks, and model={config.model.preset} has none"
            fixes = ["model.experts=8"] if "experts" in definitions.model(config).sizes else []
            fixes += ["model=moe_gpt"] if config.model.preset != "moe_gpt" else []
            fix = " or ".join(fixes)
            problems.append(Problem(what, "ep" if (asked or 1) > 1 else "strategy", fix, kind="undefined"))
        return 1
    if asked is None:
        if not config.strategy.expert.fills:
            return 1
        largest = gcd(dp, experts)
        filled.append(f"ep={largest} (filled: the largest that divides dp {dp} and {experts} experts)")
        return largest
    legal = nearest(asked, [n for n in divisors(gcd(dp, experts)) if n > 1] or [1])
    before = len(problems)
    if experts % asked:
        around = sorted({max(1, experts // asked) * asked, -(-experts // asked) * asked})
        what = f"{experts} experts of a layer do not divide by ep={asked}; divisors: {_listed(experts)}"
        fix = f"{either('ep', legal)} or {either('model.experts', around)}"
        problems.append(Problem(what, "ep", fix, kind="arithmetic"))
    if dp % asked:
        around = sorted({max(1, dp // asked) * asked, -(-dp // asked) * asked})
        what = f"ep={asked} does not divide dp={dp}, whose ranks hold the experts; divisors: {_listed(dp)}"
        problems.append(Problem(what, "ep", f"{either('ep', legal)} or {either('dp', around)}", kind="arithmetic"))
    return asked if len(problems) == before else 1


def _listed(number: int) -> str:
    found = divisors(number)
    return ", ".join(map(str, found if len(found) <= 12 else [*found[:6], "...", *found[-3:]]))


def check(request: Request, strategy: type[DataStrategy]) -> list[Problem]:
    """The reasons why a data strategy cannot have its experts distributed over its ranks."""
    if strategy.check(request):  # an illegal strategy cannot be resolved
        return []
    data = strategy.resolve(request)
    return [*_check_data_strategy(request, data), *_check_mesh_dims(request, data.mesh_dims(request.dp)[0])]


def _check_data_strategy(request: Request, data: DataStrategy) -> list[Problem]:
    """Tokens go to other ranks inside every step, and experts have copies on a part of dp only."""
    if data.in_step and data.takes_experts:
        return []
    where, said = "strategy.data.kind", f"strategy.data.kind={data.kind}" + (f" ({data.detail})" if data.detail else "")
    if data.in_step:
        what = f"ep={request.ep}: {said} holds whole layers only, and no layer of experts that is spread over dp"
    else:
        what = f"ep={request.ep} sends tokens to other ranks of dp inside every step; under {said} they are not in step"
    return [Problem(what, where, f"{where}=ddp or ep=1", kind="not_built" if data.in_step else "undefined")]


def _check_mesh_dims(request: Request, data_dims: MeshDims) -> list[Problem]:
    """ep is inside the minor-most mesh dim of dp and must divide it (HSDP: the ranks that share one copy)."""
    axis, size = data_dims[-1]
    if axis == DP or size % request.ep == 0:
        return []
    shard = "strategy.data.shard"
    legal = [n for n in divisors(request.dp) if n % request.ep == 0]
    fixes = [either("ep", nearest(request.ep, divisors(gcd(size, request.spec.experts)))), either(shard, legal[:2])]
    what = f"ep={request.ep} does not divide {shard}={size}, the inner part of dp={request.dp}, in which it lies"
    return [Problem(what, "ep", " or ".join(filter(None, fixes)), kind="arithmetic")]


def split(
    data_dims: MeshDims, data_flattened: FlattenedDims, ep_dims: MeshDims, ep_flattened: FlattenedDims
) -> tuple[MeshDims, FlattenedDims]:
    """(mesh dims, flattened dims) of dp with ep: the data strategy's minor-most dim becomes `expert_<dim>` x ep.

    data_*: dp as the data strategy divides it; ep_*: ep as the expert dispatcher divides it (one level or two). Without
    ep_dims nothing changes. `expert_dp` is dp without ep, whatever dims it consists of.
    """
    if not ep_dims:
        return data_dims, data_flattened
    *outer, (minor, size) = data_dims
    inner = 1
    for _, part in ep_dims:
        inner *= part
    assert size % inner == 0, f"ep={inner} does not divide {minor}={size}"
    rest, names = EXPERT + minor, tuple(name for name, _ in ep_dims)
    mesh_dims = (*outer, (rest, size // inner), *ep_dims)
    made = {minor: (rest, *names)}
    for axis, parts in data_flattened:
        made[axis] = tuple(mesh_dim for part in parts for mesh_dim in made.get(part, (part,)))
    if minor != DP:
        made[EXPERT + DP] = tuple(mesh_dim for mesh_dim in made[DP] if mesh_dim not in names)
    return mesh_dims, (*ep_flattened, *made.items())


def is_of_experts(axis: str) -> bool:
    """Whether ep makes this axis: ep, its two levels, or the rest of dp."""
    return axis.partition("_")[0] in (EP, EXPERT.rstrip("_"))


def replica_axis(layout: Layout, plan: Plan) -> str:
    """The axis of a parameter's copies, over which its gradients are summed: `expert_dp` of experts that are
    distributed over ep, else `dp`. Nothing is averaged: losses are sums, divided by the global count beforehand."""
    return EXPERT + DP if EP in layout.axes and plan.mesh.size(EP) > 1 else DP
