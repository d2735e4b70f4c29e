"""What a sweep chooses is known before its first point: every recipe is read, and the points are counted."""

from __future__ import annotations

import json
import pickle
import time

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from parallelrun.cli.main import main
from parallelrun.config.overrides import read
from parallelrun.config.sweeps import num_points
from tests.matrix import FULL

RECIPES = {
    "gpt_small": "model:\n  layers: 3\n",
    "gpt_tiny": "model:\n  layers: 2\n",
    "other": "defaults:\n  - gpt_tiny\nseed: 7\n",
}


@pytest.fixture
def recipes(tmp_path, monkeypatch):
    (tmp_path / "recipes").mkdir()
    for name, text in RECIPES.items():
        (tmp_path / "recipes" / f"{name}.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def swept(capsys, *words: str) -> list[tuple[str, int]]:
    """(the recipe, the model's layers) of every point of a sweep."""
    assert main(["plan", "-m", "strategy=single", *words, "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    name_of = {point["overrides"][-1].partition("=")[2]: point for point in points}
    return [(name, sum(len(stage["blocks"]) for stage in point["stages"]) - 2) for name, point in name_of.items()]


@pytest.mark.parametrize(
    ("value", "chosen"),
    [
        ("glob([gpt_*,oth*],exclude=[gpt_s*,gpt_o*,gpt2*])", [("gpt_tiny", 2), ("other", 2)]),
        ("choice(recipes/gpt_small.yaml,gpt_tiny)", [("recipes/gpt_small.yaml", 3), ("gpt_tiny", 2)]),
        *((value, [("gpt_small", 3), ("other", 2)]) for value in ("gpt_small,other", "sort(other,gpt_small)") if FULL),
    ],
)
def test_every_recipe_that_a_sweep_can_choose_is_read(value, chosen, recipes, composed_once, capsys):
    assert swept(capsys, f"recipe={value}") == chosen


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-m", "recipe=choice(gpt_small,nosuch)"], "recipe=nosuch: no such recipe"),
        (["-m", "recipe=glob(nosuch*)"], "no recipe matches"),
        (["-m", "recipe=range(1,3)"], "no such recipe"),
        (["-m", "recipe=interval(1,3)"], "not a choice of recipes"),
        (["-m", "recipe=nosuch(a)"], "Unknown function"),
        (["recipe=choice(gpt_small,other)"], "several values need a sweep"),
        (["-m", "tp=range(0,100000)", "pp=range(0,100000)"], "100,000 x 100,000 = 10,000,000,000 points; at most"),
        (["-m", "optimizer.lr=range(0,1,1e-9)"], "points; at most 10,000"),
        (["-m", "seed=shuffle(range(0,1000000))"], "1,000,000 points; at most 10,000"),
        (["-m", *(f"{key}=1,2,3,4,5,6,7,8,9,10" for key in ("seed", "steps", "dp", "tp", "pp"))], "= 100,000 points"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused_at_once(words, said, recipes, capsys):
    begun = time.perf_counter()
    assert main(["plan", *words]) == 2
    assert said in capsys.readouterr().err
    assert time.perf_counter() - begun < 5
    assert not (recipes / "multirun").exists()


class Payload:
    def __reduce__(self):
        return open, ("ran", "w")


@pytest.mark.parametrize(
    "words",
    [
        ["--experimental-rerun", "config.pickle"],
        ["run", "--experimental-rerun=config.pickle"],
        ["--exp", "config.pickle"],
        ["--e=config.pickle"],
        ["-sc", "install=bash", "--experimental-rerun", "config.pickle"],
    ],
)
def test_no_pickle_is_read(words, recipes, capsys):
    (recipes / "config.pickle").write_bytes(pickle.dumps(Payload()))
    assert main(words) == 2
    assert "so none is read" in capsys.readouterr().err
    assert not (recipes / "ran").exists()


@pytest.mark.parametrize(
    "value", ["5,0,-1", "5,0,-2", "6,0,-2", "0,5,-1", "-3,3", "-3,0,2", "-1,-8,-3", "0,1,0.3", "1,-1,-0.25", "4,4"]
)
def test_the_points_of_a_range_are_those_that_hydra_lists(value):
    """Also of one that falls: Hydra's own list of the values is the truth."""
    parsed = OverridesParser.create().parse_override(f"tp=range({value})")
    overrides, problems = read([f"tp=range({value})"], True, "here")
    assert not problems and num_points(overrides) == len(list(parsed.sweep_iterator()))
