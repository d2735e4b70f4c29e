"""Optional trackers in addition to metrics.jsonl. Only rank 0 has one."""

from __future__ import annotations

from typing import Any

from parallelrun.context import WorkerContext
from parallelrun.packages import require


class TensorBoard:
    """Scalars under `<run>/tensorboard`."""

    def __init__(self, context: WorkerContext):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(context.directory / "tensorboard"))

    def log(self, step: int, row: dict[str, Any]) -> None:
        """Record the numbers of one step."""
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


_TRACKERS = {"tensorboard": TensorBoard}


def check(name: str) -> None:
    """Raise EnvironmentProblem if the tracker's package is not installed."""
    if name in _TRACKERS:
        require(name, f"tracker={name}", "tracker", "tracker=none")


def open_tracker(name: str, context: WorkerContext) -> TensorBoard | None:
    """Return the tracker of that name, or None for `none`. Raises the error of `check`."""
    check(name)
    return _TRACKERS[name](context) if name in _TRACKERS else None
