"""Optional trackers beside metrics.jsonl: only rank 0 has one."""

from __future__ import annotations

from typing import Any, Protocol

from parallelrun.errors import ConfigError, EnvironmentProblem, Problem
from parallelrun.launch.context import WorkerContext


class Tracker(Protocol):
    def log(self, step: int, row: dict[str, Any]) -> None:
        """Record the numbers of one step."""

    def close(self) -> None: ...


class TensorBoard:
    """Scalars under `<run>/tensorboard`. Raises EnvironmentProblem if the package is missing."""

    def __init__(self, context: WorkerContext):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise EnvironmentProblem(
                Problem(
                    "tracker=tensorboard needs the tensorboard package", command="pip install parallelrun[tensorboard]"
                )
            ) from error
        self._writer = SummaryWriter(str(context.directory / "tensorboard"))

    def log(self, step: int, row: dict[str, Any]) -> None:
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


def open_tracker(name: str, context: WorkerContext) -> Tracker | None:
    """The tracker of that name, or None for `none`. Raises ConfigError for an unknown one."""
    if name == "none":
        return None
    if name == "tensorboard":
        return TensorBoard(context)
    raise ConfigError(Problem(f"tracker={name} is not known", where="tracker", suggestion="none, tensorboard"))
