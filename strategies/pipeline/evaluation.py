"""Forward passes without gradients through the same stages, for evaluation.

Our own loop rather than torch's `schedule.eval`: `eval` exchanges extra messages and allocates new buffers at every
switch between training and evaluation, needs as many microbatches as 1F1B, and cannot evaluate a V.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallelrun.distributed import comm
from parallelrun.distributed.mesh import Mesh
from parallelrun.models.network import Network
from parallelrun.planner.contract.plan import Plan
from parallelrun.training.loop.reader import Batch

from . import messages
from .schedule import Schedule, boundary_shape
from .stage import Sends, compute_dtype


class ForwardPass:
    """A batch through this rank's stages, receiving from and sending to the neighbours."""

    def __init__(self, model_parts: Sequence[Network], plan: Plan, mesh: Mesh):
        self._plan = plan
        self._group = mesh.group("pp")
        self._device = mesh.device
        stages = plan.stages_of(self._group.index)
        self._part_of = {stage.index: part for stage, part in zip(stages, model_parts, strict=True)}
        schedule, pp = plan.pipeline, self._group.size
        assert isinstance(schedule, Schedule)
        order = schedule.forward_only(pp, schedule.virtual_stages, plan.batch.microbatches)
        self._steps = messages.with_messages(order, schedule.pp_rank, len(plan.stages))[self._group.index]
        self._counts_right = plan.counts_right_answers

    @torch.no_grad()
    def totals(self, batch: Batch) -> Tensor:
        """fp64 (2,): the loss summed over the batch, and how many samples were put in the right class (0 for other
        models than classifiers); on the last stage's rank, 0 elsewhere. Dropout is off."""
        was_training = {part: part.training for part in self._part_of.values()}
        for part in was_training:
            part.eval()
        try:
            return self._run(batch)
        finally:
            for part, training in was_training.items():
                part.train(training)

    def _run(self, batch: Batch) -> Tensor:
        total = torch.zeros(2, dtype=torch.float64, device=self._device)
        last = len(self._plan.stages) - 1
        arrived: dict[tuple[int, int], tuple[Tensor, dist.Work | None]] = {}
        outputs: dict[tuple[int, int], Tensor] = {}
        sends = Sends()
        for step in self._steps:
            if step.kind == "RECV_F":
                buffer = torch.empty(
                    boundary_shape(self._plan, step.stage), dtype=compute_dtype(self._plan), device=self._device
                )
                arrived[step.stage, step.microbatch] = buffer, self._start(dist.irecv, buffer, group_src=step.peer)
            elif step.kind == "SEND_F":
                output = outputs.pop((step.stage, step.microbatch))
                sends.add([self._start(dist.isend, output, group_dst=step.peer)], output)
            else:
                part = self._part_of[step.stage]
                samples = batch.microbatch(step.microbatch, self._plan.batch.micro_batch)
                is_first = step.stage == 0
                x = network_input(part, samples) if is_first else _wait(*arrived.pop((step.stage, step.microbatch)))
                output = part(x, samples.sample_ids, samples.documents)
                if step.stage == last:
                    total[0] += part.loss(output, samples.targets).double()
                    if self._counts_right:
                        total[1] += (output.argmax(-1) == samples.targets).sum()
                elif step.stage + 1 in self._part_of:
                    arrived[step.stage + 1, step.microbatch] = (output, None)
                else:
                    outputs[step.stage, step.microbatch] = output.contiguous()
        sends.finish()
        return total

    def _start(self, function: Callable[..., dist.Work | None], tensor: Tensor, **peer: int) -> dist.Work:
        with comm.label(self._group.axis, "evaluation"):
            work = function(tensor, group=self._group.process_group, **peer)
        assert work is not None
        return work


def network_input(part: Network, samples: Batch) -> Any:
    """Return what the first stage reads of a microbatch."""
    return samples if part.takes_batch else samples.inputs


def _wait(tensor: Tensor, work: dist.Work | None) -> Tensor:
    if work is not None:
        work.wait()
    return tensor
