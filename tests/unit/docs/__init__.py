"""Tests of what docs/*.py generate."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).parents[3] / "docs"


def docs_module(name: str) -> ModuleType:
    """Import docs/<name>.py, which is in no package."""
    source = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert source is not None and source.loader is not None
    module = importlib.util.module_from_spec(source)
    sys.modules[f"docs_{name}"] = module  # dataclasses look their module up
    source.loader.exec_module(module)
    return module
