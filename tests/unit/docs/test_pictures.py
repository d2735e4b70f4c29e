"""Every documented picture is what its files and today's code draw, and no text in it is cut or covered."""

from __future__ import annotations

import importlib.util
import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
DOCS, RESULTS = ROOT / "docs", ROOT / "benchmarks" / "results"
SVG = "{http://www.w3.org/2000/svg}"
CHARACTER = 0.56  # of the font's size: the mean width of a sans-serif character, measured on DejaVu Sans
DRAWN = sorted(path for folder in (DOCS, RESULTS) for path in folder.rglob("*.svg") if path.name != "run.svg")


def docs_module(name: str) -> ModuleType:
    source = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert source is not None and source.loader is not None
    module = importlib.util.module_from_spec(source)
    sys.modules[f"docs_{name}"] = module
    source.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["picture", "data_axis"])
def test_a_picture_of_the_docs_is_what_its_files_give_today(name):
    module = docs_module(name)
    assert module.PICTURE.read_text() == module.draw(), f"run `python docs/{name}.py`"


def test_the_picture_of_the_crossover_is_what_its_numbers_give_today():
    from benchmarks import crossover

    for numbers in RESULTS.glob("*-crossover.csv"):
        facts = json.loads(numbers.with_suffix(".json").read_text())["environment"]
        drawn = crossover.picture(crossover.read_back(numbers), facts)
        assert numbers.with_suffix(".svg").read_text() == drawn, numbers


def test_the_picture_of_routing_is_what_its_numbers_give_today():
    from benchmarks import routing_balance

    for numbers in RESULTS.glob("*-routing_balance.json"):
        document = json.loads(numbers.read_text())
        drawn = routing_balance.picture(document["rows"], document["environment"])
        assert numbers.with_suffix(".svg").read_text() == drawn, numbers


def boxes(root: ElementTree.Element) -> list[tuple[float, float, float, str]]:
    """(baseline, left, right, text) of every text, by the mean width of characters."""
    found = []
    for node in root.iter(f"{SVG}text"):
        text = "".join(node.itertext())
        size = float(node.get("font-size") or root.get("font-size") or 12)
        width = len(text) * size * CHARACTER
        start = {"middle": width / 2, "end": width}.get(node.get("text-anchor") or "", 0.0)
        left = float(node.get("x") or 0) - start
        found.append((float(node.get("y") or 0), left, left + width, text))
    return found


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.name)
def test_no_text_of_a_picture_is_cut_or_covered(path):
    root = ElementTree.fromstring(path.read_text())
    width = float(root.get("width") or 0)
    found = boxes(root)
    for _, left, right, text in found:
        assert left >= -2 and right <= width + 2, f"{text!r} leaves the picture"
    covers = [
        (float(node.get("x") or 0), float(node.get("y") or 0), float(node.get("width") or 0))
        for node in root.iter(f"{SVG}rect")
        if node.get("height") in ("10", "14")  # the squares of legends
    ]
    for baseline, left, right, text in found:
        for x, y, side in covers:
            assert not (y - 2 < baseline - 4 < y + 16 and left < x + side and x < right), f"{text!r} is covered"
        beside = [other for other in found if other[0] == baseline and other[1:] != (left, right, text)]
        assert all(right <= other[1] + 2 or other[2] <= left + 2 for other in beside), f"{text!r} overlaps another"


def test_every_picture_is_checked():
    assert {"25d.svg", "data_axis.svg", "2026-11-21-crossover.svg"} <= {path.name for path in DRAWN}
