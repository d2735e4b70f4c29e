"""The base class of what runs a batch through this rank's stages; `strategies/pipeline/runtime.py` implements it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from parallelrun import registry
from parallelrun.mesh import Mesh
from parallelrun.models.network import Network
from parallelrun.plan.structure import Plan
from parallelrun.train.batch import Batch


class PipelineRunner(ABC):
    """Runs one data replica's batch through the stages, microbatch by microbatch."""

    @abstractmethod
    def train(self, batch: Batch, scale: float) -> Tensor:
        """Leave the gradient of scale x the summed loss in this rank's parameters.

        Returns the unscaled sum over the data replica (fp64 scalar) on the last stage's rank, 0 elsewhere.
        """

    @abstractmethod
    def evaluate(self, batch: Batch) -> Tensor:
        """Return fp64 (2,): the summed loss and the number of right answers of a classifier, without gradients.

        Both are 0 except on the last stage's rank.
        """


def build_runner(model_parts: Sequence[Network], plan: Plan, mesh: Mesh) -> PipelineRunner:
    """Return the runner of the plan's schedule. model_parts: this rank's stages, by stage index."""
    runner = registry.load("strategies", f"pipeline.{plan.pipeline.kind}", "runtime").build(model_parts, plan, mesh)
    assert isinstance(runner, PipelineRunner), f"pipeline.{plan.pipeline.kind}: build returned {type(runner)}"
    return runner
