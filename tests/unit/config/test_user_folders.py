"""The folders of configuration that a user adds: named on the command line, or by a plug-in of Hydra's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from parallelrun.config import presets, user_folders

PLUG_IN = """
from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

class TheirPath(SearchPathPlugin):
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("theirs", "pkg://theirs.conf")
"""


@pytest.fixture
def theirs(tmp_path, monkeypatch) -> Path:
    """A package with presets and a group of its own; it is on the path of Python."""
    files = {
        "site/theirs/__init__.py": "",
        "site/theirs/conf/__init__.py": "",
        "site/theirs/conf/model/small.yaml": "name: gpt\nlayers: 2\nhidden: 16\nheads: 2\n",
        "site/theirs/conf/experiment/wide.yaml": "# @package _global_\ndefaults:\n  - override /model: small\ntp: 2\n",
        "own.d/dataset/mine.yaml": "name: synthetic\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "site")
    return tmp_path


def test_folders_of_the_command_line_are_found_in_hydras_order(theirs):
    conf = theirs / "site" / "theirs" / "conf"
    for entry in ("pkg://theirs.conf", f"file://{conf}", str(conf), f"'file://{conf}'"):
        words = ["plan", f"hydra.searchpath=[{entry}, file:///nowhere]", "--config-dir", "own.d"]
        assert user_folders.folders(words) == [Path("own.d"), conf]
        assert presets.user_groups(words) == {"experiment"}
        assert presets.user_options(words, "model") == ["small"] and presets.user_options(words, "dataset") == ["mine"]
        assert presets.user_keys(words, "experiment") == {"experiment=wide": frozenset({"model", "tp"})}
    assert user_folders.folders(["hydra.searchpath=[pkg://no.such.package]"]) == []


def test_the_groups_of_a_search_path_plug_in_compose_like_ours(theirs):
    (theirs / "site" / "hydra_plugins").mkdir()  # a namespace: no __init__.py
    (theirs / "site" / "hydra_plugins" / "their_path.py").write_text(PLUG_IN)
    environment = {**os.environ, "PYTHONPATH": str(theirs / "site")}
    command = [sys.executable, "-m", "parallelrun", "plan", "--json", "experiment=wide"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert (plan["model"]["layers"], plan["degrees"]["tp"]) == (2, 2)
