"""A step's learning rate: linear warm-up, then cosine (Loshchilov & Hutter 2017), linear or constant. Torch-free."""

from __future__ import annotations

from math import cos, pi

from parallelrun.config.schema import OptimizerConfig
from parallelrun.errors import ConfigError, Problem

KINDS = ("cosine", "linear", "constant")


def learning_rate(optimizer: OptimizerConfig, step: int, steps: int) -> float:
    """Rate of step `step` (from 1) of `steps`.

    Warm-up reaches `lr` at step `warmup`, in equal rises from lr / warmup. Then cosine and linear go down to
    `min_lr_ratio` x lr, which is the rate of the last step. `lr_scale` multiplies all of it. Raises ConfigError.
    """
    assert not isinstance(optimizer.lr_scale, str), "`lr_scale.numbered` comes before"
    peak = optimizer.lr * (1.0 if optimizer.lr_scale is None else optimizer.lr_scale)
    if step < optimizer.warmup:
        return peak * step / optimizer.warmup
    if optimizer.schedule == "constant":
        return peak
    progress = min(1.0, (step - optimizer.warmup) / max(1, steps - optimizer.warmup))
    if optimizer.schedule == "cosine":
        left = 0.5 * (1.0 + cos(pi * progress))
    elif optimizer.schedule == "linear":
        left = 1.0 - progress
    else:
        raise ConfigError(
            Problem(
                f"unknown optimizer.schedule={optimizer.schedule}",
                "optimizer.schedule",
                " or ".join(f"optimizer.schedule={kind}" for kind in KINDS),
            )
        )
    floor = optimizer.min_lr_ratio
    return peak * (floor + (1.0 - floor) * left)
