"""A trained model on one device, ready to compute."""

from __future__ import annotations

from dataclasses import replace

import torch

from parallelrun import registry
from parallelrun.config.schema import Config
from parallelrun.exchange.source import StoredModel
from parallelrun.model_spec import ModelSpec
from parallelrun.models import initialise
from parallelrun.models.network import Network, allocate
from parallelrun.precision import TABLE


def loaded(source: StoredModel, config: Config, spec: ModelSpec) -> Network:
    """The network of `config` and `spec` with the weights of `source`, in evaluation, on a GPU if there is one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.device("meta"):
        network: Network = registry.load("models", config.model.name, "network").build(
            config, spec, TABLE[config.precision.name]
        )
    allocate(network, device)
    originals, filled = dict(spec.tied), set()
    for name, parameter in network.named_parameters():
        one = spec.parameters[originals.get(name, name)]
        if one.name not in filled:
            ranges = tuple((0, size) for size in one.shape)
            initialise.fill(parameter.detach(), one, ranges, 0, {}, source.weights)
            filled.add(one.name)
    return network.eval().requires_grad_(False)


def without_groups(config: Config) -> Config:
    """`config` in which every sample is a routing group of its own; nothing changes for experts without a capacity."""
    router = replace(config.model.router, group_samples=1)
    return replace(config, model=replace(config.model, router=router))
