"""One name means one thing: class names are unique, and words that the field does not use name nothing."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

from tests.unit.definitions import Definition
from tests.unit.definitions import definitions as in_text

ROOT = Path(__file__).resolve().parents[2]
# Words of older code that readers had to learn; CONTRIBUTING.md says which word stands for each.
RETIRED = {
    "way",
    "settle",
    "settled",
    "foretell",
    "foretold",
    "desk",
    "scribe",
    "voice",
    "alone",
    "parcel",
}


@cache
def definitions() -> list[tuple[str, Definition]]:
    """Every class and function of the product, with its file."""
    found = []
    for folder in ("parallelrun", "strategies"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            file = path.relative_to(ROOT).as_posix()
            found += [(file, node) for node in in_text(path.read_text())]
    return found


def words(name: str) -> set[str]:
    """`BoundaryShape` and `boundary_shape` -> {boundary, shape}."""
    spaced = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)
    return set(spaced.strip("_").split("_"))


def test_class_names_are_unique():
    files = defaultdict(set)
    for file, node in definitions():
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            files[node.name].add(file)
    assert {name: found for name, found in files.items() if len(found) > 1} == {}


def test_no_class_or_function_has_a_retired_word_in_its_name():
    assert [f"{file}: {node.name}" for file, node in definitions() if words(node.name) & RETIRED] == []
