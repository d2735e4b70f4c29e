"""Engines: run a data replica's batch through the stages, forward and backward, microbatch by microbatch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from parallelrun import registry, torch_private
from parallelrun.mesh import Mesh
from parallelrun.models import recompute
from parallelrun.models.network import Network
from parallelrun.plan.structure import Plan
from parallelrun.train.batch import Batch

from .boundary import Sends, Stage
from .evaluation import ForwardPass


class AccumulationEngine:
    """One stage: microbatches one after the other, gradients added up."""

    def __init__(self, parts: list[Network], plan: Plan, mesh: Mesh):
        (self._part,) = parts
        self._plan = plan
        self._forward = ForwardPass(parts, plan, mesh)

    def train(self, batch: Batch, scale: float) -> Tensor:
        """Leave the gradient of scale x the summed loss in the parameters; return the unscaled sum (fp64 scalar)."""
        losses: list[Tensor] = []
        for index in range(self._plan.batch.microbatches):
            samples = batch.microbatch(index, self._plan.batch.micro_batch)
            loss = self._part.loss(self._part(samples.inputs, samples.sample_ids), samples.targets)
            losses.append(loss.detach())
            loss.backward(loss.new_full((), scale))
        return _total(losses, batch.sample_ids.device)

    def evaluate(self, batch: Batch) -> Tensor:
        """The summed loss (fp64 scalar), without gradients."""
        return self._forward.loss_sum(batch)

    def measure(self, batch: Batch) -> Tensor:
        """See `ForwardPass.totals`."""
        return self._forward.totals(batch)


def prepare_for_split_backward(parts: list[Network]) -> None:
    """Make the parts fit for a schedule that goes through a stage's backward twice, for inputs and for weights.

    Recomputation in full keeps what it has computed for the second pass; compiled backwards keep their buffers.
    """
    for part in parts:
        if part.recompute == "full":
            part.recompute = recompute.KEPT
    torch_private.keep_compiled_buffers()


class ScheduleEngine:
    """Stages over the pp axis, run by a schedule of torch.distributed.pipelining.

    torch's own averaging is off (`scale_grads=False`): the loss is a sum, and `scale` makes it a mean over the global
    batch before backward. The first `train` has some messages more: the stages agree on static metadata.
    """

    def __init__(
        self,
        parts: list[Network],
        plan: Plan,
        mesh: Mesh,
        schedule: type[PipelineScheduleSingle] | type[PipelineScheduleMulti],
    ):
        group = mesh.group("pp")
        assert group.process_group is not None, "a pipeline of one rank has no group"
        indices = [stage.index for stage in plan.stages_of(group.index)]
        steps = registry.load("strategies", f"pipeline.{plan.pipeline.kind}", "plan").Way().steps(plan)
        joined = {(step.kind, step.microbatch) for step in steps[group.index] if step.joined}
        self._sends = Sends()
        self._stages = [
            Stage(part, index, plan, mesh.device, group.process_group, self._sends, joined)
            for index, part in zip(indices, parts, strict=True)
        ]
        self._inputs_here = indices[0] == 0
        self._losses_here = indices[-1] == len(plan.stages) - 1
        held: Any = self._stages[0] if issubclass(schedule, PipelineScheduleSingle) else self._stages
        self._schedule = schedule(
            held,
            n_microbatches=plan.batch.microbatches,
            loss_fn=_loss_of_output,
            scale_grads=False,
        )
        if isinstance(self._schedule, PipelineScheduleMulti):
            listed = [[(step.kind, step.stage, step.microbatch) for step in order] for order in steps]
            torch_private.set_messages(self._schedule, listed)
        self._forward = ForwardPass(parts, plan, mesh)

    def train(self, batch: Batch, scale: float) -> Tensor:
        """Leave the gradient of scale x the summed loss in this rank's parameters.

        Returns the unscaled sum over the data replica (fp64 scalar) on the last stage's rank, 0 elsewhere.
        """
        last = self._stages[-1].plain
        last.losses.clear()
        last.scale = scale
        for stage in self._stages:
            stage.sample_ids = batch.sample_ids
        self._stages[-1].targets = batch.targets
        inputs = (batch.inputs,) if self._inputs_here else ()
        target = batch.targets if self._losses_here else None
        self._schedule.step(*inputs, target=target, return_outputs=False)
        self._sends.finish()
        return _total(last.losses, batch.sample_ids.device)

    def evaluate(self, batch: Batch) -> Tensor:
        """The summed loss (fp64 scalar) on the last stage's rank, 0 elsewhere; without gradients."""
        return self._forward.loss_sum(batch)

    def measure(self, batch: Batch) -> Tensor:
        """See `ForwardPass.totals`."""
        return self._forward.totals(batch)


def _loss_of_output(loss: Tensor, _: Tensor) -> Tensor:
    """The last stage gives its loss already (`boundary._Plain`)."""
    return loss


def _total(losses: list[Tensor], device: torch.device) -> Tensor:
    """The sum of the microbatches' summed losses (fp64 scalar), 0 of none."""
    if not losses:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(losses).sum(dtype=torch.float64)
