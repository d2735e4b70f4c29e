"""The product as a network of one column-parallel layer, and the entry point of the lesson that replaces training."""

from __future__ import annotations

import torch

from parallelrun.config.schema import Config
from parallelrun.mesh import build_mesh
from parallelrun.model_spec import ModelSpec
from parallelrun.models import layers
from parallelrun.models.matmul import lesson
from parallelrun.models.network import Network, assemble
from parallelrun.plan.structure import Plan
from parallelrun.precision import Precision


def build(config: Config, spec: ModelSpec, precision: Precision) -> Network:
    """A network whose one block multiplies by W."""
    dtype = getattr(torch, precision.compute)
    product = layers.ColumnLinear(config.model.inner, {"": config.model.columns}, False, dtype)
    return assemble(config, spec, precision, (product,))


def run(config: Config, plan: Plan, device: torch.device, show: bool) -> None:
    """Every rank multiplies its blocks; with `show` rank 0 prints what each held and sent."""
    lesson.run(plan, build_mesh(plan, device), show, plan.tensor.asked_form(config))
