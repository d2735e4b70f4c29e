"""The base class of strategies whose replicas train independently and synchronise every few steps.

Between two synchronisations replicas exchange only the few control numbers of a step, so gradient traffic is divided by
`sync_every`. `collectives` lists a step that synchronises; the mean over steps is the SYNC rows over `sync_every`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import prod
from typing import TYPE_CHECKING, ClassVar

from parallelrun.base.precision import BYTES
from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.contract.data_strategy import Bucket, DataStrategy
from parallelrun.planner.contract.parameters import HeldParameter
from parallelrun.planner.contract.plan import SYNC, Plan
from parallelrun.planner.contract.request import Request
from parallelrun.planner.predict.prediction import merge

from .bucket_prediction import buckets_of, final_collectives, inner_sums
from .buckets import Shape, partition
from .keys import PeriodicKeys

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class IndependentReplicas(DataStrategy):
    """Every replica (worker of the plan) has its own weights, gradients and optimizer state; its ranks, if there are
    several, have the same or different experts.

    sync_every: steps between two synchronisations. steps: of the run, whose last step always synchronises, so that a
    run ends with one model. A checkpoint between two synchronisations holds the weights of every replica.
    """

    takes_experts = True
    takes_context = True
    default_sync_every: ClassVar[int]

    sync_every: int = 1
    steps: int = 1

    @classmethod
    def resolve(cls, request: Request) -> Self:
        keys = PeriodicKeys.of(request.config)
        return cls(
            bucket_bytes=keys.bucket_bytes,
            sync_every=keys.sync_every or cls.default_sync_every,
            steps=request.config.steps,
        )

    def buckets(self, trained: Sequence[HeldParameter], shapes: Sequence[Shape], plan: Plan) -> list[Bucket]:
        return partition(trained, shapes, plan)

    @property
    def detail(self) -> str:
        return f"replicas meet every {self.sync_every} steps and after the last"

    @property
    def independent(self) -> bool:
        return True

    @property
    def sums_workers_first(self) -> bool:
        return True

    def meets(self, step: int) -> bool:
        """Whether replicas synchronise at the end of `step`. Only its number matters, so resuming changes nothing."""
        return step % self.sync_every == 0 or step == self.steps

    def checked(self, steps: int) -> Self:
        """Shorten the rounds to two synchronisations, so that state between them (DiLoCo's momentum) is verified."""
        return replace(self, sync_every=min(self.sync_every, (steps + 1) // 2), steps=steps)

    def full_step(self, step: int) -> int:
        """The first synchronisation from `step` on."""
        return next(later for later in count(step) if self.meets(later))

    def collectives(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[Collective]:
        """The collectives of a step that synchronises: one all-reduce per weight bucket, and those of every step, in
        which the ranks of a replica sum their gradients."""
        sizes = self._bucket_bytes(pp_rank, coordinate, plan)
        has_others = sizes and plan.num_replicas > 1
        rows = [Collective(plan.worker_axis, "all_reduce", SYNC, len(sizes), sum(sizes))] if has_others else []
        rows += inner_sums(pp_rank, coordinate, plan)
        return merge(rows) + final_collectives(pp_rank, coordinate, plan)

    def ending_bytes(self, pp_rank: int, coordinate: dict[str, int], plan: Plan) -> int:
        """The bytes of a synchronisation: two flat buckets at a time."""
        sizes = self._bucket_bytes(pp_rank, coordinate, plan)
        return max(map(sum, zip(sizes, [*sizes[1:], 0])), default=0)

    @staticmethod
    def _bucket_bytes(pp_rank: int, coordinate: dict[str, int], plan: Plan) -> list[int]:
        parts = buckets_of(pp_rank, coordinate, plan).parts
        return [BYTES[plan.precision.stored] * sum(prod(shape) for _, shape in bucket) for bucket in parts]
