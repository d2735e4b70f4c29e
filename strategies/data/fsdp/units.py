"""The FSDP units of a rank: the parameters that are gathered and reduced together, and in which dtype. Torch-free.

The plan predicts from the units, and the runtime wraps them. Experts that are distributed over ep have copies on fewer
ranks than the rest of their block, so they form one unit over `expert_dp`; where they have no copies they are not
sharded, and the buckets of `common/reducer.py` sum their gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from parallelrun.layout import Layout
from parallelrun.plan.expert_axes import DP, EXPERT, replica_axis
from parallelrun.plan.parameters import HeldParameter, held_parameters
from parallelrun.plan.structure import Plan

BLOCK = "block"
EXPERTS = "experts"
ROUTER = "router"
ROOT = "root"
TIED = "tied"
# Weights of these roles are rounded to the compute dtype wherever they are used, so they may travel in it. Others (an
# embedding sums many rows' gradients in its own dtype; a user's layers cast nothing) travel as stored: results must be
# those of every other data strategy.
ROUNDED_ROLES = ("column_parallel", "row_parallel", "norm", "head", "expert")


@dataclass(frozen=True)
class Unit:
    """One group of parameters with one all-gather and one reduce-scatter.

    kind: `block`, `experts` and `router` (parts of a block that are gathered apart), `root` (what the blocks of a stage
    share: a tied weight makes its two blocks one unit), or `tied` (one weight of two stages on one rank). block: the
    name of the block that the first three are in. reshard: let go after forward, gathered again for backward. rounded:
    gathered in the compute dtype instead of the stored one. axis: the one that splits the weights.
    """

    kind: str
    stage: int
    block: str
    parameters: tuple[HeldParameter, ...]
    reshard: bool
    rounded: bool
    axis: str = "dp"

    @property
    def module(self) -> str:
        """The module to wrap, by its name in the stage. Experts are gathered for the layer that they and their router
        make up: it runs once a microbatch, in however many parts their rows come."""
        if self.kind == BLOCK:
            return self.block
        inner = self.parameters[0].name.rpartition(".")[0]
        return inner.rpartition(".")[0] if self.kind == EXPERTS else inner

    @property
    def trained(self) -> Unit:
        """The unit without its frozen parameters: what is reduced."""
        return replace(self, parameters=tuple(p for p in self.parameters if not p.spec.frozen))


def shard_axis(plan: Plan, layout: Layout | None = None) -> str:
    """The axis that splits weights of a tensor layout: dp, or its inner factor under HSDP; of experts that are spread
    over ep what ep leaves of it."""
    axis = DP if plan.data.shard == plan.mesh.size(DP) else DP + "_shard"
    return EXPERT + axis if layout is not None and replica_axis(layout, plan) != DP else axis


def is_whole(held: HeldParameter, plan: Plan) -> bool:
    """Whether a parameter is in no unit because it has no copies to shard over."""
    return plan.mesh.size(shard_axis(plan, held.layout)) == 1


def make_units(plan: Plan, pp_rank: int, reshard_after_forward: bool) -> tuple[Unit, ...]:
    """The units of a pp rank, by stage, in forward order; a stage's root and shared weight come last."""
    held = [parameter for parameter in held_parameters(plan, pp_rank) if not is_whole(parameter, plan)]
    by_block: dict[str, list[HeldParameter]] = {}
    for parameter in held:
        by_block.setdefault(parameter.block, []).append(parameter)
    out: list[Unit] = []
    across = _tied_across_stages(plan, pp_rank)
    for stage in plan.stages_of(pp_rank):
        together = _blocks_that_share(plan, stage.blocks)
        for block in stage.blocks:
            mine = tuple(p for p in by_block.get(block, ()) if p.name not in across)
            if block not in together and mine:
                # The stage's last block is needed at once for its backward (only pp=1 alternates so): letting it go
                # would gather it twice in a row.
                last = plan.mesh.size("pp") == 1 and block == stage.blocks[-1]
                reshard = reshard_after_forward and not last
                out += _of_block(mine, reshard, plan)
        shared = tuple(p for block in stage.blocks if block in together for p in by_block.get(block, ()))
        if shared:
            assert {p.spec.layer_role for p in shared}.isdisjoint({"expert"}), "experts beside a tied weight"
            reshard = reshard_after_forward and plan.mesh.size("pp") > 1
            out.append(Unit(ROOT, stage.index, "", shared, reshard, _rounded(shared), shard_axis(plan)))
    weights = tuple(p for p in held if p.name in across)
    if weights:
        out.append(Unit(TIED, weights[0].stage, "", weights, False, False, shard_axis(plan)))
    return tuple(out)


def _of_block(parameters: tuple[HeldParameter, ...], reshard: bool, plan: Plan) -> list[Unit]:
    """The units of one block. A router computes in higher precision than its block, so that where these differ its few
    weights travel by themselves."""
    apart = plan.precision.compute != plan.precision.stored
    by_kind: dict[str, list[HeldParameter]] = {BLOCK: [], ROUTER: [], EXPERTS: []}
    for held in parameters:
        of_block = shard_axis(plan, held.layout) == shard_axis(plan)
        rest = ROUTER if apart and held.spec.layer_role == "router" else BLOCK
        by_kind[rest if of_block else EXPERTS].append(held)
    return [
        Unit(
            kind, own[0].stage, own[0].block, tuple(own), reshard, _rounded(tuple(own)), shard_axis(plan, own[0].layout)
        )
        for kind, own in by_kind.items()
        if own
    ]


def _rounded(parameters: tuple[HeldParameter, ...]) -> bool:
    return all(p.spec.layer_role in ROUNDED_ROLES for p in parameters)


def _holders(plan: Plan, original: str) -> tuple[str, str]:
    """(block that owns a tied parameter, block that reads it)."""
    owner = next(b.name for b in plan.spec.blocks if any(p.name == original for p in b.parameters))
    reader = next(b.name for b in plan.spec.blocks if any(layer.tied == original for layer in b.layers))
    return owner, reader


def _blocks_that_share(plan: Plan, blocks: tuple[str, ...]) -> set[str]:
    """Blocks of one stage that hold the same parameter: two FSDP units cannot."""
    pairs = [_holders(plan, original) for _, original in plan.spec.tied]
    return {name for pair in pairs if set(pair) <= set(blocks) for name in pair}


def _tied_across_stages(plan: Plan, pp_rank: int) -> set[str]:
    """Tied weights whose copy is the same tensor in another stage of the same rank (zbv)."""
    stages = [set(stage.blocks) for stage in plan.stages_of(pp_rank)]
    here = set().union(*stages) if stages else set()
    pairs = {original: set(_holders(plan, original)) for _, original in plan.spec.tied}
    return {name for name, pair in pairs.items() if pair <= here and not any(pair <= stage for stage in stages)}
