"""The matrix of compositions: what is not built, each with the reason, and its examples."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from parallelrun.cli.main import main
from parallelrun.cli.tools import cells
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.search import cells as of_search
from parallelrun.planner.search.cells import KINDS, MODELS
from tests.matrix import FULL
from tests.plugin.demo_plugin.always_sequence.plan import AlwaysSequence

# Rules that may refuse as not built: the beginning of the rule's text, N for a number, and why it is not built.
NOT_BUILT = {
    r"model\.router\.bias_rate=N needs the expert load of the global batch": "workers that are not in step never meet; "
    "servers would have to own the bias and receive the load of each expert with every push",
    r"model=\w+: layout=\S+ does not split channels of images": "a convolution is no product that SUMMA or a cube can "
    "block: rows would split samples, as dp does, and columns repeat the work",
    r"strategy\.expert\.tp=N: ep=N is not made of complete groups of tp": "a rank would hold parts of some experts and "
    "all of others; ep=tp x n, or ep over dp with the experts' features over tp, hold the same parameters a rank",
}


@pytest.fixture(scope="module")
def matrix() -> dict[str, Any]:
    return cells.resolved(step=1 if FULL else 83)


def test_what_is_not_built_is_on_the_list_with_a_reason(matrix: dict[str, Any]) -> None:
    rules = [rule["rule"] for rule in matrix["rules"] if rule["kind"] == "not_built"]
    assert [rule for rule in rules if not any(re.match(pattern, rule) for pattern in NOT_BUILT)] == []


def test_a_cell_is_legal_or_of_a_rule_of_the_matrix(matrix: dict[str, Any]) -> None:
    models, rules = matrix["models"], matrix["rules"]
    assert {rule["kind"] for rule in rules} <= {*KINDS}
    assert models.keys() == {*MODELS, "all"} and all(counts["legal"] for counts in models.values())
    assert {kind: sum(counts[kind] for counts in models.values()) for kind in KINDS} == {
        kind: 2 * count for kind, count in models["all"].items()
    }
    refused = sum(models["all"][kind] for kind in KINDS[1:])
    assert max(rule["cells"] for rule in rules) <= refused <= sum(rule["cells"] for rule in rules)


def test_the_command_of_a_rule_is_refused_by_it(matrix: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    for rule in matrix["rules"][:: 1 if FULL else 16]:
        assert main(["plan", *rule["example"].split()]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert re.search(re.escape(rule["rule"]).replace("N", r"[\d.,x]+"), said), rule


def test_a_plug_ins_layout_with_inherited_choices_is_one_setting_of_its_own_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(of_search, "kinds", lambda axis: [AlwaysSequence.kind])
    monkeypatch.setattr(of_search, "config_class", lambda axis, kind: AlwaysSequence.config_class)
    monkeypatch.setattr(of_search, "tensor_strategy", lambda kind: AlwaysSequence)
    assert of_search._of_axis(Config(), "tensor", tp=2) == [{"strategy.tensor.kind": AlwaysSequence.kind}]
    monkeypatch.setattr(AlwaysSequence, "layout_choices", classmethod(lambda cls, tp: []))
    assert of_search._of_axis(Config(), "tensor", tp=2) == [{"strategy.tensor.kind": AlwaysSequence.kind}]


def test_ls_prints_it_in_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cells, "resolved", lambda: matrix_of_one)
    matrix_of_one = {
        "models": {"gpt": dict.fromkeys(KINDS, 1234)},
        "rules": [{"kind": "not_built", "rule": "dp=N " + 30 * "word ", "where": "dp", "cells": 7, "example": "dp=2"}],
    }
    assert main(["ls", "cells", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["models"]["gpt"]["legal"] == 1234
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["ls", "cells"]) == 0
    out = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out)
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "parallelrun plan dp=2" in out and re.search(r"gpt( +1,234){4} +4,936", out) and "not_built:" in out
