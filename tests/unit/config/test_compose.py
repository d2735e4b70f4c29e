"""What is left out of a composition changes nothing, and what an earlier one has registered is forgotten."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from parallelrun.cli import argv
from parallelrun.config import compose
from parallelrun.config.schema.run_schema import Config
from tests.compositions import compose_as_ever


@pytest.fixture(autouse=True)
def as_ever(monkeypatch):
    """Hydra composes here as it does for users."""
    compose_as_ever(monkeypatch)


def composed(*words: str) -> compose.Composed:
    return compose.compose_once(compose.prepare(argv.read(["plan", *words]).overrides, (), "plan", False))[0]


@pytest.mark.parametrize(
    "words",
    [
        ("tp=2", "pp=2"),
        ("model=moe_gpt", "strategy=gshard", "dp=2", "model.router.top_k=1"),
        ("recipe=mixtral_8x7b", "optimizer=sgd", "optimizer.lr=0.1"),
    ],
)
def test_without_the_unused_groups_of_hydra_the_configuration_is_the_same(words, monkeypatch):
    quick = composed(*words)
    monkeypatch.setattr(compose, "_UNUSED", ())
    assert composed(*words) == quick and isinstance(quick.config, Config)


def test_hydra_s_own_groups_can_be_chosen():
    assert composed("hydra/launcher=basic", "tp=2").config.tp == 2
    assert composed("hydra.job.name=mine", "name='${hydra:job.name}'", "tp=2").config.name == "mine"


def test_a_recipe_of_an_earlier_command_is_forgotten():
    composed("recipe=quickstart")
    composed("tp=2")
    assert "recipe" not in compose.ConfigStore.instance().repo


def test_a_broken_cluster_of_the_users_own_spoils_no_other_command(tmp_path, monkeypatch, capsys):
    from parallelrun.cli.main import main

    monkeypatch.setenv("PARALLELRUN_CONFIG", str(tmp_path))
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "mine.yaml").write_text("name: mine\n  a: [")
    assert composed("tp=2").config.tp == 2
    assert main(["plan", "tp=2", "cluster=mine"]) == 2 and "mine.yaml:2" in capsys.readouterr().err


def test_the_users_own_primary_folder_is_not_shadowed(tmp_path, capsys):
    from parallelrun.cli.main import main

    for group, text in (("model", "name: gpt\nlayers: 2\n"), ("strategy", "name: ptdp\n")):
        (tmp_path / group).mkdir()
        (tmp_path / group / f"{'gpt' if group == 'model' else 'ptdp'}.yaml").write_text(text)
    (tmp_path / "config.yaml").write_text("defaults: [base_schema, model: gpt, strategy: ptdp, _self_]\ntp: 2\n")
    code = main(["plan", "--json", "--config-path", str(tmp_path)])
    out, err = capsys.readouterr()
    assert code == 0, err
    assert json.loads(out)["degrees"]["tp"] == 2 and json.loads(out)["model"]["layers"] == 2


@pytest.mark.parametrize("folder", ["cli", "config", "api"])
def test_no_internals_of_hydra_and_no_tricks(folder):
    """Composing uses documented interfaces alone: no patched function, no pickled node, no paused collector."""
    root = Path(compose.__file__).parents[1] / folder
    tricks = re.compile(r"defaults_list|omegaconf\._|^import (gc|pickle)$|__deepcopy__|_set_parent", re.MULTILINE)
    assert [path.name for path in sorted(root.rglob("*.py")) if tricks.search(path.read_text())] == []
