"""parallelrun: a declarative experiment runner for distributed training.

From Python: `import parallelrun as pr`, then `pr.plan`, `pr.run`, `pr.verify`, `pr.bench`, `pr.sweep`, `pr.search`,
`pr.load`, `pr.runs` and `pr.compare` (docs/python.md). Importing the package loads none of them, nor torch or Hydra.
"""

from parallelrun.base.version import __version__ as __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from parallelrun.api import bench as bench
    from parallelrun.api import compare as compare
    from parallelrun.api import load as load
    from parallelrun.api import plan as plan
    from parallelrun.api import run as run
    from parallelrun.api import runs as runs
    from parallelrun.api import search as search
    from parallelrun.api import sweep as sweep
    from parallelrun.api import verify as verify
    from parallelrun.api.results import ComparedRuns as ComparedRuns
    from parallelrun.api.results import PlannedRun as PlannedRun
    from parallelrun.api.results import Run as Run
    from parallelrun.api.results import SweepPoint as SweepPoint
    from parallelrun.base.errors import CheckpointError as CheckpointError
    from parallelrun.base.errors import ConfigError as ConfigError
    from parallelrun.base.errors import EnvironmentProblem as EnvironmentProblem
    from parallelrun.base.errors import ParallelrunError as ParallelrunError
    from parallelrun.base.errors import Problem as Problem
    from parallelrun.base.errors import RunFailed as RunFailed

_MODULES = {
    "parallelrun.api": ("bench", "compare", "load", "plan", "run", "runs", "search", "sweep", "verify"),
    "parallelrun.api.results": ("ComparedRuns", "PlannedRun", "Run", "SweepPoint"),
    "parallelrun.base.errors": (
        "CheckpointError", "ConfigError", "EnvironmentProblem", "ParallelrunError", "Problem", "RunFailed",
    ),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(("__version__", *_MODULE_OF))


def __getattr__(name: str) -> "Any":
    """Import a name of the Python API when it is first used."""
    from importlib import import_module

    if name not in _MODULE_OF:
        raise AttributeError(f"module 'parallelrun' has no attribute {name!r}")
    found = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
