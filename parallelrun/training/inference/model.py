"""A trained model on one device or on tensor-parallel ranks, ready to compute."""

from __future__ import annotations

from dataclasses import replace

import torch

from parallelrun.base import registry
from parallelrun.base.precision import TABLE
from parallelrun.checkpoint.exchange.source import StoredModel
from parallelrun.config.schema.model_schema import DatasetConfig
from parallelrun.config.schema.run_schema import Config
from parallelrun.distributed.mesh import Mesh
from parallelrun.models import initialise
from parallelrun.models.network import Network, allocate
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.model.model_spec import ModelSpec
from parallelrun.planner.resolve.resolve_config import resolve


def plan_for(source: StoredModel, tp: int) -> tuple[Config, Plan]:
    """The configuration and plan of one sequence at a time on `tp` ranks. Raises ConfigError for an illegal `tp`."""
    model = replace(without_groups(source.config).model, vocab=source.spec.vocab)
    data = DatasetConfig(name="synthetic")  # has the model's token ids; nothing is read
    config = Config(model=model, dataset=data, precision=source.config.precision, tp=tp, global_batch=1)
    return config, resolve(config)


def loaded(
    source: StoredModel,
    config: Config,
    spec: ModelSpec,
    ranks: tuple[Plan, Mesh] | None = None,
    on: str | None = None,
) -> Network:
    """The network of `config` and `spec` with the weights of `source`, in evaluation.

    ranks: the plan and mesh of the tensor-parallel ranks that hold it together, of which each reads its part; None: one
    device. on: that device; None: a GPU if there is one.
    """
    with torch.device("meta"):
        network: Network = registry.load("models", config.model.name, "network").build(
            config, spec, TABLE[config.precision.name]
        )
    if ranks is None:
        _fill(network, source, spec, on)
    else:
        plan, mesh = ranks
        axes = {"tensor": plan.tensor.kind, **({"expert": plan.expert.kind} if plan.expert else {})}
        for axis, kind in axes.items():
            registry.load("strategies", f"{axis}.{kind}", "runtime").parallelize(network, plan, mesh)
        initialise.materialise([network], plan, mesh, 0, source.weights)
    return network.eval().requires_grad_(False)


def _fill(network: Network, source: StoredModel, spec: ModelSpec, on: str | None) -> None:
    """Give the whole network storage on one device, and its weights."""
    allocate(network, torch.device(on or ("cuda" if torch.cuda.is_available() else "cpu")))
    originals, filled = dict(spec.tied), set()
    for name, parameter in network.named_parameters():
        logical = spec.parameters[originals.get(name, name)]
        if logical.name not in filled:
            ranges = tuple((0, size) for size in logical.shape)
            initialise.fill(parameter.detach(), logical, ranges, 0, {}, source.weights)
            filled.add(logical.name)


def without_groups(config: Config) -> Config:
    """`config` in which every sample is a routing group of its own; nothing changes for experts without a capacity."""
    router = replace(config.model.router, group_samples=1)
    return replace(config, model=replace(config.model, router=router))
