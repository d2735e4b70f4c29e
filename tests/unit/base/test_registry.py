"""Names to modules: built-in names at once, plug-ins by the metadata of installed packages."""

from __future__ import annotations

import importlib.metadata
import sys

import pytest

from parallelrun.base import registry
from parallelrun.cli import errors


class Point:
    """An entry point of a package that somebody else has installed."""

    name, value = "data.theirs", "json"


@pytest.fixture
def installed(monkeypatch):
    """The groups whose entry points were asked for; each holds one plug-in."""
    asked: list[str] = []
    monkeypatch.setattr(registry, "_may_have_plug_ins", lambda: True)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: asked.append(group) or [Point])
    registry._plug_ins.cache_clear()
    yield asked
    registry._plug_ins.cache_clear()


def test_a_built_in_name_is_found_without_reading_any_metadata(installed):
    assert registry.has("strategies", "data.ddp") and registry.has("datasets", "pystdlib")
    assert registry.load("models", "gpt", "spec").__name__ == "parallelrun.models.gpt.spec"
    assert installed == []


def test_image_models_share_one_network_and_others_have_their_own():
    networks = {name: registry.path("models", name, "network") for name in registry.MODELS}
    for name in registry.IMAGE_MODELS:
        assert networks.pop(name) == "parallelrun.models.vision.network"
        assert registry.path("models", name, "spec") == f"parallelrun.models.{name}.spec"
    assert networks.pop("hf") == networks["module"]
    assert networks == {name: f"parallelrun.models.{name}.network" for name in networks}
    assert all(importlib.util.find_spec(path) for path in networks.values())


def test_a_plug_in_is_a_name_like_any_other_and_hides_none(installed, monkeypatch):
    assert registry.has("strategies", "data.theirs") and not registry.has("strategies", "data.nobodys")
    assert registry.load("strategies", "data.theirs").__name__ == "json"
    monkeypatch.setattr(Point, "name", "data.ddp")
    registry._plug_ins.cache_clear()
    assert registry.names("strategies")["data.ddp"] == "parallelrun.strategies.data.ddp"
    assert registry.load("strategies", "data.ddp").__name__ == "parallelrun.strategies.data.ddp"
    with pytest.raises(KeyError):
        registry.load("strategies", "data.nobodys")
    assert installed == ["parallelrun.strategies"] * 2  # each cleared cache asks once


def test_a_data_strategy_without_modules_of_its_own_has_the_buckets_and_their_rule(installed):
    common = "parallelrun.strategies.data.common"
    assert registry.path("strategies", "data.ddp", "runtime") == f"{common}.reducer"
    assert registry.path("strategies", "data.ring", "reference") == f"{common}.compression.reference"
    assert registry.path("strategies", "data.ring", "runtime") == "parallelrun.strategies.data.ring.runtime"
    assert registry.path("strategies", "tensor.megatron", "runtime").endswith("megatron.runtime")
    assert registry.path("strategies", "data.theirs", "runtime") == "json.runtime"  # a plug-in names its own


@pytest.mark.parametrize("folder", ["theirs-1.0.dist-info", "theirs.egg-info"])
def test_a_plug_in_in_any_folder_of_the_path_is_found(folder, tmp_path, monkeypatch):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / ("METADATA" if "dist" in folder else "PKG-INFO")).write_text("Name: theirs\nVersion: 1.0\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    registry._plug_ins.cache_clear()
    assert not registry._may_have_plug_ins() and not registry.has("datasets", "theirs")
    (tmp_path / folder / "entry_points.txt").write_text("[parallelrun.datasets]\ntheirs = json\n")
    registry._plug_ins.cache_clear()
    try:
        assert registry.has("datasets", "theirs") and registry.names("datasets")["theirs"] == "json"
    finally:
        registry._plug_ins.cache_clear()


def test_an_archive_or_a_finder_on_the_path_may_hold_plug_ins(tmp_path, monkeypatch):
    class Finder:
        def find_distributions(self, context: object = None) -> list[object]:
            return []

    assert not registry._may_have_plug_ins()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "meta_path", [*sys.meta_path, Finder()])
        assert registry._may_have_plug_ins()
    (tmp_path / "theirs.zip").write_bytes(b"")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "theirs.zip")])
    assert registry._may_have_plug_ins()


def test_why_a_plug_in_cannot_be_imported_is_told(installed, monkeypatch, tmp_path):
    (tmp_path / "their_package.py").write_text("import json\nimport nosuch_library\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Point, "value", "their_package")
    with pytest.raises(registry.PlugInFailed) as raised:
        registry.load("strategies", "data.theirs")
    told = errors.translate(raised.value)
    assert told is not None and told.exit_code == 3
    (problem,) = told.problems
    assert problem.what == (
        "the plug-in data.theirs of parallelrun.strategies (their_package) cannot be imported: "
        "ModuleNotFoundError: No module named 'nosuch_library'"
    )
    assert problem.where == "their_package.py:2 in <module>: import nosuch_library"
