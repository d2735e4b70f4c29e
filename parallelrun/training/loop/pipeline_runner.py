"""The interface of pipeline schedules at run time. `strategies/pipeline/runtime.py` implements it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from parallelrun.base import registry
from parallelrun.distributed.mesh import Mesh
from parallelrun.models.network import Network
from parallelrun.planner.contract.plan import Plan
from parallelrun.training.loop.reader import Batch


class PipelineRunner(ABC):
    """Runs one data replica's batch through this rank's stages, microbatch by microbatch.

    loss_sum: what the last training step has returned.
    """

    loss_sum: Tensor | None = None

    @abstractmethod
    def train(self, batch: Batch, scale: float) -> Tensor:
        """Compute the gradient of scale x the summed loss in this rank's parameters; return the unscaled sum.

        The sum is over the data replica: an fp64 scalar on the rank of the last stage, 0 elsewhere.
        """

    def count(self, batch: Batch) -> Tensor:
        """Return the count (fp64 scalar) by which the user's own loss over the batch is divided.

        It follows from the forward pass. With one microbatch, `train` goes on from there; with several, the forward
        passes are repeated.
        """
        raise AssertionError(f"{type(self).__name__} has stages, and a loss of the user's has none")

    @abstractmethod
    def evaluate(self, batch: Batch) -> Tensor:
        """Return fp64 (2,): the summed loss and the number of right answers of a classifier, without gradients.

        Both are 0 except on the last stage's rank.
        """

    def last_actions(self) -> dict[str, Any]:
        """Return when this rank ran each action of the last step (`ActionClock.record`); {} without a schedule."""
        return {}


def build_runner(model_parts: Sequence[Network], plan: Plan, mesh: Mesh) -> PipelineRunner:
    """Return the runner of the plan's schedule. model_parts: this rank's stages, by stage index."""
    runner = registry.load("strategies", f"pipeline.{plan.pipeline.kind}", "runtime").build(model_parts, plan, mesh)
    assert isinstance(runner, PipelineRunner), f"pipeline.{plan.pipeline.kind}: build returned {type(runner)}"
    return runner
