"""Keys of partial times that several plans of one search share: the settings on which they depend."""

from __future__ import annotations

from parallelrun.planner.contract.caching import cached
from parallelrun.planner.contract.plan import Plan


class _Key:
    """Equal where its values are. Its hash, that of many strategies' fields, is computed once."""

    __slots__ = ("_hash", "_values")

    def __init__(self, *values: object):
        self._values, self._hash = values, hash(values)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._values == other._values


@cached("cache")
def of_blocks(plan: Plan, has_experts: bool = True, is_recomputed: bool = True) -> _Key:
    """Return the key of a block's time: all settings on which it depends, of which some matter only to blocks with
    experts, or that are recomputed."""
    axes = (axis for name in ("ep", "cp", "tp")[not has_experts :] for axis in plan.mesh.mesh_dims_of(name))
    shared = (plan.mesh.size("dp"), plan.batch) if plan.sample_sets else ()  # statistics travel over dp
    return _Key(
        plan.tensor, has_experts and plan.expert, plan.context, *((axis, plan.mesh.size(axis)) for axis in axes),
        plan.batch.micro_batch, is_recomputed and plan.recompute, plan.pipeline.splits_backward, plan.world,
        plan.servers, shared, plan.data.shards_weights, plan.data.exchange_form(plan).gathers_rounded,
        plan.batch.microbatches > 1,
    )  # fmt: skip


@cached("cache")
def of_stages(plan: Plan) -> _Key:
    """Return the key of a microbatch's time on every stage and of the messages between stages."""
    return _Key(plan.mesh.size("pp"), plan.pipeline.kind, len(plan.stages), of_blocks(plan))


@cached("weights_cache")
def of_weights(plan: Plan) -> _Key:
    """Return the key of the bytes of weights and optimizer state; with the microbatches, of the gradients' traffic."""
    return _Key(plan.tensor, plan.data, plan.mesh, plan.pipeline.kind, len(plan.stages), plan.servers)
