"""Recipes as a gallery: listed, copied, and checked against what each says about itself."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from parallelrun.base.errors import ConfigError
from parallelrun.cli.main import main
from parallelrun.cli.tools import gallery
from parallelrun.config.recipes import about
from parallelrun.config.recipes import recipe_files as recipes
from tests.unit.docs import docs_module

pytestmark = pytest.mark.usefixtures("composed_once")
NAMES = sorted(recipes.find({}))
WITHOUT = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
OF_EXTRAS = {"finetune_chat": pytest.param("finetune_chat", marks=[pytest.mark.extras, WITHOUT])}
MINE = """# @package _global_
about:
  purpose: "Mine."
  devices: 2
  device: laptop
  minutes: [0, 1]
  expected: {loss: [1, 9]}
  basis: measured
  source: me
defaults:
  - override /model: gpt
  - override /dataset: synthetic
  - override /strategy: ddp
  - override /cluster: laptop
dp: 2
steps: 2
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Writes a changed copy of MINE and returns its name; the folder of the test is the working folder."""
    monkeypatch.chdir(tmp_path)

    def write(*changes: tuple[str, str]) -> str:
        text = MINE
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "mine.yaml").write_text(text)
        return "./mine.yaml"

    return write


@pytest.mark.slow
@pytest.mark.parametrize("name", [OF_EXTRAS.get(name, name) for name in NAMES])
def test_every_recipe_says_what_the_gallery_needs_and_what_the_plan_confirms(name):
    found = gallery.check(recipes.find({})[name])
    assert found.problems == ()
    said = recipes.load(found.file).about
    assert said is not None and said.source and said.purpose and found.file.description == said.purpose
    assert recipes.load(replace(found.file, source="user")).about == said, "ours obey the rules for strangers, too"
    if said.basis != "measured":
        assert {"minutes", "tokens_per_s"} <= set(found.results), "the range is compared with a prediction"


def test_the_table_of_the_page_is_up_to_date():
    module = docs_module("recipes")
    assert module.PAGE.read_text() == module.page(module.PAGE.read_text()), "run `python docs/recipes.py`"
    assert all(f"[`{name}`]" in module.table() for name in NAMES)


def test_the_list_shows_what_each_is_for(mine, capsys):
    mine()
    Path("recipes").mkdir()
    Path("recipes/broken.yaml").write_text("tpp: 8\n")
    assert main(["recipes", "ls", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["recipes"]}
    assert rows["quickstart"]["about"]["expected"]["loss"] == [2.8, 3.15] and rows["quickstart"]["error"] is None
    assert "no such key" in rows["broken"]["error"] and rows["broken"]["source"] == "user"
    assert main(["recipes"]) == 0
    out = capsys.readouterr().out
    assert "4 x laptop" in out and "loss 2.8 to 3.15" in out and "tokens_per_s 150,000 to 300,000" in out


def test_a_copy_is_the_same_file_and_nothing_is_overwritten(mine, capsys):
    mine()
    assert main(["recipes", "cp", "quickstart"]) == 0
    assert "parallelrun recipe=./quickstart.yaml" in capsys.readouterr().out
    original = recipes.find({})["quickstart"].path.read_bytes()
    assert Path("quickstart.yaml").read_bytes() == original
    assert main(["recipes", "cp", "classics", "quickstart.yaml"]) == 2
    assert "quickstart.yaml exists already" in capsys.readouterr().err
    assert Path("quickstart.yaml").read_bytes() == original
    assert main(["recipes", "cp", "./mine.yaml", "deep/er/"]) == 0
    assert Path("deep/er/mine.yaml").read_text() == MINE
    Path("dangling.yaml").symlink_to("elsewhere.yaml")
    assert main(["recipes", "cp", "quickstart", "dangling.yaml"]) == 2 and not Path("elsewhere.yaml").exists()
    assert main(["recipes", "cp", "quickstrat"]) == 2
    assert "did you mean: quickstart" in capsys.readouterr().err
    assert main(["recipes", "cp", "quickstart", "notes.txt"]) == 2
    assert main(["recipes", "cp", "quickstart", "/proc/x.yaml"]) == 3


def test_a_good_recipe_of_a_user_is_valid(mine, capsys):
    assert main(["recipes", "validate", mine()]) == 0
    assert capsys.readouterr().out == "./mine.yaml: valid\n".replace("./", "")


@pytest.mark.parametrize(
    ("old", "new", "place", "said"),
    [
        ("devices: 2", "devices: 3", "about.devices", "3, but the plan has 2 ranks"),
        ("devices: 2", "devices: two", "mine.yaml:4", "about.devices=two: not a whole number"),
        ("devices: 2", "devices: 0", "mine.yaml:4", "about.devices: must be a whole number from 1"),
        ("  device: laptop\n", "", "about.device", "is missing"),
        ("loss: [1, 9]", "loss: [9, 1]", "mine.yaml:7", "about.expected.loss: must be two numbers [least, most]"),
        ("loss: [1, 9]", "loss: [1, .nan]", "mine.yaml:7", "about.expected.loss: must be two numbers"),
        ("loss: [1, 9]", "loss: 3", "mine.yaml:7", "about.expected.loss: must be a list"),
        ("loss: [1, 9]", "los: [1, 9]", "mine.yaml:7", "about.expected.los: no such key"),
        ("  expected: {loss: [1, 9]}\n", "", "about.expected", "is missing"),
        ("basis: measured", "basis: guessed", "mine.yaml:8", "one of measured, published, predicted"),
        ("minutes: [0, 1]", "minutes: [0]", "mine.yaml:6", "about.minutes: must be two numbers"),
        ("  purpose:", "  porpose:", "mine.yaml:3", "about.porpose: no such key"),
        ("dp: 2", "dp: 2\ntpp: 3", "mine.yaml:16", "tpp: no such key"),
        ("dp: 2", "dp: 2\nglobal_batch: 7", "mine.yaml: global_batch", "7"),
        ("/model: gpt", "/model: gtp", "mine.yaml", "gtp"),
        (MINE, "dp: 2\n", "mine.yaml", "about: is missing"),
    ],
)
def test_a_fault_is_told_with_file_and_key(mine, capsys, old, new, place, said):
    assert main(["recipes", "validate", mine((old, new))]) == 2
    told = capsys.readouterr()
    assert place in told.err and said in told.err and "mine.yaml" in told.err, told.err
    assert "mine.yaml: 1 fault" in told.out


def test_all_faults_of_all_files_are_told(mine, capsys):
    name = mine(("devices: 2", "devices: 3"), ("  source: me\n", ""))
    Path("other.yaml").write_text("tpp: 8\nseed: 010\n")
    assert main(["recipes", "validate", "--json", name, "./other.yaml", "quickstart"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert not document["valid"] and [len(one["problems"]) for one in document["recipes"]] == [2, 2, 0]


def test_a_rate_outside_the_prediction_is_a_fault(mine, capsys):
    text = recipes.find({})["mt_nlg_530b"].path.read_text()
    Path("fast.yaml").write_text(text.replace("tokens_per_s: [55000, 79000]", "tokens_per_s: [155000, 179000]"))
    assert main(["recipes", "validate", "./fast.yaml"]) == 2
    assert "about.expected.tokens_per_s: 155,000 to 179,000, but" in capsys.readouterr().err


def test_what_a_recipe_says_changes_nothing_of_the_run(mine):
    from parallelrun.planner.resolve.freeze import identity

    with_about, plan = gallery._planned(recipes.at_path(mine()), False)
    without = MINE[: MINE.index("about:")] + MINE[MINE.index("defaults:") :]
    Path("bare.yaml").write_text(without)
    bare, bare_plan = gallery._planned(recipes.at_path("./bare.yaml"), False)
    assert identity(with_about.config, plan) == identity(bare.config, bare_plan) and with_about.given == bare.given


def test_only_recipes_say_something_about_themselves(mine):
    with pytest.raises(ConfigError, match="no such key"):
        from parallelrun.cli.argv import read

        read(["about.devices=3"])
    assert not any(name.startswith(about.KEY) for name in recipes.load(recipes.at_path(mine())).keys)
