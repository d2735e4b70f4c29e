"""Packages that only some options need: looked for before a rank is started, without importing them. Torch-free."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from parallelrun.errors import EnvironmentProblem, Problem

# module -> the name by which pip installs it
_PIP_NAMES = {"PIL": "pillow", "sklearn": "scikit-learn"}


def require(module: str, option: str, where: str, suggestion: str = "") -> Path:
    """The folder of a package that `option` needs. Raises EnvironmentProblem with the pip command if it is absent."""
    found = find_spec(module)
    if found is None or not found.origin:
        name = _PIP_NAMES.get(module, module)
        what = f"{option} needs the package {name}, which is not installed"
        raise EnvironmentProblem(Problem(what, where, suggestion, f"pip install {name}"))
    return Path(found.origin).parent
