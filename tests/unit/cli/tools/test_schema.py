"""The JSON schema for editors: what the program accepts validates, and what it refuses is found."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from omegaconf import OmegaConf

from parallelrun.cli import main as program
from parallelrun.cli.tools.schema import schema
from parallelrun.config import presets
from parallelrun.config.keys import GROUPS, Key, known_keys
from parallelrun.config.recipes import about
from parallelrun.config.recipes import recipe_files as recipes
from parallelrun.config.schema import strategy_keys
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.resolve.freeze import freeze

FILES = {group: sorted((presets.folder() / group).glob("*.yaml")) for group in GROUPS if group != "recipe"}


@cache
def validator(kind: str | None = None) -> Draft202012Validator:
    Draft202012Validator.check_schema(schema(kind))
    return Draft202012Validator(schema(kind))


def faults(text: str, kind: str | None = "recipe") -> list[str]:
    """The messages about a file, read as OmegaConf reads it (`1e-3` is a number)."""
    return [error.message for error in validator(kind).iter_errors(loaded(text))]


def loaded(text: str) -> Any:
    return OmegaConf.to_container(OmegaConf.create(text), resolve=False)


def part(document: dict[str, Any], name: str) -> dict[str, Any]:
    for word in name.split("."):
        document = document["properties"][word]
    return document


@pytest.mark.parametrize("file", recipes.find({}).values(), ids=lambda file: file.name)
def test_every_recipe_validates(file):
    assert faults(file.path.read_text()) == []


@pytest.mark.parametrize("group", FILES)
def test_every_option_of_a_group_validates_as_that_group(group):
    for path in FILES[group]:
        assert faults(path.read_text(), group) == [], path
    assert faults("nosuch: 1\n", group)


@pytest.mark.parametrize("kind", ["ddp", "ps", "local_sgd", "fsdp"])
def test_the_frozen_configuration_of_a_run_validates(kind):
    config = strategy_keys.completed(Config())
    config.strategy.data.kind = kind
    assert faults(freeze(config), None) == []


def document_of(name: str, value: Any) -> dict[str, Any]:
    for word in reversed(name.split(".")):
        value = {word: value}
    return value


def beyond(key: Key) -> list[Any]:
    """Values that a key's bounds, choices and type do not allow."""
    found = [key.least - 1] if key.least is not None else []
    found += [bound for bound in (key.above, key.below) if bound is not None]
    found += [key.most + 1] if key.most is not None else []
    found += [key.plausible[1] * 2] if key.plausible else []
    found += ["nosuch"] if key.choices else []
    inside = [[one] for one in found] if key.kind == "list" else [{"x": one} for one in found]
    found = found if key.kind not in ("list", "dict") else inside
    return found + {"int": ["x", 0.5, [1]], "float": ["x", {}], "bool": [3, "x"], "list": [3], "str": [[1]]}.get(
        key.kind, []
    )


def test_every_key_is_there_with_its_help_and_refuses_what_its_bounds_refuse():
    whole = schema()
    for name, key in {**known_keys(), **about.known()}.items():
        node = part(whole, name)
        assert key.help in node.get("description", ""), name
        for value in beyond(key):
            assert not validator().is_valid(document_of(name, value)), (name, value)
        assert validator().is_valid(document_of(name, "${seed}")) or key.choices == (), name


def test_the_defaults_of_all_keys_validate():
    values = yaml.safe_load(freeze(strategy_keys.completed(Config())))
    assert set(values) - {"about"} <= set(schema()["properties"])
    assert schema()["properties"]["steps"]["default"] == Config().steps


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tpp: 8\n", "'tpp' was unexpected"),
        ("model:\n  layrs: 2\n", "'layrs' was unexpected"),
        ("defaults:\n  - override /model: gtp\n", "is not valid under any"),
        ("defaults:\n  - override /modle: gpt\n", "is not valid under any"),
        ("defaults: gpt\n", "'gpt' is not of type 'array'"),
        ("strategy:\n  data:\n    nosuch: 1\n", "'nosuch' was unexpected"),
        ("strategy:\n  router:\n    top_q: 1\n", "'top_q' was unexpected"),
        ("about:\n  expected:\n    los: [1, 2]\n", "'los' was unexpected"),
        ("hydra:\n  verbose: true\n", "'hydra' was unexpected"),
    ],
)
def test_a_wrong_key_or_value_is_found(text, said):
    assert any(said in message for message in faults(text)), faults(text)


def test_a_named_strategy_limits_the_keys_beside_it():
    assert faults("strategy:\n  data:\n    staleness: 2\n") == []
    assert faults("strategy:\n  data:\n    kind: ps\n    staleness: 2\n") == []
    assert any(
        "'staleness' is not one of" in text for text in faults("strategy:\n  data:\n    kind: ring\n    staleness: 2\n")
    )
    for axis in strategy_keys.SECTIONS:
        for kind in strategy_keys.kinds(axis):
            for key in strategy_keys.own_keys(axis, kind):
                assert key in part(schema(), f"strategy.{axis}")["properties"]
    assert part(schema(), "strategy.data.staleness")["description"].endswith("read by ps")


def test_a_file_of_the_users_own_folder_may_set_hydra_and_choose_its_own_groups(tmp_path):
    for name in ("model/tiny", "experiment/wide"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / f"{name}.yaml").write_text("layers: 2\n")
    text = "defaults:\n  - override /model: tiny\n  - /experiment: wide\nhydra:\n  mode: MULTIRUN\n"
    own = Draft202012Validator(schema(None, ("--config-dir", str(tmp_path))))
    assert own.is_valid(loaded(text))
    assert not validator().is_valid(loaded(text)), "without the folder"


def test_the_tool_prints_it(capsys, tmp_path):
    assert program.main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == schema()
    assert program.main(["schema", "cluster"]) == 0
    assert "memory_gb" in json.loads(capsys.readouterr().out)["properties"]
    assert program.main(["schema", "clutser"]) == 2
    assert "schema cluster" in capsys.readouterr().err
