"""FSDP units of a rank: which parameters are gathered and reduced together, when they are let go, in which dtype.

The plan predicts from these, the runtime wraps by them. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from parallelrun.plan.structure import Plan
from parallelrun.train.parameters import HeldParameter, held_parameters

ROOT = "root"
TIED = "tied"
# Weights of these roles are rounded to the compute dtype wherever they are used, so they may travel in it. Others (an
# embedding sums many rows' gradients in its own dtype; a user's layers cast nothing) travel as stored: results must be
# those of every other data way.
ROUNDED_ROLES = ("columns", "row", "norm", "head")


@dataclass(frozen=True)
class Unit:
    """One group of parameters with one all-gather and one reduce-scatter.

    kind: `block`, `root` (what the blocks of a stage share: a tied weight makes its two blocks one unit), or `tied`
    (one weight of two stages on one rank). block: the block's name for kind `block`. reshard: let go after forward,
    gathered again for backward. rounded: gathered in the compute dtype instead of the stored one.
    """

    kind: str
    stage: int
    block: str
    parameters: tuple[HeldParameter, ...]
    reshard: bool
    rounded: bool

    @property
    def trained(self) -> Unit:
        """The unit without its frozen parameters: what is reduced."""
        return replace(self, parameters=tuple(p for p in self.parameters if not p.spec.frozen))


def shard_axis(plan: Plan) -> str:
    """The axis that splits the weights: dp, or its inner factor under HSDP."""
    return "dp" if plan.data.shard == plan.mesh.size("dp") else "dp_shard"


def units(plan: Plan, position: int) -> tuple[Unit, ...]:
    """The units of pp coordinate `position`, by stage, in forward order; a stage's root and shared weight come last."""
    held = held_parameters(plan, position)
    out: list[Unit] = []
    across = _tied_across_stages(plan, position)
    for stage in plan.stages_of(position):
        together = _blocks_that_share(plan, stage.blocks)
        for block in stage.blocks:
            mine = tuple(p for p in held if p.block == block and p.name not in across)
            if block not in together and mine:
                # The stage's last block is needed at once for its backward (only pp=1 alternates so): letting it go
                # would gather it twice in a row.
                last = plan.mesh.size("pp") == 1 and block == stage.blocks[-1]
                reshard = plan.data.reshard_after_forward and not last
                out.append(Unit("block", stage.index, block, mine, reshard, _rounded(mine)))
        shared = tuple(p for p in held if p.block in together)
        if shared:
            reshard = plan.data.reshard_after_forward and plan.mesh.size("pp") > 1
            out.append(Unit(ROOT, stage.index, "", shared, reshard, _rounded(shared)))
    weights = tuple(p for p in held if p.name in across)
    if weights:
        out.append(Unit(TIED, weights[0].stage, "", weights, False, False))
    return tuple(out)


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


def _tied_across_stages(plan: Plan, position: int) -> set[str]:
    """Originals whose copy is the same tensor in another stage of the same rank (the V of zbv)."""
    stages = [set(stage.blocks) for stage in plan.stages_of(position)]
    here = set().union(*stages) if stages else set()
    pairs = {original: set(_holders(plan, original)) for _, original in plan.spec.tied}
    return {name for name, pair in pairs.items() if pair <= here and not any(pair <= stage for stage in stages)}
