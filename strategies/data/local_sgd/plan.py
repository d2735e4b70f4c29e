"""Local SGD (Stich 2019; Lin et al. 2020): every replica trains by itself, weights are averaged every H steps.

The optimizer's state stays where it is. Nothing but the step's few control numbers is sent between two averagings, so
gradient traffic is divided by H. `collectives` says what a step that averages sends; what a step sends on average is
that, over H, for the rows of purpose `sync`.
"""

from __future__ import annotations

from math import prod

from parallelrun.errors import Problem
from parallelrun.plan.parameters import held_parameters
from parallelrun.plan.strategy import Request
from parallelrun.plan.structure import SYNC, Collective, DataWay, Equivalence, Plan
from parallelrun.precision import BYTES

from .. import buckets
from ..replicated import Replicated
from .settings import IndependentWay

DEFAULT_SYNC_EVERY = 8


class Way(Replicated):
    """Every rank of dp holds weights, gradients and optimizer state of its own replica, whole."""

    reads: tuple[str, ...] = ("bucket_mb", "sync_every")
    explained = (
        "Replicas train by themselves for `sync_every` steps; then one all-reduce a bucket averages their weights.",
        "Stich 2019",
    )

    def check(self, request: Request) -> list[Problem]:
        return []

    def resolve(self, request: Request) -> DataWay:
        data = request.config.strategy.data
        return IndependentWay(
            data.kind,
            bucket_bytes=int(data.bucket_mb * 2**20),
            sync_every=data.sync_every or DEFAULT_SYNC_EVERY,
            steps=request.config.steps,
        )

    def collectives(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
        """Of a step that synchronises: one all-reduce per bucket of weights; of every step: what gradients need."""
        out = []
        if plan.mesh.size("dp") > 1:
            sizes = weight_bytes(pp_rank, coordinate, plan)
            num_buckets = len(buckets.fill(sizes, plan.data.bucket_bytes))
            out.append(Collective("dp", "all_reduce", SYNC, num_buckets, sum(sizes)))
        layouts = [(held, held.layout) for held in held_parameters(plan, pp_rank)]
        return out + buckets.final_collectives(layouts, coordinate, plan)

    def equivalence(self, plan: Plan) -> Equivalence:
        assert isinstance(plan.data, IndependentWay)
        if plan.mesh.size("dp") == 1:
            return Equivalence("exact")
        return Equivalence("replay", f"local SGD: weights averaged every {plan.data.sync_every} steps")


def weight_bytes(pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[int]:
    """Bytes of every weight that the replicas of a pp rank average, in the plan's order."""
    held = [parameter for parameter in held_parameters(plan, pp_rank) if not parameter.spec.frozen]
    return [prod(shape) * BYTES[plan.precision.stored] for shape in buckets.local_shapes(held, coordinate, plan)]
