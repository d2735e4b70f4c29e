"""One training step and one evaluation, the same for every plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from parallelrun.distributed import comm, torch_private
from parallelrun.planner.contract.plan import CONTROL_ELEMENTS, WORLD, Plan
from parallelrun.training.loop.build import Training
from parallelrun.training.loop.reader import Batch
from parallelrun.training.loop.schedules import LossScaler
from parallelrun.training.metrics.timing import StepClock


@dataclass(frozen=True)
class StepResult:
    """Mean loss, global gradient norm (unscaled), whether the update was applied, whether a rank was asked to stop.

    Where replicas are independent, grad_norm is the root mean square of their norms.
    """

    loss: float
    grad_norm: float
    applied: bool
    stop: bool


@dataclass(frozen=True)
class Totals:
    """Sums over the world: unscaled loss, valid targets, stop requests, and squared gradient norms.

    norms_squared: one value, or one for each independent replica.
    """

    loss_sum: float
    num_valid: float
    stop_requests: float
    norms_squared: tuple[float, ...]

    @property
    def loss(self) -> float:
        """Mean loss over valid targets."""
        return self.loss_sum / self.num_valid if self.num_valid else float("nan")

    @property
    def norm_squared(self) -> float:
        """The mean of `norms_squared`: not finite if one of them is not."""
        return sum(self.norms_squared) / len(self.norms_squared)


def _totals(training: Training, loss_sum: Tensor, num_valid: float, squares: Tensor, stop: bool) -> Totals:
    """Sum fp64 numbers, to which each sample and target contributes once: the one small all-reduce of every step."""
    plan, mesh = training.plan, training.mesh
    norms: list[Tensor | float] = [0.0] * plan.num_norms
    norms[mesh.coordinate.get(plan.worker_axis, 0) if plan.num_norms > 1 else 0] = squares
    counted_loss = loss_sum if training.counts_loss else 0.0
    values = (counted_loss, num_valid if training.counts_targets else 0, float(stop), *norms)
    assert len(values) == CONTROL_ELEMENTS + plan.num_norms
    numbers = [0.0 if isinstance(value, Tensor) else value for value in values]
    vector = torch.tensor(numbers, dtype=torch.float64, device=mesh.device)
    for index, value in enumerate(values):
        if isinstance(value, Tensor):
            vector[index] = value
    comm.all_reduce(vector, mesh.group(WORLD), "control")
    loss, valid, stops, *sums = vector.tolist()
    return Totals(loss, valid, stops, tuple(sums))


def count_valid(training: Training, batch: Batch | None, step: int = 1, axis: str | None = None) -> tuple[float, float]:
    """Return (the number of targets by which the loss is divided, this replica's valid targets), before backward.

    The first is the number of targets >= 0 in the global batch. If some replicas have run out of data (their batch is
    None), it is extrapolated from the active replicas to all. A dataset without ignored targets needs no exchange;
    otherwise the ranks of the last stage sum their targets over dp, and cp, or over `axis`.
    """
    plan, num_replicas = training.plan, training.plan.mesh.size("dp")
    if not training.counts_first:
        per_sample = plan.spec.targets_per_sample
        of_replica = plan.batch.replica_batch * per_sample
        return of_replica * num_replicas, 0 if batch is None else of_replica // plan.mesh.size("cp")
    if training.mesh.coordinate.get("pp", 0) != plan.last_stage_pp_rank:
        return 1, 0  # only the last stage computes a loss
    mine = counted_targets(training, batch)
    everyone = mine.clone()
    comm.all_reduce(everyone, training.mesh.group(plan.count_axis if axis is None else axis), "control")
    return float(everyone) * num_replicas / count_active(plan, step) or 1.0, float(mine)


def counted_targets(training: Training, batch: Batch | None) -> Tensor:
    """Return the number of targets >= 0 in this rank's batch, or the count of the user's own loss over it."""
    if batch is not None and training.plan.spec.own_loss:
        return training.runner.count(batch)
    if batch is None or batch.targets is None:
        return torch.zeros((), dtype=torch.float64, device=training.mesh.device)
    return (batch.targets >= 0).sum(dtype=torch.float64)


def count_active(plan: Plan, step: int) -> int:
    """Return the number of data replicas that have a batch."""
    return sum(plan.data.has_batch(step, replica) for replica in range(plan.mesh.size("dp")))


def forward_backward(training: Training, step: int, loss_scale: float = 1.0) -> tuple[Tensor, float]:
    """Run forward and backward, start reducing the gradients; return (local loss sum, local valid targets).

    Gradients carry the factor loss_scale; `finish_gradients` waits for them. An independent replica's gradient is dp
    times its share of the global gradient, so that the mean over replicas is the global gradient.
    """
    has_batch = training.plan.data.has_batch(step, training.mesh.coordinate.get("dp", 0))
    with torch_private.phase("read samples"):
        batch = training.reader.batch(step) if has_batch else None
    training.data.loss_scale = loss_scale
    training.data.begin_step()
    everyone, mine = count_valid(training, batch, step)
    with torch_private.phase("forward and backward"):
        training.routing.begin_step(training.plan.num_norms * loss_scale, training.plan.batch.global_batch)
        if batch is None:
            loss_sum = torch.zeros((), dtype=torch.float64, device=training.mesh.device)
        else:
            loss_sum = training.runner.train(batch, training.plan.num_norms * loss_scale / everyone)
        training.runner.loss_sum = loss_sum
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
    """Run forward, backward, the exchange of `Totals`, clipping and the update.

    Nothing is updated if a gradient is not finite. observe: called with the final gradients before clipping, while all
    that a checkpoint contains still is as after the last step. clock: times the optimizer. The
    phases of a step have names in a trace of torch's profiler.
    """
    loss_sum, num_valid = forward_backward(training, step, scaler.scale)
    with torch_private.phase("finish gradients"):
        finish_gradients(training)
        if observe:
            observe(training)
        totals = _totals(training, loss_sum, num_valid, training.gradients.squared_norm(), stop)
    grad_norm = totals.norm_squared**0.5 / scaler.scale
    finite = isfinite(totals.loss) and isfinite(grad_norm)
    if finite:
        with torch_private.phase("optimizer"), clock.optimizer() if clock else nullcontext():
            _update(training, totals, lr, scaler.scale)
        training.data.finish_update()
    training.statistics.finish_step(finite, count_active(training.plan, step))
    training.routing.finish_step(finite)
    training.data.after_step(step)
    return StepResult(totals.loss, grad_norm, finite, totals.stop_requests > 0)


def _update(training: Training, totals: Totals, lr: float, loss_scale: float) -> None:
    """Clip the gradients, which have the factor `loss_scale`, and update the weights."""
    plan, coordinate = training.plan, training.mesh.coordinate
    mine = coordinate.get(plan.worker_axis, 0) if plan.data.independent else 0
    own_norm = totals.norms_squared[mine] ** 0.5 / loss_scale
    training.gradients.clip(own_norm, training.config.optimizer.clip, loss_scale)
    training.optimizer.step(lr)


@dataclass(frozen=True)
class Evaluation:
    """Mean validation loss, and the accuracy of classifiers (None for other models)."""

    loss: float
    top1: float | None


@torch.no_grad()
def measure(training: Training) -> Evaluation:
    """Evaluate the first `eval_batches` global batches of the validation split under the same plan."""
    training.statistics.share()
    batches = map(training.eval_reader.batch, range(1, training.eval_batches + 1))
    return evaluate(training, batches, count_valid, WORLD)


@torch.no_grad()
def evaluate(
    training: Training,
    batches: Iterable[Batch],
    count: Callable[[Training, Batch], tuple[float, float]],
    axis: str,
) -> Evaluation:
    """Evaluate batches, whose samples the ranks of `axis` have between them. count: as `count_valid`."""
    totals = torch.zeros(3, dtype=torch.float64, device=training.mesh.device)  # loss, right answers, valid targets
    for batch in batches:
        sums, num_valid = training.runner.evaluate(batch), count(training, batch)[1]
        if training.counts_loss:
            totals[:2] += sums
        if training.counts_targets:
            totals[2] += num_valid
    comm.all_reduce(totals, training.mesh.group(axis), "control")
    loss_sum, num_right, num_valid = totals.tolist()
    top1 = num_right / num_valid if training.plan.counts_right_answers else None
    return Evaluation(loss_sum / num_valid if num_valid else float("nan"), top1)
