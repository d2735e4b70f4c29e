"""One training step and one evaluation, the same for every plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from parallelrun import comm
from parallelrun.mesh.runtime import WORLD
from parallelrun.train import control
from parallelrun.train.batch import Batch
from parallelrun.train.build import Training
from parallelrun.train.scaler import LossScaler


@dataclass(frozen=True)
class StepResult:
    """Mean loss, global gradient norm (unscaled), whether the update was applied, whether a rank was asked to stop.

    Where replicas are independent, grad_norm is the root mean square of their norms.
    """

    loss: float
    grad_norm: float
    applied: bool
    stop: bool


def count_valid(training: Training, batch: Batch) -> tuple[int, int]:
    """(targets >= 0 in the whole global batch, in this replica's part): known before backward.

    A dataset without ignored targets needs no exchange; otherwise last-stage ranks sum theirs over dp.
    """
    plan = training.plan
    if not training.dataset.has_ignored:
        per_sample = plan.spec.targets_per_sample
        return plan.batch.global_batch * per_sample, plan.batch.replica_batch * per_sample
    if batch.targets is None:
        return 1, 0  # only the last stage computes a loss
    mine = (batch.targets >= 0).sum()
    everyone = mine.clone()
    comm.all_reduce(everyone, training.mesh.group("dp"), "control")
    return max(int(everyone), 1), int(mine)


def forward_backward(training: Training, step: int, loss_scale: float = 1.0) -> tuple[Tensor, int]:
    """Leave the global gradient (times loss_scale) in the parameters; return (local loss sum, local valid targets).

    An independent replica's gradient is dp times its part of the global one, so that their mean is the global one.
    """
    batch = training.reader.batch(step)
    everyone, mine = count_valid(training, batch)
    training.data.begin_step()
    loss_sum = training.engine.train(batch, training.plan.num_norms * loss_scale / everyone)
    training.data.finish_gradients()
    training.gradients.finalise()
    return loss_sum, mine


def train_step(
    training: Training,
    step: int,
    lr: float,
    scaler: LossScaler,
    stop: bool = False,
    observe: Callable[[Training], None] | None = None,
) -> StepResult:
    """Forward, backward, the step's agreement, clipping, update. Nothing is updated if a gradient is not finite.

    observe: called between backward and clipping, with the final gradients in place (`verify` reads them there).
    """
    agreements: list[control.Agreement] = []

    def agree_early(loss_sum: Tensor, num_valid: int) -> None:
        """Where the norm need not be exchanged, the ranks wait for each other once a step instead of twice."""
        if training.gradients.measured_alone:
            agreements.append(_agree(training, loss_sum, num_valid, 0.0, stop))

    loss_sum, num_valid = forward_backward(training, step, scaler.scale, agree_early)
    if observe:
        observe(training)
    squares = training.gradients.squared_norm()
    totals = _agree(training, loss_sum, num_valid, squares, stop)
    grad_norm = totals.norm_squared**0.5 / scaler.scale
    finite = isfinite(totals.loss) and isfinite(grad_norm)
    if finite:
        mine = training.mesh.coordinate.get("dp", 0) if training.plan.data.independent else 0
        own_norm = totals.norms_squared[mine] ** 0.5 / scaler.scale
        training.gradients.clip(own_norm, training.config.optimizer.clip, scaler.scale)
        training.optimizer.step(lr)
        training.data.finish_update()
    training.statistics.finish_step(finite)
    training.data.after_step(step)
    return StepResult(totals.loss, grad_norm, finite, totals.stop_requests > 0)


@dataclass(frozen=True)
class Evaluation:
    """Mean validation loss; of image classifiers the part of the images put in the right class, else None."""

    loss: float
    top1: float | None


@torch.no_grad()
def measure(training: Training) -> Evaluation:
    """Over the first `eval_batches` global batches of the validation split, under the same plan."""
    training.statistics.share()
    totals = torch.zeros(3, dtype=torch.float64, device=training.mesh.device)  # of loss, right answers, valid targets
    for number in range(1, training.eval_batches + 1):
        batch = training.eval_reader.batch(number)
        found = training.engine.measure(batch)
        num_valid = count_valid(training, batch)[1]
        if training.counts_loss:
            totals[:2] += found
        if training.counts_targets:
            totals[2] += num_valid
    comm.all_reduce(totals, training.mesh.group(WORLD), "control")
    loss_sum, num_right, num_valid = totals.tolist()
    top1 = num_right / num_valid if training.plan.spec.kind == "images" else None
    return Evaluation(loss_sum / num_valid if num_valid else float("nan"), top1)


def evaluate(training: Training) -> float:
    """The mean validation loss of `measure`."""
    return measure(training).loss


def _agree(
    training: Training, loss_sum: Tensor, num_valid: int, squares: Tensor | float, stop: bool
) -> control.Agreement:
    """Start the step's exchange, with every sample's loss and every target counted once."""
    counted_loss = loss_sum if training.counts_loss else 0.0
    counted_valid = num_valid if training.counts_targets else 0
    return control.agree(counted_loss, counted_valid, squares, stop, training.mesh, training.plan.num_norms)
