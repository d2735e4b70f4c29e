"""The network of `spec.py`'s architecture."""

from __future__ import annotations

from parallelrun.config.schema import Config
from parallelrun.model_spec import ModelSpec
from parallelrun.models.network import Network
from parallelrun.models.vision.network import assemble
from parallelrun.precision import Precision

from .spec import architecture


def build(config: Config, spec: ModelSpec, precision: Precision) -> Network:
    """The whole network, its parameters uninitialised: call it under `torch.device("meta")` and keep your blocks."""
    return assemble(architecture(config, spec.sample_shape[1], spec.vocab), config, spec, precision)
