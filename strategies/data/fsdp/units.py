"""The settings, layouts and FSDP units of a rank, which the prediction and the runtime of fsdp share.

A unit is a group of parameters that are gathered and reduced together. Experts that are distributed over ep have copies
on fewer ranks than the rest of their block, so they form one unit over `expert_dp`; without copies they are in no unit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from parallelrun.base.layout import Layout
from parallelrun.planner.contract.data_strategy import Bucket, DataStrategy, FlattenedDims, MeshDims
from parallelrun.planner.contract.parameters import HeldParameter, distinct_parameters, held_parameters
from parallelrun.planner.contract.plan import Plan, Stage, once
from parallelrun.planner.model.model_spec import ParameterSpec
from parallelrun.planner.pieces.expert_axes import DP, EXPERT, replica_axis

from ..common.buckets import ROUNDED_ROLES, Shape, partition, shard_layout

BLOCK, EXPERTS, ROUTER, ROOT, TIED = "block", "experts", "router", "root", "tied"


@dataclass(frozen=True)
class Unit:
    """One group of parameters with one all-gather and one reduce-scatter.

    kind: `block`, `experts` and `router` (parts of a block that are gathered separately), `root` (blocks of a stage
    that share a tied weight, and parameters outside of blocks), or `tied` (a weight of two stages on one rank). block:
    of the first three kinds. reshard: freed after forward, gathered again for backward. axis: that of the shards.
    """

    kind: str
    stage: int
    block: str
    parameters: tuple[HeldParameter, ...]
    reshard: bool
    axis: str = DP

    @cached_property
    def rounded(self) -> bool:
        """Gathered in the compute dtype instead of the stored one. A weight of two stages is not: both cast it."""
        roles = {parameter.spec.layer_role for parameter in self.parameters}
        return bool(roles) and self.kind != TIED and roles <= set(ROUNDED_ROLES)

    @property
    def module(self) -> str:
        """The module to wrap, by its name in the stage. Experts are gathered for the layer that they and their router
        form, which runs once a microbatch."""
        if self.kind == BLOCK:
            return self.block
        inner = self.parameters[0].name.rpartition(".")[0]
        return inner.rpartition(".")[0] if self.kind == EXPERTS else inner

    @cached_property
    def trained(self) -> Unit:
        """The unit without its frozen parameters: what is reduced."""
        return replace(self, parameters=tuple(p for p in self.parameters if not p.spec.frozen))


@dataclass(frozen=True)
class UnitSharding(DataStrategy):
    """reshard_after_forward: gathered weights are freed after forward. reduce_each_microbatch: gradients are reduced in
    every backward pass, so that none are stored unsharded."""

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
        unsharded = [index for index, parameter in enumerate(trained) if is_unsharded(parameter, plan)]
        return partition(trained, shapes, plan, only=unsharded)

    def units(self, plan: Plan, pp_rank: int) -> tuple[Unit, ...]:
        """The FSDP units of a pp rank, by stage, in forward order; a stage's root and shared weight come last."""
        key = "fsdp units", pp_rank
        return once(plan.weights_cache, key, lambda: tuple(unit for unit, _ in self._units(plan, pp_rank, False)))

    def counted_units(self, plan: Plan, pp_rank: int) -> list[tuple[Unit, int]]:
        """(unit, count) of a pp rank: equal blocks of a stage are counted instead of listed."""
        return once(plan.weights_cache, ("counted fsdp units", pp_rank), lambda: self._units(plan, pp_rank, True))

    def _units(self, plan: Plan, pp_rank: int, counted: bool) -> list[tuple[Unit, int]]:
        parameters = [p for p, _ in distinct_parameters(plan, pp_rank)] if counted else held_parameters(plan, pp_rank)
        sharded = [parameter for parameter in parameters if not is_unsharded(parameter, plan)]
        by_block: dict[str, list[HeldParameter]] = {}
        for parameter in sharded:
            by_block.setdefault(parameter.block, []).append(parameter)
        units: list[tuple[Unit, int]] = []
        stages, is_pipelined = plan.stages_of(pp_rank), plan.mesh.size("pp") > 1
        pairs = plan.spec.tied_blocks
        here = {block for stage in stages for block in stage.blocks}
        # A weight of blocks in two stages of this rank (zbv) is a unit; so are blocks of one stage that share a weight.
        across = {name for name, pair in pairs.items() if pair <= here and not any(pair <= {*s.blocks} for s in stages)}
        outside = {name for block in here for name in plan.spec.block(block).outside}
        for stage in stages:
            tied = {block for pair in pairs.values() if len(pair & {*stage.blocks}) > 1 for block in pair}
            for block, is_last, count in _counted_blocks(stage, plan, counted):
                if block not in tied:
                    # Without a pipeline, the last block is needed at once: freed, it is gathered twice in a row.
                    own = [p for p in by_block.get(block, ()) if p.name not in across | outside]
                    is_read_by_loss = plan.loss_chunks > 1 and block == plan.spec.blocks[-1].name
                    reshard = self.reshard_after_forward and not is_read_by_loss and (is_pipelined or not is_last)
                    units += [(unit, count) for unit in _units_of_block(own, reshard, plan)]
            shared = tuple(p for b in stage.blocks for p in by_block.get(b, ()) if b in tied or p.name in outside)
            if shared:
                assert "expert" not in {p.spec.layer_role for p in shared}, "experts in a block with a tied weight"
                reshard = self.reshard_after_forward and is_pipelined
                units.append((Unit(ROOT, stage.index, "", shared, reshard, shard_axis(plan)), 1))
        if weights := tuple(p for p in sharded if p.name in across):
            units.append((Unit(TIED, weights[0].stage, "", weights, False, shard_axis(plan)), 1))
        return units


