"""Names to modules: built-in names at once, plug-ins by the metadata of installed packages."""

from __future__ import annotations

import importlib.metadata

import pytest

from parallelrun import registry


class Point:
    """An entry point of a package that somebody else has installed."""

    name, value = "data.theirs", "json"


@pytest.fixture
def installed(monkeypatch):
    """The groups whose entry points were asked for; each holds one plug-in."""
    asked: list[str] = []
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: asked.append(group) or [Point])
    registry._plug_ins.cache_clear()
    yield asked
    registry._plug_ins.cache_clear()


def test_a_built_in_name_is_found_without_reading_any_metadata(installed):
    assert registry.has("strategies", "data.ddp") and registry.has("datasets", "pystdlib")
    assert registry.load("models", "gpt", "spec").__name__ == "parallelrun.models.gpt.spec"
    assert installed == []


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
