"""docs/tensor_parallel.md shows what the code does: its pictures and tables are what docs/layouts.py draws today."""

from __future__ import annotations

import re
from functools import cache
from types import ModuleType

import pytest

from tests.unit.docs import DOCS, docs_module


@pytest.fixture(scope="module")
def layouts() -> ModuleType:
    module = docs_module("layouts")
    module.draw = cache(module.draw)
    return module


@pytest.mark.slow
def test_pictures_and_tables_are_up_to_date(layouts: ModuleType) -> None:
    for path, content in layouts.files().items():
        assert path.read_text() == content, f"run `python docs/layouts.py`: {path.name} shows an older layout"


def test_every_picture_is_shown_and_every_one_shown_exists(layouts: ModuleType) -> None:
    shown = set(re.findall(r"\(layouts/(\w+)\.svg\)", (DOCS / "tensor_parallel.md").read_text()))
    assert shown == {picture.name for picture in layouts.PICTURES} == {p.stem for p in (DOCS / "layouts").glob("*.svg")}


def test_a_picture_covers_each_matrix_with_the_blocks_of_all_ranks(layouts: ModuleType) -> None:
    for picture in layouts.PICTURES:
        drawn = layouts.draw(picture)
        found = re.findall(r">([\d,–]+)</text>", drawn)
        numbers = {int(number) for text in found for number in re.split("[,–]", text)}
        assert 0 in numbers and max(numbers) == picture.mesh.num_ranks - 1
