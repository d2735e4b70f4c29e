"""Check for optional packages without importing them, before any rank starts."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from parallelrun.base.errors import EnvironmentProblem, Problem

_PIP_NAMES = {"PIL": "pillow", "sklearn": "scikit-learn"}  # where the name for pip differs from the module's


def require(module: str, option: str, where: str, suggestion: str = "", extra: str = "") -> Path:
    """Return the folder of a package that `option` needs. Raises EnvironmentProblem (with the fix) if it is absent.

    extra: the extra of parallelrun that installs it.
    """
    spec = find_spec(module)
    if spec is None or not spec.origin:
        name = _PIP_NAMES.get(module, module)
        message = f"{option} needs the package {name}, which is not installed"
        wanted = f"'parallelrun[{extra}]'" if extra else name
        raise EnvironmentProblem(Problem(message, where, suggestion, f"pip install {wanted}"))
    return Path(spec.origin).parent
