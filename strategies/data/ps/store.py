"""What one server owns: its shards' weights and the optimizer's state, and how an update changes them. No threads.

The replay of an apply log uses the same class, so that the same updates give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from parallelrun import registry
from parallelrun.config.schema import Config
from parallelrun.layout import Layout
from parallelrun.models import initialise
from parallelrun.optimizer import Optimizer
from parallelrun.plan.parameters import LocalParameter
from parallelrun.plan.structure import Plan

from .shards import Shard, of_server


class ShardStore:
    """Weights and gradient of a server's shards, each one flat CPU buffer in the order of `shards.of_server`.

    version: updates so far (in a barrier's steps: the step). A skipped update counts too where all wait for it.
    frozen: on server 0, the parameters that nobody updates, for checkpoints.
    """

    def __init__(self, config: Config, plan: Plan, server: int):
        stored = getattr(torch, plan.precision.stored)
        self._plan, self._config = plan, config
        self.shards = of_server(plan, server)
        numel = sum(self._numel(shard) for shard in self.shards)
        self.weights = torch.zeros(numel, dtype=stored)
        self.gradient = torch.zeros(numel, dtype=stored)
        self.parameters = [self._parameter(shard, part) for shard, part in self.parts(self.weights)]
        for parameter, (_, gradient) in zip(self.parameters, self.parts(self.gradient)):
            parameter.tensor.grad = gradient
        self.optimizer = Optimizer(config.optimizer, self.parameters)
        specs = plan.spec.parameters.values()
        self.frozen = {s.name: torch.zeros(s.shape, dtype=stored) for s in specs if s.frozen and server == 0}
        self.version = 0

    def initialise(self) -> None:
        """Give the weights the values that they have under every plan."""
        parameters, own = self._plan.spec.parameters, self._own_values()
        for shard, parameter in zip(self.shards, self.parameters):
            spec = parameters[shard.name]
            ranges = ((shard.start, shard.stop), *((0, size) for size in spec.shape[1:])) if spec.shape else ()
            initialise.fill(parameter.tensor, spec, ranges, self._config.seed, own)
        for name, tensor in self.frozen.items():
            spec = parameters[name]
            initialise.fill(tensor, spec, tuple((0, size) for size in spec.shape), self._config.seed, own)

    def mean(self, gradients: Sequence[Tensor], weights: Sequence[float]) -> None:
        """Make the gradient the weighted mean of what was pushed. The order of the sum is that of the arguments."""
        total = sum(weights)
        torch.mul(gradients[0].to(self.gradient.dtype), weights[0] / total, out=self.gradient)
        for gradient, weight in zip(gradients[1:], weights[1:]):
            self.gradient.add_(gradient.to(self.gradient.dtype), alpha=weight / total)

    def squared_norm(self) -> float:
        """Of the gradient, summed in fp64."""
        return float(torch.linalg.vector_norm(self.gradient, dtype=torch.float64).square()) if len(self.shards) else 0.0

    def update(self, lr: float, coefficient: float = 1.0) -> None:
        """Step the optimizer by `coefficient` x the gradient."""
        if coefficient != 1.0:
            self.gradient.mul_(coefficient)
        self.optimizer.step(lr)

    def parts(self, flat: Tensor) -> Iterator[tuple[Shard, Tensor]]:
        """Views of a flat buffer: each shard with its rows."""
        start = 0
        for shard in self.shards:
            stop = start + self._numel(shard)
            yield shard, flat[start:stop].view(shard.shape(self._plan.spec.parameters[shard.name]))
            start = stop

    def _numel(self, shard: Shard) -> int:
        return shard.numel(self._plan.spec.parameters[shard.name])

    def _parameter(self, shard: Shard, part: Tensor) -> LocalParameter:
        spec = self._plan.spec.parameters[shard.name]
        return LocalParameter(f"{shard.name}[{shard.start}:]", part, spec, Layout.replicated(len(spec.shape)))

    def _own_values(self) -> dict[str, Tensor]:
        """What a user's module initialises itself."""
        if all(spec.initialiser.kind != "own" for spec in self._plan.spec.parameters.values()):
            return {}
        with torch.device("meta"):
            network = registry.load("models", self._config.model.name, "network").build(
                self._config, self._plan.spec, self._plan.precision
            )
        assert network.own_values is not None, "a parameter with its own initialiser is of a user's module"
        return network.own_values(self._config.seed)
