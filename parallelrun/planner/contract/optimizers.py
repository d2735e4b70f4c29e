"""Facts about each optimizer without torch: the keys it reads, the state it keeps, and the learning-rate scale.

`optimizer.lr_scale=linear` multiplies the learning rate by the number of data replicas (Goyal et al. 2017; Horovod's
examples). The single-device reference keeps the resulting number: it is a setting of the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isfinite

from parallelrun.base.errors import Problem
from parallelrun.config.schema.run_schema import Config, OptimizerConfig
from parallelrun.planner.contract.plan import Plan

LR_SCALE = "optimizer.lr_scale"
LINEAR = "linear"


@dataclass(frozen=True)
class OptimizerKind:
    """own_keys: the keys of `optimizer` that not every optimizer reads. num_states: state tensors per weight.
    state_names: torch's names of the state of one weight."""

    own_keys: tuple[str, ...]
    state_names: frozenset[str]
    num_states: Callable[[OptimizerConfig], int]


OPTIMIZERS = {
    "adamw": OptimizerKind(("betas", "eps"), frozenset({"step", "exp_avg", "exp_avg_sq"}), lambda config: 2),
    "sgd": OptimizerKind(("momentum",), frozenset({"momentum_buffer"}), lambda config: int(config.momentum > 0)),
    "adagrad": OptimizerKind(("eps",), frozenset({"step", "sum"}), lambda config: 1),
}


def readers(key: str) -> str:
    """The optimizers that read a key, as a user types them: `optimizer=adamw or optimizer=adagrad`."""
    return " or ".join(f"optimizer={name}" for name, kind in OPTIMIZERS.items() if key in kind.own_keys)


def check_lr_scale(config: Config) -> list[Problem]:
    """Check that the scale is a number above 0, `linear`, or unset."""
    scale = config.optimizer.lr_scale
    is_number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    if scale is None or scale == LINEAR or (is_number and isfinite(scale) and scale > 0):
        return []
    message = f"{LR_SCALE}={scale} is neither {LINEAR} nor a finite number above 0"
    return [Problem(message, LR_SCALE, f"{LR_SCALE}={LINEAR}")]


def with_lr_scale(config: Config, plan: Plan) -> Config:
    """`config` with the scale as a number under `plan`."""
    if config.optimizer.lr_scale != LINEAR:
        return config
    return replace(config, optimizer=replace(config.optimizer, lr_scale=float(plan.mesh.size("dp"))))


def filled_lr_scale(config: Config, num_replicas: int) -> tuple[str, ...]:
    """The sentence that reports a scale computed from the plan; empty otherwise."""
    if config.optimizer.lr_scale != LINEAR:
        return ()
    return (f"lr_scale={num_replicas} (filled: {LINEAR}, dp {num_replicas})",)
