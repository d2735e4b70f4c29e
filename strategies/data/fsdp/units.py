"""The settings, layouts and FSDP units of a rank, which the prediction and the runtime of fsdp share. Torch-free.

A unit is a group of parameters that are gathered and reduced together. The plan predicts from the units, and the
runtime wraps them. Experts that are distributed over ep have copies on fewer ranks than the rest of their block, so
they form one unit over `expert_dp`; where no rank of the shard axis has a copy they are in no unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from parallelrun.layout import Layout
from parallelrun.model_spec import ParameterSpec
from parallelrun.plan.data_strategy import Bucket, DataStrategy, FlattenedDims, MeshDims
from parallelrun.plan.expert_axes import DP, EXPERT, replica_axis
from parallelrun.plan.parameters import HeldParameter, held_parameters
from parallelrun.plan.structure import Plan

from ..common.buckets import Shape, partition, shard_layout

BLOCK, EXPERTS, ROUTER, ROOT, TIED = "block", "experts", "router", "root", "tied"
# Weights of these roles are rounded to the compute dtype wherever they are used, so they may travel in it. Others (an
# embedding sums many rows' gradients in its own dtype; a user's layers cast nothing) travel as stored: results must be
# those of every other data strategy.
ROUNDED_ROLES = ("column_parallel", "row_parallel", "norm", "head", "expert")


@dataclass(frozen=True)
class Unit:
    """One group of parameters with one all-gather and one reduce-scatter.

    kind: `block`, `experts` and `router` (parts of a block that are gathered apart), `root` (what the blocks of a stage
    share: a tied weight makes its two blocks one unit), or `tied` (one weight of two stages on one rank). block: the
    name of the block that the first three are in. reshard: let go after forward, gathered again for backward. axis: the
    one that splits the weights.
    """

    kind: str
    stage: int
    block: str
    parameters: tuple[HeldParameter, ...]
    reshard: bool
    axis: str = DP

    @property
    def rounded(self) -> bool:
        """Gathered in the compute dtype instead of the stored one. A weight of two stages is not: both cast it."""
        roles = {held.spec.layer_role for held in self.parameters}
        return bool(roles) and self.kind != TIED and roles <= set(ROUNDED_ROLES)

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


@dataclass(frozen=True)
class UnitSharding(DataStrategy):
    """Every rank holds its shard; the weights of a block are gathered while it computes.

    reshard_after_forward: gathered weights are freed after forward. reduce_each_microbatch: gradients are reduced in
    every backward pass, so that none are kept unsharded.
    """

    reshard_after_forward: bool = False
    reduce_each_microbatch: bool = False

    def mesh_dims(self, dp: int) -> tuple[MeshDims, FlattenedDims]:
        if self.shard >= dp:
            return super().mesh_dims(dp)
        parts = (("dp_replicate", dp // self.shard), ("dp_shard", self.shard))
        return parts, (("dp", ("dp_replicate", "dp_shard")),)

    def weight_layout(self, parameter: ParameterSpec, tensor_layout: Layout, plan: Plan) -> Layout:
        return self.state_layout(parameter, tensor_layout, plan)

    def state_layout(self, parameter: ParameterSpec, tensor_layout: Layout, plan: Plan) -> Layout:
        return shard_layout(parameter, tensor_layout, shard_axis(plan, tensor_layout), plan)

    def buckets(self, trained: Sequence[HeldParameter], shapes: Sequence[Shape], plan: Plan) -> list[Bucket]:
        """Those of the parameters that are in no unit."""
        return partition(trained, shapes, plan, only=[i for i, held in enumerate(trained) if is_whole(held, plan)])

    def units(self, plan: Plan, pp_rank: int) -> tuple[Unit, ...]:
        """The FSDP units of a pp rank, by stage, in forward order; a stage's root and shared weight come last."""
        key = "fsdp units", pp_rank
        if key not in plan.weights_cache:
            plan.weights_cache[key] = tuple(_units(plan, pp_rank, self.reshard_after_forward))
        found: tuple[Unit, ...] = plan.weights_cache[key]
        return found


def shard_axis(plan: Plan, layout: Layout | None = None) -> str:
    """The axis that splits weights of a tensor layout: dp, or its inner factor under HSDP; of experts that are spread
    over ep what ep leaves of it."""
    axis = DP if plan.data.shard == plan.mesh.size(DP) else DP + "_shard"
    return EXPERT + axis if layout is not None and replica_axis(layout, plan) != DP else axis


def is_whole(held: HeldParameter, plan: Plan) -> bool:
    """Whether a parameter is in no unit because it has no copies to shard over."""
    return plan.mesh.size(shard_axis(plan, held.layout)) == 1


def _units(plan: Plan, pp_rank: int, reshard_after_forward: bool) -> list[Unit]:
    held = [parameter for parameter in held_parameters(plan, pp_rank) if not is_whole(parameter, plan)]
    by_block: dict[str, list[HeldParameter]] = {}
    for parameter in held:
        by_block.setdefault(parameter.block, []).append(parameter)
    found: list[Unit] = []
    stages, pipelined = plan.stages_of(pp_rank), plan.mesh.size("pp") > 1
    tied = {original: _holders(plan, original) for _, original in plan.spec.tied}
    here = {block for stage in stages for block in stage.blocks}
    # A weight of blocks in two stages of this rank (zbv) is a unit; blocks of one stage that share a weight are one.
    across = {name for name, pair in tied.items() if pair <= here and not any(pair <= {*s.blocks} for s in stages)}
    for stage in stages:
        together = {block for pair in tied.values() if pair <= {*stage.blocks} for block in pair}
        for block in stage.blocks:
            mine = [p for p in by_block.get(block, ()) if p.name not in across]
            if block not in together:
                # The stage's last block is needed at once for its backward (only pp=1 alternates so): letting it go
                # would gather it twice in a row.
                found += _of_block(mine, reshard_after_forward and (pipelined or block != stage.blocks[-1]), plan)
        shared = tuple(p for block in stage.blocks if block in together for p in by_block.get(block, ()))
        if shared:
            assert {p.spec.layer_role for p in shared}.isdisjoint({"expert"}), "experts beside a tied weight"
            found.append(Unit(ROOT, stage.index, "", shared, reshard_after_forward and pipelined, shard_axis(plan)))
    weights = tuple(p for p in held if p.name in across)
    return [*found, Unit(TIED, weights[0].stage, "", weights, False, shard_axis(plan))] if weights else found


def _of_block(parameters: Sequence[HeldParameter], reshard: bool, plan: Plan) -> list[Unit]:
    """The units of one block. A router computes in higher precision than its block, so that where these differ its few
    weights travel by themselves."""
    apart = plan.precision.compute != plan.precision.stored
    by_kind: dict[str, list[HeldParameter]] = {BLOCK: [], ROUTER: [], EXPERTS: []}
    for held in parameters:
        of_block = shard_axis(plan, held.layout) == shard_axis(plan)
        rest = ROUTER if apart and held.spec.layer_role == "router" else BLOCK
        by_kind[rest if of_block else EXPERTS].append(held)
    return [
        Unit(kind, own[0].stage, own[0].block, tuple(own), reshard, shard_axis(plan, own[0].layout))
        for kind, own in by_kind.items()
        if own
    ]


def _holders(plan: Plan, original: str) -> set[str]:
    """The block that owns a tied parameter and the block that reads it."""
    owner = next(b.name for b in plan.spec.blocks if any(p.name == original for p in b.parameters))
    reader = next(b.name for b in plan.spec.blocks if any(layer.tied == original for layer in b.layers))
    return {owner, reader}
