"""Recipes come from strangers: what is wrong with one is told with file and line, and nothing in it is obeyed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from parallelrun.base.errors import ConfigError, EnvironmentProblem, ParallelrunError
from parallelrun.config.recipes import recipe_files
from parallelrun.config.recipes.recipe_files import RecipeFile, at_path, find, load
from tests.matrix import examples

GOOD = """# What it is for.
# @package _global_
defaults:
  - override /strategy: ptdp
  - override /model: gpt
tp: 2
steps: 7
optimizer:
  lr: 1.0e-3
  betas: [0.9, 0.99]
strategy:
  data:
    shard: 2
model:
  hidden: ${seed}
"""


def recipe(tmp_path: Path, text: str | bytes) -> RecipeFile:
    path = tmp_path / "theirs.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return RecipeFile("theirs", path, "user")


def refused(tmp_path: Path, text: str | bytes, trust: bool = False):
    with pytest.raises(ConfigError) as caught:
        load(recipe(tmp_path, text), trust)
    return caught.value.problems


def test_what_a_recipe_gives_is_known(tmp_path):
    loaded = load(recipe(tmp_path, GOOD))
    assert loaded.keys == {
        "strategy", "model", "tp", "steps", "optimizer.lr", "optimizer.betas", "strategy.data.shard", "model.hidden",
    }  # fmt: skip
    assert loaded.file.description == "What it is for."


@pytest.mark.parametrize(
    ("text", "said", "line"),
    [
        ("tpp: 8\n", "tpp: no such key", 1),
        ("steps: 3\nmodel:\n  layrs: 2\n", "model.layrs: no such key", 3),
        ("tp: 010\n", "parsed as 8 from 010; write 8 or 10", 1),
        ("tp: yes\n", "boolean", 1),
        ("compile: 2\n", "parsed as true", 1),
        ("name: 010\n", "parsed as 8 from 010; quote it", 1),
        ("tp: [1, 2]\n", "takes one value, not a sequence", 1),
        ("optimizer: adamw\n", "choose a group's option in defaults", 1),
        ("eval: 3\n", "holds keys", 1),
        ("tracker: tensorboard\n", "tracker holds keys", 1),
        ("model.layers: 2\n", "separate lines", 1),
        ("optimizer:\n  betas: 0.9\n", "must be a list", 2),
        ("steps: 3\nsteps: 4\n", "given twice, first on line 1", 2),
        ("defaults:\n  - override /modle: gpt\n", "modle: no such group", 2),
        ("defaults:\n  - model: gpt\n", "write override", 2),
        ("defaults: gpt\n", "must be a list", 1),
        ("defaults:\n  - override /model: 3\n", "an option of model must be a name, not a number", 2),
        ("defaults:\n  - override /model: ../x\n", "an option of model must be a plain name", 2),
        ("defaults:\n  - override /model: gpt\n  - override /model: mlp\n", "chosen twice, first on line 2", 3),
        ("- a\n- b\n", "key: value", 1),
        ("seed: 1\n---\nseed: 2\n", "one document", 2),
        ("seed: &a 1\ndp: *a\n", "anchors", 2),
        ("seed: [1\n", "not YAML", 2),
        ("model:\n\tlayers: 2\n", "a tab in the indentation", 2),
        ("# a comment\n\n", "empty", None),
        ("", "empty", None),
        (b"seed: 1\nname: \xff\xfe\n", "not UTF-8", 2),
        ("runs: /tmp/x\n", "outside the working folder", 1),
        ("hydra:\n  run:\n    dir: /tmp/x\n", "may not set hydra", 1),
        ("defaults:\n  - override /hydra/launcher: joblib\n", "may not choose hydra/launcher", 2),
        ("model:\n  _target_: os.system\n", "may not name code", 2),
        ("model:\n  source: ./evil.py:build\n", "may not name code", 2),
        ("model:\n  loss: ./evil.py:loss\n", "may not name code", 2),
        ("dataset:\n  source: ./evil.py:build\n", "may not name code", 2),
        ("name: ${oc.env:HOME}\n", "only use plain ${key}", 1),
        ("optimizer:\n  betas: ['${oc.env:HOME}']\n", "only use plain ${key}", 2),
        ("defaults:\n  - override /model: ${oc.env:HOME}\n", "only use plain ${key}", 2),
        ("defaults:\n  - ../../somewhere/else\n", "only by its name", 2),
    ],
)
def test_a_bad_recipe_is_told_with_its_line(tmp_path, text, said, line):
    problems = refused(tmp_path, text)
    place = f"theirs.yaml:{line}" if line else "theirs.yaml"
    assert any(said in problem.what and place in problem.where for problem in problems), problems


def test_the_short_name_of_a_key_is_answered_with_the_key(tmp_path):
    [problem] = refused(tmp_path, "tracker: tensorboard\n")
    assert problem.suggestion == "tracker: {use: ...}"
    loaded = load(recipe(tmp_path, "tracker: {use: [tensorboard, mlflow], project: p}\n"))
    assert loaded.keys == {"tracker.use", "tracker.project"}


def test_all_problems_come_at_once(tmp_path):
    assert len(refused(tmp_path, "tpp: 8\nseed: 010\nlayout: [1]\n")) == 3


def test_trust_lets_a_recipe_name_code(tmp_path):
    text = "runs: /tmp/x\nmodel:\n  source: ./net.py:build\nname: ${oc.env:USER}\nhydra:\n  verbose: true\n"
    assert "model.source" in load(recipe(tmp_path, text), trust=True).keys
    assert len(refused(tmp_path, text)) == 4


def test_trust_forgives_no_mistake(tmp_path):
    refused(tmp_path, "tpp: 8\n", trust=True)


def test_a_recipe_has_a_size_and_a_depth(tmp_path):
    assert "at most" in refused(tmp_path, "# " + "x" * recipe_files.SIZE_LIMIT)[0].what
    assert "nested deeper" in refused(tmp_path, "seed: " + "[" * 100 + "]" * 100)[0].what
    assert "nested deeper" in refused(tmp_path, "seed: " + "[" * 60_000)[0].what


def test_an_unreadable_or_missing_file_is_told(tmp_path):
    with pytest.raises(EnvironmentProblem):
        load(RecipeFile("x", tmp_path, "user"))
    with pytest.raises(ConfigError, match="no such file"):
        at_path(str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigError, match="is a folder"):
        at_path(str(tmp_path) + "/")


def test_recipes_are_found_and_built_in_ones_cannot_be_shadowed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "more").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text("# Mine.\nseed: 1\n")
    (tmp_path / "recipes" / "quickstart.yaml").write_text("seed: 1\n")
    (tmp_path / "more" / "theirs.yml").write_text("# @package _global_\n# Theirs.\nseed: 1\n")
    found = find({"PARALLELRUN_RECIPES": str(tmp_path / "more") + ":/nonexistent"})
    assert found["mine"].source == "user" and found["mine"].description == "Mine."
    assert found["theirs"].description == "Theirs."
    assert found["quickstart"].source == "built-in"


@given(some.data())
@settings(max_examples=examples(400), deadline=None)
def test_no_mutation_of_a_recipe_breaks_the_reader(tmp_path_factory, data):
    text = GOOD
    for _ in range(data.draw(some.integers(1, 4))):
        start = data.draw(some.integers(0, len(text)))
        stop = data.draw(some.integers(start, min(len(text), start + 6)))
        piece = data.draw(
            some.sampled_from(list(":-#[]{}&*!|>'\"%@`\n\t $,?~\0\x85\ufeff") + ["${", "<<: ", "- ", "---\n"])
        )
        text = text[:start] + piece + text[stop:]
    folder = tmp_path_factory.mktemp("mutated")
    try:
        load(recipe(folder, text))
    except ParallelrunError as error:
        assert all(problem.where.startswith(str(folder)) for problem in error.problems)
