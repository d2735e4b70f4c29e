"""What the ranks do in the tests of horovod and of compression."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallelrun.distributed.mesh import Group
from parallelrun.planner.contract.parameters import held_parameters
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.strategies.data.common.compression.powersgd import FactoredSum
from parallelrun.strategies.data.horovod.adasum import all_combine
from parallelrun.training.loop.build import Training, build
from parallelrun.training.loop.schedules import LossScaler
from parallelrun.training.loop.step import train_step
from tests.mutants import general as mutants
from tests.plans import tiny_config, tiny_plan


def start(overrides: dict[str, Any]) -> Training:
    config = tiny_config({"strategy.data.kind": "horovod", "precision.name": "fp64", **overrides})
    return build(config, resolve(config), torch.device("cpu"))


def step(training: Training, number: int) -> float:
    return train_step(training, number, 0.05, LossScaler(training.config.precision, False)).loss


def context(directory: str) -> Any:
    return SimpleNamespace(rank=dist.get_rank(), directory=Path(directory))


def timeline(overrides: dict[str, Any], directory: str) -> list[dict[str, Any]]:
    """The events of two steps; only rank 0 has any."""
    training = start({**overrides, "strategy.data.timeline": True})
    training.data.begin_run(training, context(directory), 0)
    for number in (1, 2):
        step(training, number)
    path = Path(directory) / "timeline.json"
    return json.loads(path.read_text().rstrip(",\n") + "]") if dist.get_rank() == 0 else []


def gradient_of_alike(overrides: dict[str, Any]) -> Tensor:
    """The gradient of the first weight in step 1, when all workers have the same samples."""
    mutants.same_samples_everywhere()
    training = start(overrides)
    seen: list[Tensor] = []

    def observe(trained: Training) -> None:
        found = trained.parameters[0].tensor.grad
        assert found is not None
        seen.append(found.clone())

    train_step(training, 1, 0.05, LossScaler(training.config.precision, False), observe=observe)
    return seen[0]


def weights_after_start(overrides: dict[str, Any]) -> list[Tensor]:
    """What each rank holds before the first step, when every rank has drawn its own weights."""
    mutants.initial_weights_by_rank()
    return [parameter.tensor.detach().clone() for parameter in start(overrides).held]


def feedback(steps: int, rank_of_factors: int) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """Per parameter: this rank's gradients of all steps summed, all sums that came out summed, this rank's remaining
    error, the last sum."""
    held = [p for p in held_parameters(tiny_plan(dp=2), 0) if len(p.spec.shape) == 2][:3]
    torch.manual_seed(dist.get_rank())
    parts = [(one, torch.zeros(one.spec.shape, dtype=torch.float64)) for one in held]

    def start_sum(tensor: Tensor) -> dist.Work:
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        return work

    exchange = FactoredSum([], parts, rank_of_factors, start_sum)
    given = [torch.zeros_like(buffer) for _, buffer in parts]
    sent = [torch.zeros_like(buffer) for _, buffer in parts]
    for _ in range(steps):
        for (_, buffer), total in zip(parts, given):
            buffer.copy_(torch.randn_like(buffer))
            total += buffer
        exchange.start().wait()
        for (_, buffer), total in zip(parts, sent):
            total += buffer
    error_of = {g.data_ptr(): error for stack in exchange.stacks for g, error in zip(stack.gradients, stack.error)}
    errors = [error_of[buffer.data_ptr()].clone() for _, buffer in parts]
    return given, sent, errors, [buffer.clone() for _, buffer in parts]


def combined(vectors: list[Tensor], lengths: list[int]) -> Tensor:
    """Adasum of `vectors`, one a rank."""
    mine = vectors[dist.get_rank()].clone()
    ranks = tuple(range(dist.get_world_size()))
    all_combine(mine, lengths, Group("dp", ranks, dist.get_rank(), dist.group.WORLD))
    return mine


def optimizer_state(directory: str) -> tuple[list[Tensor], list[Tensor]]:
    """This rank's AdamW state and weights in a run that goes on from step 2, of which worker 1 has read nonsense."""
    training = start({"dp": 2, "optimizer.name": "adamw"})
    step(training, 1)
    tensors = [value for p in training.parameters for _, value in sorted(training.optimizer.state(p.name).items())]
    weights = [p.tensor.detach() for p in training.parameters]
    if dist.get_rank():
        for value in [*tensors, *weights]:
            value.add_(1)
    training.data.begin_run(training, context(directory), 1)
    return tensors, weights
