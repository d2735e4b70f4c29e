"""The answer of tensor-parallel strategies to `explain`: the collectives of each block, layer by layer. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from parallelrun.model_spec import BlockSpec, LayerSpec
from parallelrun.plan.messages import Call, Exchange, Explanation, Round, calls_of, ranks_over
from parallelrun.plan.structure import Collective, Plan


class Step(NamedTuple):
    """`calls` alike collectives of one microbatch, of `payload` bytes together. title: the phase and the layer."""

    title: str
    axis: str
    operation: str
    purpose: str
    calls: int
    payload: int


def title(phase: str, layer: LayerSpec, block: BlockSpec) -> str:
    """`forward, attention.out`: the layer's name inside its block."""
    return f"{phase}, {layer.name.removeprefix(block.name + '.')}"


def explanation(plan: Plan, text: str, source: str, steps: Callable[[BlockSpec, Plan], list[Step]]) -> Explanation:
    """The collectives of the blocks of rank 0. steps: of one microbatch of a block, in the order they are sent."""
    ranks, exchanges = ranks_over(plan, "tp"), []
    for stage in plan.stages_of(plan.mesh.coordinate(0)["pp"]):
        for name in stage.blocks:
            found = steps(plan.spec.block(name), plan)
            rounds = tuple(Round(step.title, calls=_calls(step, plan, ranks)) for step in found)
            exchanges += [Exchange(name, rounds, plan.batch.microbatches)] if rounds else []
    groups = plan.mesh.num_ranks // len(ranks)
    return Explanation("tensor", plan.tensor.kind, text, source, ranks, groups, "tp", tuple(exchanges))


def _calls(step: Step, plan: Plan, ranks: tuple[int, ...]) -> tuple[Call, ...]:
    row = Collective(step.axis, step.operation, step.purpose, step.calls, step.payload)
    return calls_of([row], plan, ranks)[0]