def shard_axis(plan: Plan, layout: Layout | None = None) -> str:
    """The axis that shards weights of a tensor layout: dp, or its inner dim under HSDP; of experts that are distributed
    over ep, the copies of an expert on it."""
    is_hsdp, inner = plan.data.shard < plan.num_data_ranks, DP + "_shard"
    if layout is not None and replica_axis(layout, plan) != plan.data_axis:
        return EXPERT + (inner if is_hsdp else DP)
    return inner if is_hsdp else plan.data_axis


def is_unsharded(parameter: HeldParameter, plan: Plan) -> bool:
    """Whether a parameter is in no unit because it has no copies to shard over, or no dims."""
    return not parameter.spec.shape or plan.mesh.size(shard_axis(plan, parameter.layout)) == 1


def _counted_blocks(stage: Stage, plan: Plan, counted: bool) -> list[tuple[str, bool, int]]:
    """(block, whether it is the stage's last, count). counted: equal blocks of a stage count as their first, except the
    last one. A block with a tied weight equals no other."""
    *others, last = stage.blocks
    if not counted:
        return [*((block, False, 1) for block in others), (last, True, 1)]
    class_of = plan.spec.first_alike
    first = {class_of[block]: block for block in reversed(stage.blocks)}
    counts = Counter(first[class_of[block]] for block in others)
    return [*((block, False, count) for block, count in counts.items()), (first[class_of[last]], True, 1)]


def _units_of_block(parameters: Sequence[HeldParameter], reshard: bool, plan: Plan) -> list[Unit]:
    """The units of one block. A router computes in the stored dtype: if its block does not, it is its own unit."""
    is_rounded, axis = plan.precision.compute != plan.precision.stored, shard_axis(plan)
    by_kind: dict[str, list[HeldParameter]] = {BLOCK: [], ROUTER: [], EXPERTS: []}
    for parameter in parameters:
        kind = ROUTER if is_rounded and parameter.spec.layer_role == "router" else BLOCK
        by_kind[kind if shard_axis(plan, parameter.layout) == axis else EXPERTS].append(parameter)
    return [
        Unit(kind, own[0].stage, own[0].block, tuple(own), reshard, shard_axis(plan, own[0].layout))
        for kind, own in by_kind.items()
        if own
    ]
