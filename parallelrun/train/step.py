"""One training step and one evaluation, the same for every plan."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor
from torch.profiler import record_function

from parallelrun import comm
from parallelrun.plan.structure import WORLD, Plan
from parallelrun.train import control
from parallelrun.train.batch import Batch
from parallelrun.train.build import Training
from parallelrun.train.scaler import LossScaler
from parallelrun.train.timing import StepClock


@dataclass(frozen=True)
class StepResult:
    """Mean loss, global gradient norm (unscaled), whether the update was applied, whether a rank was asked to stop.

    Where replicas are independent, grad_norm is the root mean square of their norms.
    """

    loss: float
    grad_norm: float
    applied: bool
    stop: bool


def count_valid(training: Training, batch: Batch | None, step: int = 1) -> tuple[int, int]:
    """(targets >= 0 by which the loss is divided, in this replica's part): known before backward.

    The former are those of the whole global batch; where replicas have run out of data (batch None), as many as if all
    those that the data strategy counts had as many as the others. A dataset without ignored targets needs no exchange;
    otherwise last-stage ranks sum theirs over dp.
    """
    plan, data = training.plan, training.plan.data
    num_replicas = plan.mesh.size("dp")
    num_counted = data.num_counted(step, num_replicas)
    if not training.dataset.has_ignored:
        per_sample = plan.spec.targets_per_sample
        counted = plan.batch.global_batch * num_counted // num_replicas
        return counted * per_sample, 0 if batch is None else plan.batch.replica_batch * per_sample
    if training.mesh.coordinate.get("pp", 0) != plan.last_stage_pp_rank:
        return 1, 0  # only the last stage computes a loss
    valid = None if batch is None or batch.targets is None else (batch.targets >= 0).sum()
    mine = torch.zeros((), dtype=torch.int64, device=training.mesh.device) if valid is None else valid
    everyone = mine.clone()
    comm.all_reduce(everyone, training.mesh.group("dp"), "control")
    num_active = sum(data.has_batch(step, worker) for worker in range(num_replicas))
    return max(int(everyone) * num_counted // num_active, 1), int(mine)


def count_samples(plan: Plan, step: int) -> float:
    """Samples of the step that means over routing groups are taken of: with replicas that have run out of data, as
    `count_valid` counts their targets."""
    num_replicas = plan.mesh.size("dp")
    return plan.batch.global_batch * plan.data.num_counted(step, num_replicas) / num_replicas


def forward_backward(training: Training, step: int, loss_scale: float = 1.0) -> tuple[Tensor, int]:
    """Put the global gradient (times loss_scale) on its way; return (local loss sum, local valid targets).

    `finish_gradients` waits for it. An independent replica's gradient is dp times its part of the global one, so that
    their mean is the global one.
    """
    has_batch = training.plan.data.has_batch(step, training.mesh.coordinate.get("dp", 0))
    with record_function("read samples"):
        batch = training.reader.batch(step) if has_batch else None
    everyone, mine = count_valid(training, batch, step)
    with record_function("forward and backward"):
        training.data.begin_step()
        training.routing.begin_step(training.plan.num_norms * loss_scale, count_samples(training.plan, step))
        if batch is None:
            loss_sum = torch.zeros((), dtype=torch.float64, device=training.mesh.device)
        else:
            loss_sum = training.runner.train(batch, training.plan.num_norms * loss_scale / everyone)
        training.data.launch_gradients()
        training.routing.launch()
    return loss_sum, mine


def finish_gradients(training: Training) -> None:
    """Wait until the parameters have the final gradients."""
    training.data.finish_gradients()
    training.gradients.finalise()


def train_step(
    training: Training,
    step: int,
    lr: float,
    scaler: LossScaler,
    stop: bool = False,
    observe: Callable[[Training], None] | None = None,
    clock: StepClock | None = None,
) -> StepResult:
    """Forward, backward, the step's agreement, clipping, update. Nothing is updated if a gradient is not finite.

    observe: called between backward and clipping, with the final gradients in place (`verify` reads them there).
    clock: times the optimizer. The parts of a step have names in a trace of torch's profiler.
    """
    loss_sum, num_valid = forward_backward(training, step, scaler.scale)
    with record_function("finish gradients"):
        # Where the norm need not be exchanged, the ranks wait for each other once a step instead of twice.
        early = _agree(training, loss_sum, num_valid, 0.0, stop) if training.gradients.measured_alone else None
        finish_gradients(training)
        if observe:
            observe(training)
        squares = training.gradients.squared_norm()
        totals = early.totals(squares) if early else _agree(training, loss_sum, num_valid, squares, stop).totals()
    grad_norm = totals.norm_squared**0.5 / scaler.scale
    finite = isfinite(totals.loss) and isfinite(grad_norm)
    if finite:
        with record_function("optimizer"), clock.optimizer() if clock else nullcontext():
            _update(training, totals, lr, scaler.scale)
        training.data.finish_update()
    training.statistics.finish_step(finite)
    training.routing.finish_step(finite)
    training.data.after_step(step)
    return StepResult(totals.loss, grad_norm, finite, totals.stop_requests > 0)


def _update(training: Training, totals: control.Totals, lr: float, loss_scale: float) -> None:
    """Clip the gradients, which carry `loss_scale`, and update the weights."""
    mine = training.mesh.coordinate.get("dp", 0) if training.plan.data.independent else 0
    own_norm = totals.norms_squared[mine] ** 0.5 / loss_scale
    training.gradients.clip(own_norm, training.config.optimizer.clip, loss_scale)
    training.optimizer.step(lr)


@dataclass(frozen=True)
class Evaluation:
    """Mean validation loss; of classifiers the part of the samples put in the right class, else None."""

    loss: float
    top1: float | None


@torch.no_grad()
def measure(training: Training) -> Evaluation:
    """Over the first `eval_batches` global batches of the validation split, under the same plan."""
    training.statistics.share()
    totals = torch.zeros(3, dtype=torch.float64, device=training.mesh.device)  # of loss, right answers, valid targets
    for number in range(1, training.eval_batches + 1):
        batch = training.eval_reader.batch(number)
        found = training.runner.evaluate(batch)
        num_valid = count_valid(training, batch)[1]
        if training.counts_loss:
            totals[:2] += found
        if training.counts_targets:
            totals[2] += num_valid
    comm.all_reduce(totals, training.mesh.group(WORLD), "control")
    loss_sum, num_right, num_valid = totals.tolist()
    top1 = num_right / num_valid if training.plan.counts_right_answers else None
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
