"""What a plan says of replicas that train by themselves and meet every few steps. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace

from parallelrun.plan.structure import DataWay


@dataclass(frozen=True)
class IndependentWay(DataWay):
    """sync_every: steps between two synchronisations. steps: of the whole run, whose last step is always one, so that a
    run ends with one model. A checkpoint between two holds what each replica has."""

    sync_every: int = 1
    steps: int = 1

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

    def checked(self, steps: int) -> IndependentWay:
        """Rounds short enough for two meetings, so that what one leaves for the next (DiLoCo's momentum) is seen."""
        return replace(self, sync_every=min(self.sync_every, (steps + 1) // 2), steps=steps)

    def full_step(self, step: int) -> int:
        """The first synchronisation from `step` on."""
        due = -(-step // self.sync_every) * self.sync_every
        return min(due, self.steps) if step <= self.steps else due
