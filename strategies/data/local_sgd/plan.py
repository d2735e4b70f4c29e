"""Local SGD (Stich 2019; Lin et al. 2020): every replica trains by itself, weights are averaged every H steps.

The optimizer's state stays where it is. Nothing but the step's few control numbers is sent between two averagings, so
gradient traffic is divided by H. `collectives` says what a step that averages sends; what a step sends on average is
that, over H, for the rows of purpose `sync`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, Self

from parallelrun.plan import data_cost
from parallelrun.plan.data_strategy import DataStrategy, ExchangeForm
from parallelrun.plan.parameters import held_parameters
from parallelrun.plan.request import Request
from parallelrun.plan.structure import SYNC, Collective, Equivalence, Plan
from parallelrun.precision import BYTES

from .. import buckets


@dataclass(frozen=True)
class LocalSGD(DataStrategy):
    """Every rank of dp holds the complete weights, gradients and optimizer state of its own replica.

    sync_every: steps between two synchronisations. steps: of the whole run, whose last step is always one, so that a
    run ends with one model. A checkpoint between two holds the weights of every replica.
    """

    kind = "local_sgd"
    reads: ClassVar[tuple[str, ...]] = ("bucket_mb", "sync_every")
    description = (
        "Replicas train by themselves for `sync_every` steps; then one all-reduce a bucket averages their weights.",
        "Stich 2019",
    )

    default_sync_every: ClassVar[int] = 8

    sync_every: int = 1
    steps: int = 1

    @classmethod
    def resolve(cls, request: Request) -> Self:
        data = request.config.strategy.data
        return cls(
            bucket_bytes=int(data.bucket_mb * 2**20),
            sync_every=data.sync_every or cls.default_sync_every,
            steps=request.config.steps,
        )

    @property
    def detail(self) -> str:
        """How often replicas meet."""
        return f"replicas meet every {self.sync_every} steps and after the last"

    @property
    def independent(self) -> bool:
        """Always."""
        return True

    def is_sync(self, step: int) -> bool:
        """Do replicas meet at the end of step `step` (from 1)? By its number, so that resuming changes nothing."""
        return step % self.sync_every == 0 or step == self.steps

    def checked(self, steps: int) -> Self:
        """Rounds short enough for two meetings, so that what one leaves for the next (DiLoCo's momentum) is seen."""
        return replace(self, sync_every=min(self.sync_every, (steps + 1) // 2), steps=steps)

    def full_step(self, step: int) -> int:
        """The first synchronisation from `step` on."""
        due = -(-step // self.sync_every) * self.sync_every
        return min(due, self.steps) if step <= self.steps else due

    def collectives(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
        """Of a step that synchronises: one all-reduce per bucket of weights; of every step: what gradients need."""
        out = []
        if plan.mesh.size("dp") > 1:
            sizes = weight_bytes(pp_rank, coordinate, plan)
            num_buckets = len(buckets.fill(sizes, self.bucket_bytes))
            out.append(Collective("dp", "all_reduce", SYNC, num_buckets, sum(sizes)))
        layouts = [(held, held.layout) for held in held_parameters(plan, pp_rank)]
        return out + buckets.final_collectives(layouts, coordinate, plan)

    def exchange_form(self, plan: Plan) -> ExchangeForm:
        return ExchangeForm(data_cost.RING)

    def equivalence(self, plan: Plan) -> Equivalence:
        if plan.mesh.size("dp") == 1:
            return Equivalence("exact")
        return Equivalence("replay", f"local SGD: weights averaged every {self.sync_every} steps")


def weight_bytes(pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[int]:
    """Bytes of every weight that the replicas of a pp rank average, in the plan's order."""
    held = [parameter for parameter in held_parameters(plan, pp_rank) if not parameter.spec.frozen]
    return [prod(shape) * BYTES[plan.precision.stored] for shape in buckets.local_shapes(held, coordinate, plan)]
