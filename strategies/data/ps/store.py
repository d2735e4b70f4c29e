"""The shards of one server: their weights and optimizer state, how an update changes them, and their checkpoints.

The replay of an apply log uses the same class, so that equal updates give equal bits. Checkpoints hold one-device names
and can be loaded under any plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from parallelrun import checkpoint, registry
from parallelrun.checkpoint.find import FOLDER
from parallelrun.checkpoint.index import check_model, describe_plan, state_key, weight_key
from parallelrun.checkpoint.planners import LocalPart, PartLoadPlanner, PartSavePlanner
from parallelrun.checkpoint.storage import SafetensorsReader, SafetensorsWriter
from parallelrun.checkpoint.store import one_process_is_fine, raise_for_user
from parallelrun.config.schema import Config
from parallelrun.data import open_dataset
from parallelrun.layout import Layout
from parallelrun.models import initialise
from parallelrun.optimizer import Optimizer
from parallelrun.plan.parameters import LocalParameter
from parallelrun.plan.structure import Plan
from parallelrun.train.checkpointing import check_batch
from parallelrun.train.scaler import LossScaler

from .connections import shard_views
from .plan import ParameterServer, server_shards


class ShardStore:
    """Weights and gradient of a server's shards, each one flat CPU buffer in the order of `plan.server_shards`.

    version: number of updates so far (of synchronous updates: the step; a skipped one counts too). frozen: on server 0,
    the parameters that are not trained, for checkpoints.
    """

    def __init__(self, config: Config, plan: Plan, server: int):
        self._config, self._plan, self._server = config, plan, server
        stored = getattr(torch, plan.precision.stored)
        self.shards = server_shards(plan, server)
        numel = sum(shard.numel for shard in self.shards)
        self.weights, self.gradient = torch.zeros(numel, dtype=stored), torch.zeros(numel, dtype=stored)
        self.parameters = []
        views = zip(self.shards, shard_views(self.weights, self.shards), shard_views(self.gradient, self.shards))
        for shard, weight, gradient in views:
            weight.grad = gradient
            layout = Layout.replicated(len(shard.shape))
            self.parameters.append(LocalParameter(f"{shard.name}[{shard.start}:]", weight, shard.parameter, layout))
        self.optimizer = Optimizer(config.optimizer, self.parameters)
        specs = plan.spec.parameters.values()
        self.frozen = {s.name: torch.zeros(s.shape, dtype=stored) for s in specs if s.frozen and server == 0}
        self.version = 0

    def initialise(self) -> None:
        """Fill in the initial weights, which are the same under every plan."""
        own, seed = self._own_values(), self._config.seed
        for shard, parameter in zip(self.shards, self.parameters):
            shape = shard.parameter.shape
            ranges = ((shard.start, shard.stop), *((0, size) for size in shape[1:])) if shape else ()
            initialise.fill(parameter.tensor, shard.parameter, ranges, seed, own)
        for name, tensor in self.frozen.items():
            initialise.fill(
                tensor, self._plan.spec.parameters[name], tuple((0, size) for size in tensor.shape), seed, own
            )

    def mean(self, gradients: Sequence[Tensor], weights: Sequence[float]) -> None:
        """Set the gradient to the weighted mean of `gradients`, summed in their order."""
        total = sum(weights)
        torch.mul(gradients[0].to(self.gradient.dtype), weights[0] / total, out=self.gradient)
        for gradient, weight in zip(gradients[1:], weights[1:]):
            self.gradient.add_(gradient.to(self.gradient.dtype), alpha=weight / total)

    def squared_norm(self) -> float:
        """The squared norm of the gradient, summed in fp64."""
        return float(torch.linalg.vector_norm(self.gradient, dtype=torch.float64).square())

    def update(self, lr: float, coefficient: float = 1.0) -> None:
        """Step the optimizer with `coefficient` times the gradient."""
        if coefficient != 1.0:
            self.gradient.mul_(coefficient)
        self.optimizer.step(lr)

    def save(self, clocks: Mapping[int, int], directory: Path, group: dist.ProcessGroup | None) -> None:
        """Write `checkpoints/step_<lowest clock>`. Collective over the servers; raises SaveFailed on all of them.

        clocks: of the live workers, which all wait at a barrier, so that no push is on its way.
        """
        config, plan, step = self._config, self._plan, min(clocks.values())
        extra = {
            "step": step,
            "samples": step * plan.batch.global_batch,
            "global_batch": plan.batch.global_batch,
            "seed": config.seed,
            "dataset": {"name": config.dataset.name, "fingerprint": open_dataset(config, plan.spec).fingerprint},
            "scaler": LossScaler(config.precision, plan.precision.scaled).state(),
            "clocks": [clocks[worker] for worker in sorted(clocks)],
        }
        folder = directory / FOLDER
        writer = SafetensorsWriter(folder, step, plan.optimizer, describe_plan(plan), extra)
        states = {parameter.name: self.optimizer.state(parameter.name) for parameter in self.parameters}
        planner = PartSavePlanner(
            self._parts(states, loading=False), [weight_key(name) for name in plan.spec.parameters]
        )
        try:
            with one_process_is_fine():
                save_state({}, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
        except CheckpointException as error:
            writer.discard()
            what = f"the checkpoint of step {step} could not be written to {folder}"
            raise_for_user(error, what, self._server, saving=True)
        checkpoint.keep_last(folder, config.checkpoint.keep, SimpleNamespace(rank=self._server))

    def load(self) -> dict[int, int]:
        """Load `config.resume`, if given; return the clock from which each worker goes on. Raises CheckpointError.

        With synchronous updates all workers are at one clock. Otherwise each goes on from its own clock if the
        checkpoint has as many workers, else all from the lowest.
        """
        config, plan, workers = self._config, self._plan, range(self._plan.num_workers)
        if not config.resume:
            return dict.fromkeys(workers, 0)
        path = checkpoint.resolve_resume(config.resume, config.runs)
        reader = SafetensorsReader(path)
        states: dict[str, dict[str, Tensor]] = {}
        try:
            check_model(reader.index, plan, path)
            for shard, parameter in zip(self.shards, self.parameters):
                state = states[parameter.name] = {}
                for kind in reader.index.state_kinds.get(shard.name, ()):
                    stored = reader.index.tensors[state_key(kind, shard.name)]
                    shape = parameter.tensor.shape if stored.shape else ()
                    state[kind] = torch.zeros(shape, dtype=getattr(torch, stored.dtype))
            planner = PartLoadPlanner(self._parts(states, loading=True))
            with one_process_is_fine():
                load_state({}, storage_reader=reader, planner=planner, no_dist=True)
        except CheckpointException as error:
            raise_for_user(error, f"{path} could not be loaded", 0, saving=False)
        for name, state in states.items():
            if state:
                self.optimizer.load_state(name, state)
        extra = dict(reader.index.extra)
        check_batch(extra, plan, path)
        step, clocks = int(extra["step"]), extra.get("clocks", [])
        if ParameterServer.of(plan).synchronous:
            self.version = step
        elif len(clocks) == len(workers):
            return dict(enumerate(clocks))
        return dict.fromkeys(workers, step)

    def _parts(self, states: Mapping[str, Mapping[str, Tensor]], loading: bool) -> list[LocalPart]:
        """This server's parts of a checkpoint. states: the optimizer's, by the store's parameter names.

        A state that is one number per tensor is read for each shard, and written for the first one only.
        """
        parts = [LocalPart(weight_key(n), t, tuple(t.shape), (0,) * t.dim()) for n, t in self.frozen.items()]
        for shard, parameter in zip(self.shards, self.parameters):
            shape = shard.parameter.shape
            offsets = (shard.start, *(0 for _ in shape[1:])) if shape else ()
            parts.append(LocalPart(weight_key(shard.name), parameter.tensor, shape, offsets))
            for kind, value in states[parameter.name].items():
                if value.dim():
                    parts.append(LocalPart(state_key(kind, shard.name), value, shape, offsets))
                elif loading or shard.start == 0:
                    parts.append(LocalPart(state_key(kind, shard.name), value, (), ()))
        return parts

    def _own_values(self) -> dict[str, Tensor]:
        """Initial values that a user's module computes itself."""
        config, plan = self._config, self._plan
        if all(spec.initialiser.kind != "own" for spec in plan.spec.parameters.values()):
            return {}
        with torch.device("meta"):
            network = registry.load("models", config.model.name, "network").build(config, plan.spec, plan.precision)
        assert network.own_values is not None, "only a user's module initialises its parameters itself"
        return cast("dict[str, Tensor]", network.own_values(config.seed))
