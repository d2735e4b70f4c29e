"""Each strategy declares its own keys. A composed configuration has all of them, a resolved one the chosen ones."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, fields, replace

import pytest

from parallelrun.base import registry
from parallelrun.base.errors import ConfigError
from parallelrun.config.schema import strategy_keys
from parallelrun.config.schema.field import key
from parallelrun.config.schema.run_schema import Config, DataStrategyConfig
from parallelrun.config.schema.strategy_keys import (
    SECTIONS,
    completed,
    config_class,
    narrowed,
    own_keys,
    strategy_class,
)
from tests.plans import tiny_config, tiny_plan


@pytest.mark.parametrize("name", registry.STRATEGIES)
def test_every_strategy_names_its_kind_in_its_config(name):
    axis, kind = name.split(".", 1)
    cls = config_class(axis, kind)
    assert issubclass(cls, SECTIONS[axis])
    assert axis in ("pipeline", "expert") or cls().kind == kind
    assert cls is strategy_class(axis, kind).config_class


def test_naming_all_keys_imports_no_strategy(tmp_path):
    code = """
import sys
from parallelrun.config.keys import known_keys
assert "strategy.data.outer_lr" in known_keys()
found = [name for name in sys.modules if name.startswith("parallelrun.") and name.endswith((".plan", ".runtime"))]
assert not found, found
assert "importlib.metadata" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_schema_s_own_sections_have_no_key_of_a_single_strategy():
    assert {item.name for item in fields(DataStrategyConfig)} == {"kind"}
    assert "servers" in own_keys("data", "ps") and "servers" not in own_keys("data", "ring")


def test_a_complete_configuration_has_the_keys_of_all_and_a_narrow_one_those_of_the_chosen():
    config = completed(Config())
    for name in registry.STRATEGIES:
        axis, kind = name.split(".", 1)
        assert own_keys(axis, kind) <= {item.name for item in fields(getattr(config.strategy, axis))}
    ring = tiny_config({"strategy.data.kind": "ring", "strategy.data.bucket_mb": 3.0, "strategy.data.servers": 2})
    section = narrowed(ring).strategy.data
    assert type(section) is config_class("data", "ring") and section.bucket_mb == 3.0
    assert not hasattr(section, "servers")
    assert narrowed(narrowed(ring)) == narrowed(ring)


def test_completing_and_narrowing_keep_every_value():
    config = tiny_config({"strategy.data.kind": "fsdp", "strategy.data.shard": 2, "dp": 4})
    narrow = narrowed(config)
    assert narrowed(completed(narrow)) == narrow
    assert completed(narrow).strategy.data == config.strategy.data


def test_an_unknown_strategy_keeps_its_section_so_that_the_check_can_name_it():
    config = tiny_config({"strategy.data.kind": "nosuch"})
    assert narrowed(config).strategy.data == config.strategy.data


def test_a_section_of_another_strategy_is_a_mistake_of_ours():
    with pytest.raises(AssertionError, match="is no"):
        config_class("data", "fsdp").of(narrowed(tiny_config()))


def test_two_declarations_of_one_key_must_agree(monkeypatch):
    @dataclass
    class OtherConfig(DataStrategyConfig):
        kind: str = "ddp"
        bucket_mb: float = key(1.0, "another default")

    classes = {"ring": config_class("data", "ring"), "other": OtherConfig}
    monkeypatch.setattr(strategy_keys, "kinds", lambda axis: tuple(classes))
    monkeypatch.setattr(strategy_keys, "config_class", lambda axis, kind: classes[kind])
    with pytest.raises(ConfigError, match=r"RingConfig and OtherConfig declare strategy\.data\.bucket_mb differently"):
        strategy_keys._section.__wrapped__("data")


def test_what_a_strategy_does_not_read_changes_nothing_in_its_frozen_form():
    plain = tiny_plan({"strategy.data.kind": "ring", "dp": 2})
    other = tiny_plan({"strategy.data.kind": "ring", "dp": 2, "strategy.data.outer_lr": 0.1})
    assert replace(other, filled=()) == replace(plain, filled=())
