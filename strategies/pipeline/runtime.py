"""Runs a data replica's batch through this rank's stages, forward and backward, microbatch by microbatch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from parallelrun.mesh import Mesh
from parallelrun.models.network import Network
from parallelrun.plan.structure import Plan
from parallelrun.train.pipeline_runner import PipelineRunner
from parallelrun.train.reader import Batch

from .evaluation import ForwardPass, total
from .schedule_runner import ScheduleRunner, prepare_for_split_backward


def build(model_parts: Sequence[Network], plan: Plan, mesh: Mesh) -> PipelineRunner:
    """Return the runner of this rank's stages, given by stage index."""
    if plan.mesh.size("pp") == 1:
        return AccumulationRunner(model_parts, plan, mesh)
    if plan.pipeline.splits_backward:
        prepare_for_split_backward(model_parts)
    return ScheduleRunner(model_parts, plan, mesh)


class AccumulationRunner(PipelineRunner):
    """One stage: microbatches run one after the other, and gradients are added up."""

    def __init__(self, model_parts: Sequence[Network], plan: Plan, mesh: Mesh):
        (self._part,) = model_parts
        self._plan = plan
        self._forward = ForwardPass(model_parts, plan, mesh)

    def train(self, batch: Batch, scale: float) -> Tensor:
        losses: list[Tensor] = []
        for index in range(self._plan.batch.microbatches):
            samples = batch.microbatch(index, self._plan.batch.micro_batch)
            loss = self._part.loss(self._part(samples.inputs, samples.sample_ids, samples.documents), samples.targets)
            losses.append(loss.detach())
            loss.backward(loss.new_full((), scale))
        return total(losses, batch.sample_ids.device)

    def evaluate(self, batch: Batch) -> Tensor:
        return self._forward.totals(batch)
