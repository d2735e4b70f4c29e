"""The places of a training step at which silent data corruption is looked for. This class looks for nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from parallelrun.training.loop.build import Training


class CorruptionWatch:
    """Hooks that the training loop calls. This class checks nothing; `watch_of` returns the one that a run asks for."""

    @contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        """Around a training step. After it nothing writes to the weights until the next update."""
        yield

    def before_update(self, training: Training) -> None:
        """Called with the final gradients of a step."""

    def check(self, step: int, *, saves: bool, finite: bool = True) -> int:
        """Return the step after which training continues: `step`, or an earlier one to whose state it has returned.

        Called on all ranks after each step. saves: the state is about to be saved; finite: whether loss and gradients
        are, or may overflow. Collective. Raises CorruptionError on all ranks.
        """
        return step

    def facts(self) -> dict[str, Any]:
        """Return the fields of summary.json."""
        return {}
