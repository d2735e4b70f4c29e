"""`resume=latest`: which keys are the continued run's and which are the new command's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallelrun.config.continued import continued, differences
from parallelrun.config.keys import GROUPS
from parallelrun.config.schema.strategy_keys import completed
from parallelrun.planner.resolve.freeze import freeze, load_frozen
from parallelrun.planner.resolve.resolve_config import resolve
from tests.plans import tiny_config, tiny_plan

SAVED = {"dp": 2, "tp": 2, "model.layers": 2, "checkpoint.every": 5, "steps": 9, "seed": 7, "strategy.name": "ptdp"}


def saved(**more):
    changes = {**SAVED, **{key.replace("__", "."): value for key, value in more.items()}}
    return load_frozen(freeze(tiny_config(changes), tiny_plan(changes)))


def go_on(given, world=None, **more):
    """What a command that gives these keys continues with, resolved: it must be a legal run."""
    values = {key: value for key, value in given.items() if key not in GROUPS}
    new = tiny_config({"dp": None, "tp": None, "pp": None, "optimizer.lr": 0.5, "model.layers": 3, **values})
    found = continued(new, frozenset(given), saved(**more), world)
    return found, resolve(found, given=frozenset(given), world=world)


def test_without_overrides_everything_is_the_saved_run_s():
    found, plan = go_on({})
    assert replace(found, device=saved().device) == completed(saved())
    assert (plan.degrees["dp"], plan.degrees["tp"]) == (2, 2)


def test_a_given_key_is_the_new_command_s_and_its_neighbours_stay():
    found, _ = go_on({"steps": 20, "optimizer.lr": 0.5})
    assert (found.steps, found.optimizer.lr, found.checkpoint.every, found.seed) == (20, 0.5, 5, 7)
    assert found.model.layers == 2
    keys = frozenset({"steps", "seed", "optimizer.lr", "runs"})
    assert differences(found, saved(), keys) == ["optimizer.lr", "steps"]


def test_a_group_named_again_keeps_the_saved_keys_of_it():
    assert go_on({"model": "gpt"})[0].model.layers == 2


@pytest.mark.parametrize(
    ("given", "degrees"),
    [
        ({"dp": 4}, {"dp": 4, "tp": 2}),
        ({"tp": 4, "dp": 1}, {"dp": 1, "tp": 4}),
        ({"world": 8}, {"dp": 8, "tp": 1}),
        ({"strategy": "tp", "strategy.name": "tp", "tp": 4}, {"dp": 1, "tp": 4}),
        ({"micro_batch": 2}, {"dp": 2, "tp": 2}),
        ({"microbatches": 4}, {"dp": 2, "tp": 2}),
    ],
)
def test_other_degrees_are_filled_anew(given, degrees):
    _, plan = go_on(given)
    assert {axis: plan.degrees[axis] for axis in degrees} == degrees


def test_ranks_that_another_launcher_has_started_beat_the_saved_degrees():
    assert go_on({}, world=8)[1].world == 8
    assert go_on({}, world=4)[1].degrees["tp"] == 2
