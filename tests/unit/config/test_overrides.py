"""Overrides are checked and rewritten before Hydra parses them."""

from __future__ import annotations

import os

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as some

from parallelrun.config.overrides import quote, read, split, unquoted
from tests.matrix import examples


def rewritten(text: str, multirun: bool = False) -> str:
    overrides, problems = read([text], multirun, "here")
    assert not problems, problems
    return overrides[0].hydra()


def problem(*texts: str, multirun: bool = False):
    _, problems = read(list(texts), multirun, "here")
    assert len(problems) == 1, problems
    return problems[0]


@given(some.text(some.characters(blacklist_categories=("Cs", "Cc")), min_size=1, max_size=30))
@settings(max_examples=examples(300), deadline=None)
def test_hydra_reads_a_quoted_path_as_it_was_typed(path):
    path = path.replace("${", "$").lstrip("~")
    if path[:1] in ("'", '"', "") or path.lower() == "null" or "(" in path:
        return
    parsed = OverridesParser.create().parse_override(f"dataset.path={quote(path, is_path=True)}")
    assert parsed.value() == path


@pytest.mark.parametrize(
    ("typed", "hydra"),
    [
        ("tp=8", "tp=8"),
        ("path=a b,c.txt", "dataset.path='a b,c.txt'"),
        ("path=it's", r"dataset.path='it\'s'"),
        ("name=010", "name='010'"),
        ("schedule=1f1b", "schedule='1f1b'"),
        ("resume=null", "resume=null"),
        ("name='given'", "name='given'"),
        ("optimizer.betas=[0.9,0.95]", "optimizer.betas=[0.9,0.95]"),
        ("model.roles.fc1=column", "++model.roles.fc1=column"),
        ("model=gpt", "model=gpt"),
        ("hydra.run.dir=out", "hydra.run.dir=out"),
        ("tp=${pp}", "tp=${pp}"),
    ],
)
def test_values_are_written_so_that_hydra_reads_them_right(typed, hydra):
    assert rewritten(typed) == hydra


def test_home_is_expanded_in_paths_only():
    assert rewritten("path=~/data") == f"dataset.path='{os.path.expanduser('~')}/data'"
    assert rewritten("schedule=~x") == "schedule='~x'"


def test_a_sweep_over_texts_keeps_its_commas():
    assert rewritten("schedule=gpipe,1f1b", multirun=True) == "schedule='gpipe','1f1b'"
    assert rewritten("path=a b,c", multirun=True) == "dataset.path='a b','c'"


def test_each_value_of_a_sweep_is_checked():
    assert "parsed as 8 from 010" in problem("tp=2,010", multirun=True).what
    assert read(["tp=range(1,4)", "world=choice(4,8)"], True, "here")[1] == []


@pytest.mark.parametrize(
    ("value", "parts"),
    [("a,b", ["a", "b"]), ("'a,b',c", ["'a,b'", "c"]), ("[1,2],3", ["[1,2]", "3"]), ("", [""]), ("f(1,2)", ["f(1,2)"])],
)
def test_commas_inside_quotes_and_brackets_do_not_split(value, parts):
    assert split(value) == parts


def test_unquoted_takes_off_one_pair():
    assert unquoted(r"'it\'s'") == "it's" and unquoted("plain") == "plain"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (
            '{"*.[qkv]": column_parallel, "*.out": row_parallel}',
            {"*.[qkv]": "column_parallel", "*.out": "row_parallel"},
        ),
        ("{*.[qkv]:column_parallel}", {"*.[qkv]": "column_parallel"}),
        ("{'a b': x, layers.*.fc1: column_parallel}", {"a b": "x", "layers.*.fc1": "column_parallel"}),
        ("{a: 1, b: [1,2], c: {d: e}}", {"a": 1, "b": [1, 2], "c": {"d": "e"}}),
        ("{}", {}),
    ],
)
def test_a_mapping_may_have_patterns_and_quotes_in_its_keys(typed, meant):
    assert OverridesParser.create().parse_override(rewritten(f"model.roles={typed}")).value() == meant
