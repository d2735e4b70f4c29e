"""Optional trackers beside metrics.jsonl: only rank 0 has one."""

from __future__ import annotations

from typing import Any, Protocol

from parallelrun.context import WorkerContext
from parallelrun.errors import ConfigError, Problem
from parallelrun.packages import require


class Tracker(Protocol):
    def log(self, step: int, row: dict[str, Any]) -> None:
        """Record the numbers of one step."""

    def close(self) -> None: ...


class TensorBoard:
    """Scalars under `<run>/tensorboard`."""

    def __init__(self, context: WorkerContext):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(context.directory / "tensorboard"))

    def log(self, step: int, row: dict[str, Any]) -> None:
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


_TRACKERS = {"tensorboard": TensorBoard}


def check(name: str) -> None:
    """Whether a run can use that tracker. Raises ConfigError for an unknown one, EnvironmentProblem for a package that
    is not installed."""
    if name in _TRACKERS:
        require(name, f"tracker={name}", "tracker", "tracker=none")
    elif name != "none":
        known = ", ".join(("none", *_TRACKERS))
        raise ConfigError(Problem(f"tracker={name} is not known", where="tracker", suggestion=known))


def open_tracker(name: str, context: WorkerContext) -> Tracker | None:
    """The tracker of that name, or None for `none`. Raises what `check` raises."""
    check(name)
    return _TRACKERS[name](context) if name in _TRACKERS else None
