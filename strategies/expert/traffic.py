"""The expert dispatchers' all-to-alls in closed form. Torch-free.

Per microbatch and layer with experts, the row being `hidden` numbers of the compute dtype. One leg (two on two levels)
takes rows from where they are to where they go; each is passed four times, as many rows as leave at that side:

    out      forward   rows before the leg          its gradient, backward   rows after the leg
    back     forward   rows after the leg           its gradient, backward   rows before the leg

Recomputation in full sends both forward ones again: the weighted sum over what comes back, which is the last step,
needs it for the weights' gradients. Chunks make more calls of the same bytes. Evaluation is not counted.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from parallelrun.model_spec import BlockSpec
from parallelrun.plan.structure import Collective, Plan
from parallelrun.precision import BYTES

from .axes import INNER, legs

ROWS, COUNTS, OPERATION = "experts", "routing", "all_to_all"  # purposes of rows, and of how many there will be


class Rows(NamedTuple):
    """Rows of one microbatch and layer on a rank. even: where every expert gets equally many and none is dropped; most:
    that there can be; None: there are never more nor less than `even`."""

    even: int
    most: int | None = None

    @property
    def bound(self) -> int:
        return self.even if self.most is None else self.most


def num_tokens(plan: Plan) -> int:
    """Of a microbatch."""
    return plan.batch.micro_batch * prod(plan.spec.boundary_shape[:-1])


def num_places(plan: Plan, num_experts: int | None = None) -> int:
    """What so many experts (None: all) take of a microbatch at most."""
    router, spec = plan.spec.router, plan.spec
    assert router is not None, "an expert dispatcher for a model without experts"
    groups = plan.batch.micro_batch // router.group_samples
    capacity = router.capacity(num_tokens(plan) // groups, spec.experts)
    return (spec.experts if num_experts is None else num_experts) * groups * capacity


def num_assignments(plan: Plan) -> int:
    """Of a microbatch's tokens to experts, kept or not."""
    router = plan.spec.router
    assert router is not None, "an expert dispatcher for a model without experts"
    return num_places(plan) if router.kind == "expert_choice" else num_tokens(plan) * router.top_k


def all_places(plan: Plan) -> tuple[Rows, ...]:
    """Of `Way.loads`: every place travels, filled or not."""
    return (Rows(num_places(plan)),) * (len(legs(plan)) + 1)


def kept_rows(plan: Plan) -> tuple[Rows, ...]:
    """Of `Way.loads`: only what experts keep travels."""
    experts, ep = plan.spec.experts, plan.mesh.size("ep")
    found = [_kept(1, experts, plan)]
    if len(legs(plan)) > 1:
        inner = plan.mesh.size(INNER)
        found.append(_kept(inner, experts // inner, plan))  # of an inner group, to the ranks of one inner place
    return (*found, _kept(ep, experts // ep, plan))


def _kept(num_ranks: int, num_experts: int, plan: Plan) -> Rows:
    """What so many ranks have for so many of the experts. A token never goes twice to the same one."""
    router, tokens, places = plan.spec.router, num_tokens(plan), num_places(plan, num_experts)
    assert router is not None, "an expert dispatcher for a model without experts"
    if router.kind == "expert_choice":
        return Rows(num_ranks * places)  # every expert takes its number of every group
    even = min(num_assignments(plan), num_places(plan))
    most = num_ranks * min(tokens * min(router.top_k, num_experts), places)
    return Rows(even, most)


def collectives(
    blocks: tuple[BlockSpec, ...], plan: Plan, loads: tuple[Rows, ...], counts_bytes: int
) -> list[Collective]:
    """One rank's rows of a step. loads: `Way.loads`; counts_bytes: `Way.counts_bytes`."""
    forwards = [1 + (plan.recompute == "full" and block.is_recomputed) for block in blocks for _ in _layers(block)]
    microbatches, chunks = plan.batch.microbatches, plan.expert.chunks
    passes = microbatches * sum(forward + 1 for forward in forwards)  # of each side of a leg: forward, again, backward
    row_bytes = plan.spec.hidden * BYTES[plan.precision.compute]
    found = []
    for axis, before, after in zip(legs(plan), loads, loads[1:]):
        even, most = before.even + after.even, before.bound + after.bound
        bound = None if before.most is None and after.most is None else passes * row_bytes * most
        found.append(Collective(axis, OPERATION, ROWS, 2 * passes * chunks, passes * row_bytes * even, bound))
        if counts_bytes:
            calls = microbatches * sum(forwards)
            found.append(Collective(axis, OPERATION, COUNTS, calls, calls * counts_bytes))
    return [row for row in found if row.calls]


def _layers(block: BlockSpec) -> list[str]:
    """Names of a block's layers with experts."""
    return [layer.name for layer in block.layers if layer.layer_role == "expert"]
