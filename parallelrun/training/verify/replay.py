"""The reference of plans whose equivalence is `replay`: the data strategy's algorithm in one process.

Some data strategies do not compute the same as one device (gradient compression, Adasum, local SGD, DiLoCo). Their
reference is a replay: one single-device replica per worker, each with its part of the batch, and the strategy's rule
between them, `rule(config, plan) -> ReplayRule` in `strategies/data/<kind>/reference.py`. The reference has no tensor
or pipeline axes, so those are verified too.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from parallelrun.base import registry
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.contract.optimizers import with_lr_scale
from parallelrun.planner.contract.parameters import LocalParameter
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.model.model_spec import SAMPLE_SET_ROLE
from parallelrun.planner.pieces import sample_sets
from parallelrun.training.loop.build import Training, build
from parallelrun.training.loop.reader import Reader
from parallelrun.training.loop.schedules import learning_rate
from parallelrun.training.loop.step import count_valid
from parallelrun.training.verify.checked import single_device
from parallelrun.training.verify.trace import RecordedDecisions, Trace, replica_name

Tensors = dict[str, Tensor]


class ReplayRule:
    """The exchange between the replicas of a data strategy in plain arithmetic. This class is that of plain DDP.

    One object lives through all steps, so it may keep state (error feedback, momenta). Lists are in the order of the
    workers. Tensors are logical (one-device names and shapes), in the precision of the check.
    """

    def begin(self, weights: list[Tensors]) -> None:
        """Called once with every replica's initial weights. They are live: they change during training."""

    def gradients(self, step: int, local: list[Tensors]) -> list[Tensors]:
        """Return the gradients for each replica's optimizer (before clipping), here the sum for each replica.

        local[r] is the gradient of (sum of replica r's losses) / (valid targets of the global batch), so that the sum
        over replicas is the global gradient. If `plan.data.independent`, it is the mean of the replica's own: as many
        times that as there are replicas.
        """
        total = {name: torch.stack([own[name] for own in local]).sum(0) for name in local[0]}
        return [{name: value.clone() for name, value in total.items()} for _ in local]

    def after_update(self, step: int, weights: list[Tensors]) -> None:
        """Change the weights in place after every replica's optimizer step. The default leaves them unchanged."""


class OwnGradientsRule(ReplayRule):
    """Every replica steps by its own gradients."""

    def gradients(self, step: int, local: list[Tensors]) -> list[Tensors]:
        return local


@torch.no_grad()
def record_replay(
    config: Config, plan: Plan, device: torch.device, decisions: RecordedDecisions | None = None
) -> Trace:
    """Record the trace of `config.verify.steps` steps of the replay.

    The tensors of independent replicas have a `replica_name`; other replicas are equal, and the trace has those of the
    first. Raises ConfigError if a BatchNorm's sample set spans several replicas, because they train one after the
    other. decisions: as for `trace.record`.
    """
    sample_sets.check_replay(plan)
    config = with_lr_scale(config, plan)
    rule: ReplayRule = registry.load("strategies", f"data.{plan.data.kind}", "reference").rule(config, plan)
    steps = config.verify.steps
    replicas = [_replica(config, plan, device, index) for index in range(plan.num_replicas)]
    if decisions is not None:
        for replica in replicas:
            decisions.attach(replica)
    trace = Trace()
    trace.initial = _merged(plan, [weights_of(replica) for replica in replicas])
    rule.begin(_trained(replicas))
    for step in range(1, steps + 1):
        lr = learning_rate(config.optimizer, step, steps)
        _step(rule, replicas, plan, step, lr, trace)
    trace.final = _merged(plan, [weights_of(replica) for replica in replicas])
    _share_statistics(replicas, [True] * len(replicas))
    trace.val_loss = _validation_loss(replicas)
    trace.router_scores = decisions.recorded if decisions is not None else {}
    return trace


