"""The shards of one server: their weights and optimizer state, how an update changes them, and their checkpoints.

The replay of an apply log uses the same class, so that equal updates give equal bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from parallelrun.base.errors import EXIT_ENVIRONMENT
from parallelrun.base.layout import Layout
from parallelrun.checkpoint.data import check_data
from parallelrun.checkpoint.exchange.source import initial_weights
from parallelrun.checkpoint.index import Index
from parallelrun.checkpoint.resume import check_global_batch, resolve_resume
from parallelrun.checkpoint.storage import LocalPart
from parallelrun.checkpoint.store import StateOf, parts_to_load, parts_to_save, read_checked
from parallelrun.checkpoint.together import CheckpointRanks
from parallelrun.config.schema.run_schema import Config
from parallelrun.data import open_dataset
from parallelrun.models import initialise
from parallelrun.models.optimizers.optimizer import Optimizer
from parallelrun.planner.contract.parameters import LocalParameter
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.model.definitions import Dataset
from parallelrun.planner.model.model_spec import ParameterSpec
from parallelrun.training.loop.build import whole_network
from parallelrun.training.loop.checkpointing import resume_values
from parallelrun.training.loop.flat_tensors import flat_views
from parallelrun.training.loop.schedules import LossScaler

from .plan import ParameterServer, frozen_shards, sharding

PushedPart = tuple[Tensor, Tensor]  # a part of `ShardStore.gradient`, and the values that a rank has pushed for it


class ShardStore:
    """Weights and gradient of a server's shards, each one flat CPU buffer in the order of `sharding`.

    version: number of updates so far (of synchronous updates: the step; a skipped one counts too). frozen: on server 0,
    the parameters that are not trained, for checkpoints.
    """

    def __init__(self, config: Config, plan: Plan, server: int):
        self._config, self._plan, self._server = config, plan, server
        stored = getattr(torch, plan.precision.stored)
        self.shards = sharding(plan).of_server[server]
        numel, shapes = sum(shard.numel for shard in self.shards), [shard.shape for shard in self.shards]
        self.weights, self.gradient = torch.zeros(numel, dtype=stored), torch.zeros(numel, dtype=stored)
        self.parameters: list[LocalParameter] = []
        self._starts: dict[str, int] = {}  # of the rows of each of `parameters`
        views = (flat_views(self.weights, shapes), flat_views(self.gradient, shapes))
        for shard, weight, gradient in zip(self.shards, *views):
            weight.grad = gradient
            self.parameters.append(_local(f"{shard.name}[{shard.start}:]", weight, shard.parameter))
            self._starts[self.parameters[-1].name] = shard.start
        frozen = [shard.parameter for shard in frozen_shards(plan)] if server == 0 else []
        self.frozen = [_local(spec.name, torch.zeros(spec.shape, dtype=stored), spec) for spec in frozen]
        self._stored = [*self.parameters, *self.frozen]
        self.optimizer = Optimizer(config.optimizer, self.parameters)
        self.version = 0

    def initialise(self) -> None:
        """Fill in the initial weights, which are the same under every plan."""
        config, plan = self._config, self._plan
        network = whole_network(config, plan)  # a user's module may compute initial values itself
        own = network.own_values(config.seed) if network.own_values is not None else {}
        initial = initial_weights(config, plan.spec)
        for parameter in self._stored:
            initialise.fill(parameter.tensor, parameter.spec, self._ranges(parameter), config.seed, own, initial)

    def mean(self, pushes: Sequence[Sequence[PushedPart]], weights: Sequence[float]) -> None:
        """Set the gradient to the weighted mean of the workers' `pushes`, summed in their order. The parts of a push
        are all elements of the gradient."""
        total = sum(weights)
        for number, (push, weight) in enumerate(zip(pushes, weights)):
            for part, values in push:
                if number == 0:
                    torch.mul(values, weight / total, out=part)
                else:
                    part.add_(values, alpha=weight / total)

    def squared_norm(self) -> float:
        """The squared norm of the gradient, summed in fp64."""
        return float(torch.linalg.vector_norm(self.gradient, dtype=torch.float64).square())

    def update(self, lr: float, coefficient: float = 1.0) -> None:
        """Step the optimizer with `coefficient` times the gradient."""
        if coefficient != 1.0:
            self.gradient.mul_(coefficient)
        self.optimizer.step(lr)

    def parts(self) -> list[LocalPart]:
        """Return what this server writes into a checkpoint."""
        return [part for parameter in self._stored for part in parts_to_save(parameter, self.optimizer, self._as_part)]

    def extra(self, clocks: Mapping[int, int]) -> dict[str, Any]:
        """Return the values that an exact resume needs in addition to the tensors. clocks: of the live workers."""
        config, plan = self._config, self._plan
        scaler = LossScaler(config.precision, plan.precision.scaled)
        values = resume_values(config, plan, min(clocks.values()), self._dataset, scaler)
        return {**values, "clocks": [clocks[worker] for worker in sorted(clocks)]}

    @cached_property
    def _dataset(self) -> Dataset:
        return open_dataset(self._config, self._plan.spec)

    def load(self) -> dict[int, int]:
        """Load `config.resume`, if given; return the clock from which each worker goes on. Raises CheckpointError.

        With synchronous updates all workers are at one clock. Otherwise each goes on from its own clock if the
        checkpoint has as many workers, else all from the lowest.
        """
        config, plan, workers = self._config, self._plan, range(self._plan.num_replicas)
        if not config.resume:
            return dict.fromkeys(workers, 0)
        path = resolve_resume(config.resume, config.runs)
        states: list[StateOf] = []

        def wants(index: Index) -> list[LocalPart]:
            wanted = [(parameter, *parts_to_load(parameter, index, self._as_part)) for parameter in self._stored]
            states.extend((parameter, state) for parameter, _, state in wanted if state)
            return [part for _, parts, _ in wanted for part in parts]

        ranks = CheckpointRanks(f"{path} could not be loaded", saving=False, alone=True)
        extra = read_checked(path, plan, ranks, wants).extra
        for parameter, state in states:
            self.optimizer.load_state(parameter.name, state)
        check_global_batch(extra, plan, path)
        check_data(extra, self._dataset, config, path, EXIT_ENVIRONMENT)
        step, clocks = int(extra["step"]), extra.get("clocks", [])
        if ParameterServer.of(plan).synchronous:
            self.version = step
        elif len(clocks) == len(workers):
            return dict(enumerate(clocks))
        return dict.fromkeys(workers, step)

    def _ranges(self, parameter: LocalParameter) -> tuple[tuple[int, int], ...]:
        """The range of each dim of the logical tensor that this server holds."""
        start, shape = self._starts.get(parameter.name, 0), parameter.spec.shape
        return ((start, start + len(parameter.tensor)), *((0, size) for size in shape[1:])) if shape else ()

    def _as_part(self, key: str, tensor: Tensor, parameter: LocalParameter) -> LocalPart:
        return LocalPart(key, tensor, parameter.spec.shape, tuple(start for start, _ in self._ranges(parameter)))


def _local(name: str, tensor: Tensor, spec: ParameterSpec) -> LocalParameter:
    return LocalParameter(name, tensor, spec, Layout.replicated(len(spec.shape)))
