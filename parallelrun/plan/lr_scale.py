"""`optimizer.lr_scale=linear`: the learning rate times the number of data replicas (Goyal et al. 2017; Horovod's own
examples). Torch-free. The one-device reference keeps the number: it is a setting of the optimizer, not of the way."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

from parallelrun.config.schema import Config
from parallelrun.errors import Problem
from parallelrun.plan.structure import Plan

KEY = "optimizer.lr_scale"
LINEAR = "linear"


def check(config: Config) -> list[Problem]:
    """A number above 0, or `linear`."""
    scale = config.optimizer.lr_scale
    number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    if scale is None or scale == LINEAR or (number and isfinite(scale) and scale > 0):
        return []
    return [Problem(f"{KEY}={scale} is neither {LINEAR} nor a finite number above 0", KEY, f"{KEY}={LINEAR}")]


def number(config: Config, num_replicas: int) -> float | None:
    """The scale as a number; None where there is none."""
    scale = config.optimizer.lr_scale
    return float(num_replicas) if scale == LINEAR else scale


def numbered(config: Config, plan: Plan) -> Config:
    """`config` with the scale as a number under `plan`."""
    return replace(config, optimizer=replace(config.optimizer, lr_scale=number(config, plan.mesh.size("dp"))))


def filled(config: Config, num_replicas: int) -> tuple[str, ...]:
    """The sentence on a scale that follows from the plan."""
    if config.optimizer.lr_scale != LINEAR:
        return ()
    return (f"lr_scale={num_replicas} (filled: {LINEAR}, dp {num_replicas})",)
