"""The results of one step, and which steps' times count."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from parallelrun.training.metrics.timing import StepTimes

FIRST_TIMED_STEP = 3  # steps 1 and 2 are slower: set-up, counting


@dataclass(frozen=True)
class StepRecord:
    """The results of one step. Times in seconds; step_time_s excludes evaluation and saving.

    times: None if another rank took the step. more: additional fields of its row in metrics.jsonl.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    applied: bool
    step_time_s: float
    time_s: float
    val_loss: float | None
    loss_scale: float
    times: StepTimes | None
    val_top1: float | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


def timed(records: Iterable[StepRecord], profiled: Container[int]) -> list[StepRecord]:
    """Return the steps whose times count; all steps if there is no such step. The profiler slows a step down."""
    return [r for r in records if r.step >= FIRST_TIMED_STEP and r.step not in profiled] or list(records)
