"""The learning rate and the fp16 loss scale of each step."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, cos, pi, sqrt
from typing import Any

from parallelrun.config.schema.run_schema import OptimizerConfig, PrecisionConfig

DECAY: dict[str, Callable[[float], float]] = {  # the fraction of (peak - floor) that is left, by progress in [0, 1]
    "cosine": lambda progress: 0.5 * (1.0 + cos(pi * progress)),
    "linear": lambda progress: 1.0 - progress,
    "wsd": lambda progress: 1.0 - progress,
    "constant": lambda progress: 1.0,
}
SMALLEST = 1.0
LARGEST = 2.0**24


def learning_rate(optimizer: OptimizerConfig, step: int, steps: int) -> float:
    """Return the learning rate of step `step` (from 1) of `steps`.

    It rises linearly from lr / warmup to `lr` at step `warmup`. It then falls along a cosine (Loshchilov & Hutter 2017)
    or a line to `min_lr_ratio` x lr, in `decay_steps` steps or at the last one; under wsd (warmup, stable, decay; Hu et
    al. 2024) along a line in the last `decay_steps`, a tenth of the run; under inverse_sqrt (Vaswani et al. 2017) as
    1 / sqrt(step); or stays constant. `lr_scale` multiplies all of it.
    """
    assert not isinstance(optimizer.lr_scale, str), "call `with_lr_scale` first"
    peak = optimizer.lr * (1.0 if optimizer.lr_scale is None else optimizer.lr_scale)
    if step < optimizer.warmup:
        return peak * step / optimizer.warmup
    floor, left = optimizer.min_lr_ratio, max(1, steps - optimizer.warmup)
    if optimizer.schedule == "inverse_sqrt":
        return peak * max(floor, sqrt(max(1, optimizer.warmup) / step))
    length, start = optimizer.decay_steps or left, optimizer.warmup
    if optimizer.schedule == "wsd":
        length = min(left, optimizer.decay_steps or ceil(steps / 10))
        start = max(start, steps - length)
    progress = min(1.0, max(0, step - start) / length)
    return peak * (floor + (1.0 - floor) * DECAY[optimizer.schedule](progress))


class LossScaler:
    """Dynamic loss scaling for fp16 (Micikevicius et al. 2018, section 3.2). Without `scaled`, `scale` stays 1.

    The loss is multiplied by `scale` before backward, so that small gradients do not underflow in fp16. If the scale is
    too large, the gradient norm, which is the same on every rank, is not finite: all ranks skip the step and halve the
    scale. After `scale_window` applied steps in a row it doubles.
    """

    def __init__(self, precision: PrecisionConfig, scaled: bool):
        self.scaled = scaled
        self.scale = float(precision.loss_scale) if scaled else 1.0
        self._window = precision.scale_window
        self._applied_in_a_row = 0

    def update(self, applied: bool) -> None:
        """Adapt the scale after a step. applied: whether the ranks updated the weights."""
        if not self.scaled:
            return
        self._applied_in_a_row = self._applied_in_a_row + 1 if applied else 0
        if not applied:
            self.scale = max(SMALLEST, self.scale * 0.5)
        elif self._applied_in_a_row == self._window:
            self.scale = min(LARGEST, self.scale * 2.0)
            self._applied_in_a_row = 0

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, JSON-ready."""
        return {"scale": self.scale, "applied_in_a_row": self._applied_in_a_row}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state`. A run without loss scaling keeps 1, whatever precision the checkpoint had."""
        if self.scaled and state["scale"] > SMALLEST:
            self.scale = float(state["scale"])
            self._applied_in_a_row = int(state["applied_in_a_row"])
