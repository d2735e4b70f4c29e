"""Runs a data replica's batch through this rank's stages: by itself, or by a schedule of torch's pipelining."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from parallelrun.distributed import torch_private
from parallelrun.distributed.mesh import Mesh
from parallelrun.models import recompute
from parallelrun.models.network import Network
from parallelrun.planner.contract.pipeline_schedule import is_pair
from parallelrun.planner.contract.plan import Plan
from parallelrun.training.loop.pipeline_runner import PipelineRunner
from parallelrun.training.loop.reader import Batch
from parallelrun.training.metrics.schedule_actions import ActionClock
from parallelrun.training.metrics.timing import clock_of

from .evaluation import ForwardPass, network_input
from .schedule import Schedule
from .stage import ScheduledStage, Sends


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
        self._counted: tuple[Batch, Tensor] | None = None  # the batch of one microbatch that was counted, its output

    def count(self, batch: Batch) -> Tensor:
        microbatches = [self._microbatch(batch, index) for index in range(self._plan.batch.microbatches)]
        if torch.is_grad_enabled() and len(microbatches) == 1:
            self._counted = batch, self._output(microbatches[0])
            return self._counted[1][1].detach().clone()
        was_training = self._part.training
        self._part.eval()  # statistics of BatchNorm are taken once, in `train`
        with torch.no_grad():
            counts = [self._output(samples)[1] for samples in microbatches]
        self._part.train(was_training)
        return torch.stack(counts).sum()

    def _microbatch(self, batch: Batch, index: int) -> Batch:
        return batch.microbatch(index, self._plan.batch.micro_batch)

    def _output(self, samples: Batch) -> Any:
        return self._part(network_input(self._part, samples), samples.sample_ids, samples.documents, samples.ahead)

    def train(self, batch: Batch, scale: float) -> Tensor:
        losses: list[Tensor] = []
        for index in range(self._plan.batch.microbatches):
            loss = self._loss(batch, index)
            losses.append(loss.detach())
            loss.backward(loss.new_full((), scale))
        return _total(losses, batch.sample_ids.device)

    def _loss(self, batch: Batch, index: int) -> Tensor:
        """Return the loss of a microbatch, which alone keeps the output alive: backward frees logits early."""
        samples = self._microbatch(batch, index)
        counted, self._counted = self._counted, None
        output = counted[1] if counted is not None and counted[0] is batch else self._output(samples)
        return self._part.total_loss(output, samples.targets, samples.ahead)

    def evaluate(self, batch: Batch) -> Tensor:
        return self._forward.totals(batch)


def prepare_for_split_backward(model_parts: Sequence[Network]) -> None:
    """Let a stage's backward run twice, once for inputs and once for weights.

    Full recomputation keeps its results for the second pass; compiled backwards keep their buffers.
    """
    for part in model_parts:
        if part.recompute in ("full", "offload"):
            part.recompute = recompute.KEPT
    torch_private.keep_compiled_buffers()


class ScheduleRunner(PipelineRunner):
    """Stages over the pp axis: torch.distributed.pipelining runs the plan's actions and messages.

    The loss is a sum, and `scale` makes it a mean over the global batch before backward. The first `train` sends
    additional messages in which the stages agree on static metadata.
    """

    def __init__(self, model_parts: Sequence[Network], plan: Plan, mesh: Mesh):
        group, schedule = mesh.group("pp"), plan.pipeline
        assert group.process_group is not None, "a pipeline of one rank has no group"
        assert isinstance(schedule, Schedule)
        indices = [stage.index for stage in plan.stages_of(group.index)]
        self._sends, self._actions = Sends(), ActionClock(clock_of(mesh.device))
        self._stages = [
            ScheduledStage(part, index, plan, mesh.device, group.process_group, self._sends, self._actions, mesh.turns)
            for index, part in zip(indices, model_parts, strict=True)
        ]
        by_index = dict(zip(indices, self._stages))
        for forward, backward in pairwise(schedule.order(plan, group.index)) if schedule.overlaps_passes else ():
            if is_pair(forward, backward):
                by_index[forward.stage].partners[forward.microbatch] = by_index[backward.stage], backward.microbatch
        self._inputs_here = indices[0] == 0
        self._losses_here = indices[-1] == len(plan.stages) - 1
        steps = [[(step.kind, step.stage, step.microbatch) for step in order] for order in schedule.steps(plan)]
        num_microbatches = plan.batch.microbatches
        self._schedule = torch_private.make_schedule(self._stages, steps, num_microbatches, _loss_of_output)
        self._forward = ForwardPass(model_parts, plan, mesh)

    def train(self, batch: Batch, scale: float) -> Tensor:
        last = self._stages[-1].plain
        last.losses.clear()
        last.scale = scale
        for stage in self._stages:
            stage.sample_ids, stage.documents = batch.sample_ids, batch.documents
        self._stages[-1].targets, self._stages[-1].ahead = batch.targets, batch.ahead
        inputs = (batch.inputs,) if self._inputs_here else ()
        target = batch.targets if self._losses_here else None
        self._actions.begin_step()
        self._schedule.step(*inputs, target=target, return_outputs=False)
        self._sends.finish()
        return _total(last.losses, batch.sample_ids.device)

    def evaluate(self, batch: Batch) -> Tensor:
        return self._forward.totals(batch)

    def last_actions(self) -> dict[str, Any]:
        return self._actions.record()


def _total(losses: list[Tensor], device: torch.device) -> Tensor:
    """Return the sum of the microbatches' summed losses (fp64 scalar); 0 without losses."""
    if not losses:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(losses).sum(dtype=torch.float64)


def _loss_of_output(loss: Tensor, _: Tensor) -> Tensor:
    """Return the last stage's output: it is the loss already (`stage._Plain`)."""
    return loss