def _step(rule: ReplayRule, replicas: list[Training], plan: Plan, step: int, lr: float, trace: Trace) -> None:
    span = plan.mesh.size("dp") // len(replicas)
    has_batch = [plan.data.has_batch(step, index * span) for index in range(len(replicas))]
    batches = [replica.reader.batch(step) if has else None for replica, has in zip(replicas, has_batch)]
    counts = [0 if batch is None else count_valid(replica, batch)[1] for replica, batch in zip(replicas, batches)]
    divisor = sum(counts) * len(replicas) / sum(has_batch) or 1.0
    weight = len(replicas) if plan.data.independent else 1
    losses = []
    for replica, batch in zip(replicas, batches):
        replica.data.begin_step()
        replica.routing.begin_step(weight, plan.batch.global_batch)
        with torch.enable_grad():
            losses.append(0.0 if batch is None else float(replica.runner.train(batch, weight / divisor)))
        replica.data.finish_gradients()
        replica.gradients.finalise()
    combined = rule.gradients(step, [_gradients(replica.parameters) for replica in replicas])
    for replica, gradients in zip(replicas, combined, strict=True):
        for parameter in replica.parameters:
            parameter.tensor.grad = gradients[parameter.name].clone(memory_format=torch.contiguous_format)
    trace.gradients.append(_merged(plan, [_gradients(replica.held, "cpu") for replica in replicas]))
    routed = torch.stack([replica.routing.collect() for replica in replicas]).sum(0)
    squares = [float(replica.gradients.squared_norm()) for replica in replicas]
    for replica, square in zip(replicas, squares):
        replica.gradients.clip(square**0.5, replica.config.optimizer.clip)
        replica.optimizer.step(lr)
        replica.data.finish_update()
        replica.statistics.finish_step(applied=True)
        replica.routing.finish_step(True, routed)
    if not plan.data.independent:
        _share_statistics(replicas, has_batch)
    rule.after_update(step, _trained(replicas))
    trace.losses.append(sum(losses) / max(sum(counts), 1))
    trace.grad_norms.append((sum(squares) / len(squares)) ** 0.5)


def _share_statistics(replicas: list[Training], has_batch: list[bool]) -> None:
    """Give all replicas the mean of BatchNorm's running statistics of those that had a batch (independent ones do so
    before evaluation, with all)."""
    for copies in zip(*(replica.data.frozen for replica in replicas)):
        if copies[0].spec.layer_role == SAMPLE_SET_ROLE:
            mean = torch.stack([copy.tensor for copy, has in zip(copies, has_batch) if has]).mean(0)
            for copy in copies:
                copy.tensor.copy_(mean)


def _replica(config: Config, plan: Plan, device: torch.device, index: int) -> Training:
    """Build a one-device training on the samples of worker `index`, in one microbatch."""
    single, single_plan = single_device(config, plan)
    batch = replace(single_plan.batch, micro_batch=plan.batch.global_batch // plan.num_replicas, microbatches=1)
    training = build(single, replace(single_plan, batch=batch), device)
    training.close()
    training.reader, training.eval_reader = (
        Reader(reader.samples.split, reader.samples.sampler, training.plan, training.mesh, index)
        for reader in (training.reader, training.eval_reader)
    )
    return training


def _validation_loss(replicas: list[Training]) -> float:
    """Evaluate every replica's weights on its part of the validation batches."""
    loss_sum, num_valid = 0.0, 0.0
    for replica in replicas:
        for number in range(1, replica.eval_batches + 1):
            batch = replica.eval_reader.batch(number)
            loss_sum += float(replica.runner.evaluate(batch)[0])
            with torch.no_grad():
                num_valid += count_valid(replica, batch)[1]
    return loss_sum / num_valid if num_valid else float("nan")


def _trained(replicas: list[Training]) -> list[Tensors]:
    """Return every replica's live weights without frozen ones."""
    return [{p.name: p.tensor.detach() for p in replica.parameters} for replica in replicas]


def weights_of(training: Training) -> Tensors:
    """Return copies of all parameters of this rank, by name, on the CPU."""
    return {p.name: p.tensor.detach().to("cpu", copy=True) for p in training.held}


def _gradients(parameters: list[LocalParameter], device: str | None = None) -> Tensors:
    """Return copies of the gradients by name, zeros for frozen parameters. device: None: where the parameters are."""
    copies = {}
    for parameter in parameters:
        gradient = parameter.tensor.grad
        values = torch.zeros_like(parameter.tensor) if gradient is None else gradient.detach()
        copies[parameter.name] = values.to(device or values.device, copy=True)
    return copies


def _merged(plan: Plan, per_replica: list[Tensors]) -> Tensors:
    if not plan.data.independent:
        return per_replica[0]
    return {replica_name(name, i): value for i, weights in enumerate(per_replica) for name, value in weights.items()}
