"""Dynamic loss scale for fp16 (Micikevicius et al. 2018, section 3.2). Torch-free.

Gradients too small for fp16 survive because the loss is multiplied before backward. A scale too large overflows,
which shows as a non-finite gradient norm, the same number on every rank, so all ranks skip the step together.
"""

from __future__ import annotations

from typing import Any

from parallelrun.config.schema import PrecisionConfig

SMALLEST = 1.0
LARGEST = 2.0**24


class LossScaler:
    """`scale` multiplies the loss. Unless `scaled`, it is 1 for ever.

    After an overflow the scale halves; after `scale_window` applied steps in a row it doubles.
    """

    def __init__(self, precision: PrecisionConfig, scaled: bool):
        self.scaled = scaled
        self.scale = float(precision.loss_scale) if scaled else 1.0
        self._window = precision.scale_window
        self._applied_in_a_row = 0

    def update(self, applied: bool) -> None:
        """Learn from a step: `applied` is what all ranks agreed on."""
        if not self.scaled:
            return
        if not applied:
            self.scale = max(SMALLEST, self.scale * 0.5)
            self._applied_in_a_row = 0
            return
        self._applied_in_a_row += 1
        if self._applied_in_a_row == self._window:
            self.scale = min(LARGEST, self.scale * 2.0)
            self._applied_in_a_row = 0

    def state(self) -> dict[str, Any]:
        """For a checkpoint; JSON-ready."""
        return {"scale": self.scale, "applied_in_a_row": self._applied_in_a_row}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state`. A run that does not scale keeps 1, whatever precision the checkpoint had."""
        if self.scaled and state["scale"] > SMALLEST:
            self.scale = float(state["scale"])
            self._applied_in_a_row = int(state["applied_in_a_row"])
