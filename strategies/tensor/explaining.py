"""What the layers of a model send over the tensor axes, for `parallelrun explain`. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from parallelrun.models.spec import BlockSpec
from parallelrun.plan.explanation import Explanation, Step, everywhere
from parallelrun.plan.structure import Collective, Plan

Sent = tuple[Collective, str]  # one microbatch's collective, and what is sent
Part = tuple[str, list[Sent]]  # `attention.out forward`, what it sends


def explain(title: str, plan: Plan, parts_of: Callable[[BlockSpec], list[Part]]) -> Explanation:
    """The parts of every block in order; blocks that follow each other and send the same are one, counted."""
    steps: list[Step] = []
    for position in range(plan.mesh.size("pp")):
        blocks = [plan.spec.block(name) for stage in plan.stages_of(position) for name in stage.blocks]
        ranks = [rank for rank in range(plan.num_workers) if plan.mesh.coordinate(rank)["pp"] == position]
        for names, parts in _alike(blocks, parts_of):
            times = plan.batch.microbatches * len(names)
            shown = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
            for title_of_part, sent in parts:
                found = everywhere(plan, lambda rank, sent=sent: sent, ranks)
                if found:
                    steps.append(Step(f"{shown}: {title_of_part}", found, times))
    note = f"microbatches: {plan.batch.microbatches}; a step is repeated for each, and in every block that it names"
    return Explanation("tensor", title, tuple(steps), (note,))


def _alike(
    blocks: Sequence[BlockSpec], parts_of: Callable[[BlockSpec], list[Part]]
) -> list[tuple[list[str], list[Part]]]:
    out: list[tuple[list[str], list[Part]]] = []
    for block in blocks:
        parts = [part for part in parts_of(block) if part[1]]
        if out and out[-1][1] == parts:
            out[-1][0].append(block.name)
        else:
            out.append(([block.name], parts))
    return [one for one in out if one[1]]


def within(block: BlockSpec, layer: str) -> str:
    """A layer's name without its block's."""
    return layer.removeprefix(f"{block.name}.")
