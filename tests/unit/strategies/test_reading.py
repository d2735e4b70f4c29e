"""A strategy can be read alone: few files and lines of the strategies' folder explain what its ranks do."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallelrun.base import registry

ROOT = Path(__file__).parents[3] / "strategies"
MOST_FILES, MOST_LINES = 4, 600


def imported(file: Path) -> Iterator[Path]:
    """The files of the strategies' folder that a file imports: relative imports, as all are."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = file.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            names = [folder.with_suffix(".py")] if node.module else []
            yield from (
                path for path in [*names, *(folder / f"{alias.name}.py" for alias in node.names)] if path.exists()
            )


def closure(file: Path) -> set[Path]:
    """A file and everything in the strategies' folder that it imports, directly or not."""
    found: set[Path] = set()
    waiting = [file]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += imported(one)
    return found


@pytest.mark.parametrize("kind", ["ddp", "zero1", "fsdp", "ring"])
def test_a_runtime_is_explained_by_few_files(kind):
    module = registry.path("strategies", f"data.{kind}", "runtime")
    files = closure(ROOT.joinpath(*module.split(".")[2:]).with_suffix(".py"))
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    assert len(files) <= MOST_FILES and lines <= MOST_LINES, sorted(map(str, files))


def test_the_closure_follows_every_import():
    files = {str(file.relative_to(ROOT)) for file in closure(ROOT / "data" / "ring" / "runtime.py")}
    assert {"data/ring/runtime.py", "data/common/reducer.py", "data/common/allreduce/runtime.py"} <= files
    assert not any("parallelrun.strategies" in file.read_text(encoding="utf-8") for file in ROOT.rglob("*.py"))
