"""The product as a network of one column layer; `lesson.py` is what `parallelrun model=matmul` runs."""

from __future__ import annotations

import torch

from parallelrun.config.schema import Config
from parallelrun.model_spec import ModelSpec
from parallelrun.models import layers
from parallelrun.models.network import Network, store
from parallelrun.precision import Precision


def build(config: Config, spec: ModelSpec, precision: Precision) -> Network:
    """A network whose one block multiplies by W."""
    network = Network(spec, layers.TokenLoss())
    dtype = getattr(torch, precision.compute)
    network.product = layers.Columns(config.model.inner, {"": config.model.columns}, False, dtype)
    store(network, precision.stored)
    return network
