"""What the tests of data strategies run on ranks: three real steps, and this rank's shards with where they belong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from parallelrun.distributed.comm.counter import CommunicationCounter
from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.contract.parameters import LocalParameter
from parallelrun.planner.predict import prediction
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.training.loop.build import Training, build
from parallelrun.training.loop.schedules import LossScaler
from parallelrun.training.loop.step import measure, train_step
from tests.plans import tiny_config

Ranges = tuple[tuple[int, int], ...]
# Uneven everywhere: 37 rows of vocabulary; plain SGD in fp64, so that nothing hides an error in the gradients.
SETTING: dict[str, Any] = {
    "precision.name": "fp64",
    "optimizer.name": "sgd",
    "optimizer.clip": 0.3,
    "model.layers": 2,
    "model.vocab": 37,
    "dataset.vocab": 37,
    "global_batch": 16,
}


@dataclass
class Outcome:
    """Shards by name as (ranges, tensor): `gradients` of the first step before clipping, `updates` over all steps."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, tuple[Ranges, Tensor]] = field(default_factory=dict)
    updates: dict[str, tuple[Ranges, Tensor]] = field(default_factory=dict)
    counted: list[Collective] = field(default_factory=list)
    predicted: list[Collective] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)


def start(overrides: dict[str, Any]) -> Training:
    config = tiny_config({**SETTING, **overrides})
    return build(config, resolve(config), torch.device("cpu"))


def shards(training: Training, value: Callable[[LocalParameter], Tensor]) -> dict[str, tuple[Ranges, Tensor]]:
    """(ranges in the logical tensor, copy of value) of every parameter held, by one-device name of that tensor."""
    sizes, place = training.plan.mesh.sizes, training.mesh.coordinate
    return {
        p.name: (p.layout.ranges(p.spec.shape, sizes, place), value(p).detach().clone())
        for p in training.parameters
        if not p.shared
    }


def run(overrides: dict[str, Any], steps: int = 3, fault: Callable[[Training], None] | None = None) -> Outcome:
    """Train; count the last step's collectives. fault: plants a bug before the first step."""
    training = start(overrides)
    if fault:
        fault(training)
    outcome = Outcome(predicted=prediction.collectives(training.plan, training.mesh.rank))
    before = shards(training, lambda p: p.tensor)
    scaler = LossScaler(training.config.precision, training.plan.precision.scaled)

    def observe(trained: Training) -> None:
        if not outcome.gradients:
            outcome.gradients = shards(trained, lambda p: p.tensor.grad)

    counter = CommunicationCounter(training.mesh)
    for step in range(1, steps + 1):
        with counter if step == steps else nullcontext():
            result = train_step(training, step, 0.1, scaler, observe=observe)
        outcome.losses.append(result.loss)
        outcome.norms.append(result.grad_norm)
    outcome.counted = counter.rows()
    after = shards(training, lambda p: p.tensor)
    outcome.updates = {name: (ranges, after[name][1] - start) for name, (ranges, start) in before.items()}
    return outcome


def run_with_evaluation(overrides: dict[str, Any]) -> list[float]:
    """Losses of three steps with an evaluation before each."""
    training = start(overrides)
    scaler = LossScaler(training.config.precision, training.plan.precision.scaled)
    losses = []
    for step in range(1, 4):
        measure(training)
        losses.append(train_step(training, step, 0.1, scaler).loss)
    return losses


def assemble(
    parts: Sequence[dict[str, tuple[Ranges, Tensor]]], shapes: dict[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Whole tensors from every rank's shards: all elements must be there, and copies must be the same bit for bit."""
    whole = {}
    for name, shape in shapes.items():
        tensor = torch.full(shape, torch.nan, dtype=torch.float64)
        for part in parts:
            if name in part:
                ranges, value = part[name]
                place = tensor[tuple(slice(*pair) for pair in ranges)]
                seen = ~place.isnan()
                assert torch.equal(place[seen], value.double()[seen]), f"ranks disagree about {name}"
                place.copy_(value)
        assert not tensor.isnan().any(), f"some elements of {name} are on no rank"
        whole[name] = tensor
    return whole
