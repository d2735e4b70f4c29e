"""Hydra's copies of the schema and the built-in files are those that it would make itself, and share nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import ValidationError

from parallelrun.cli import argv
from parallelrun.config import compose, presets, source
from parallelrun.config.schema.run_schema import Config
from parallelrun.config.schema.strategy_keys import complete_class
from tests.compositions import compose_as_ever


@pytest.fixture(autouse=True)
def as_ever(monkeypatch):
    """Hydra composes here as it does for users."""
    compose_as_ever(monkeypatch)


def composed(*words: str) -> compose.Composed:
    return compose.compose_once(compose.prepare(argv.read(["plan", *words]).overrides, (), "plan", False))[0]


def test_the_schema_is_the_structured_config_of_its_class():
    copied, made = source._schema(), OmegaConf.structured(complete_class())
    assert copied == made and OmegaConf.get_type(copied) is complete_class()
    assert OmegaConf.to_object(copied) == OmegaConf.to_object(made)
    assert copied._metadata == made._metadata and copied.strategy.data._metadata == made.strategy.data._metadata
    assert copied._get_node("tp")._metadata == made._get_node("tp")._metadata
    with pytest.raises(ValidationError):
        copied.tp = "two"


def test_a_change_of_one_copy_changes_no_other():
    first, second = source._schema(), source._schema()
    first.tp, first.model.layers, first.optimizer.betas[0] = 7, 3, 0.5
    assert (second.tp, second.model.layers, second.optimizer.betas[0]) == (None, 8, 0.9)
    gpt = source._parsed("model/gpt")
    gpt.name = "other"
    assert source._parsed("model/gpt").name == "gpt"


def test_every_built_in_file_is_as_hydra_reads_it():
    folder = presets.folder()
    files = sorted(folder.rglob("*.yaml"))
    assert {file.relative_to(folder).with_suffix("").as_posix() for file in files} == set(source._texts())
    for file in files:
        assert source._parsed(file.relative_to(folder).with_suffix("").as_posix()) == OmegaConf.load(file)


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


def test_a_second_composition_parses_no_file(monkeypatch):
    composed("tp=2")
    parsed: list[object] = []
    load = yaml.load
    monkeypatch.setattr(yaml, "load", lambda *args, **kwargs: parsed.append(args) or load(*args, **kwargs))
    composed("tp=4")
    assert not parsed
    composed("hydra/launcher=basic", "tp=4")  # Hydra's own files are its own to read
    assert parsed


def test_a_recipe_of_an_earlier_command_is_forgotten():
    composed("recipe=quickstart")
    composed("tp=2")
    assert "recipe" not in compose.ConfigStore.instance().repo


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
    root = Path(source.__file__).parents[1] / folder
    tricks = re.compile(r"defaults_list|omegaconf\._|^import (gc|pickle)$|__deepcopy__|_set_parent", re.MULTILINE)
    assert [path.name for path in sorted(root.rglob("*.py")) if tricks.search(path.read_text())] == []
