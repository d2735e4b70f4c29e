"""No file of the product is longer than 300 lines, and no function than 50."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.unit.definitions import definitions

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("parallelrun", "strategies", "benchmarks", ".ci", "docs")
FILE_LINES, FUNCTION_LINES = 300, 50


def longer(path: Path) -> list[str]:
    """What is too long in a file."""
    text = path.read_text()
    found = [f"{path}: {count} lines"] if (count := text.count("\n")) > FILE_LINES else []
    for node in definitions(text):
        if not isinstance(node, ast.ClassDef):
            count = (node.end_lineno or node.lineno) - node.lineno
            if count > FUNCTION_LINES:
                found.append(f"{path}:{node.lineno}: {node.name}: {count} lines")
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_file_and_no_function_is_too_long(folder: str) -> None:
    assert not [one for path in sorted((ROOT / folder).rglob("*.py")) for one in longer(path)]


def test_one_that_is_too_long_is_found(tmp_path: Path) -> None:
    path = tmp_path / "long.py"
    path.write_text("def f() -> None:\n" + "    pass\n" * (FUNCTION_LINES + 1) + "\n" * FILE_LINES)
    assert len(longer(path)) == 2
