"""The comparison of runs: what differs, replicates, where the losses part."""

from __future__ import annotations

import math
import statistics
from itertools import count

import pytest

from parallelrun.report.records.read import read
from parallelrun.report.records.run_differences import MISSING, RunComparison, compare, label, relative
from tests.run_files import write_run


@pytest.fixture
def runs(tmp_path):
    numbers = count()
    return lambda *losses, **options: read(write_run(tmp_path / f"{next(numbers)}", *losses, **options))


def keys(differences) -> dict[str, tuple]:
    return {row.key: row.values for row in differences}


def measures(found: RunComparison) -> dict[str, tuple]:
    return {row.key: row.values for row in found.measures}


def test_what_differs_is_found_and_nothing_else(runs):
    a = runs(config={"runs": "here", "model.description": "one"})
    b = runs(config={"runs": "there", "model.description": "two", "optimizer.lr": 0.1, "strategy.extra": 3},
             versions={"torch": "2.11.0"})  # fmt: skip
    found = compare([a, b])
    assert keys(found.config) == {"optimizer.lr": (0.003, 0.1), "strategy.extra": (MISSING, 3)}
    assert keys(found.versions) == {"versions.torch": ("2.13.0", "2.11.0")}
    assert found.plan == ()


def test_equal_runs_differ_in_nothing_and_stay_apart(runs):
    found = compare([runs(), runs()])
    assert [column.label for column in found.columns] == ["A", "B"]
    assert (found.config, found.plan, found.versions, found.over_seeds) == ((), (), (), {})
    (losses,) = found.losses
    assert (losses.first_step, losses.num_common, losses.largest) == (None, 4, 0.0)


def test_the_first_step_at_which_losses_part_and_by_how_much(runs):
    found = compare([runs((5.0, 4.0, 3.0, 2.0)), runs((5.0, 4.0 + 1e-9, 2.0, 2.5, 1.0))])
    (losses,) = found.losses
    assert (losses.first_step, losses.num_common) == (2, 4)
    assert losses.first == pytest.approx(1e-9, rel=1e-6) and losses.first_relative == pytest.approx(2.5e-10, rel=1e-6)
    assert (losses.largest_step, losses.largest, losses.last_step, losses.last) == (3, -1.0, 4, 0.5)


def test_a_loss_that_is_not_finite_parts_from_one_that_is(runs):
    (losses,) = compare([runs((5.0, 4.0)), runs((5.0, None))]).losses
    assert (losses.first_step, losses.first) == (2, math.inf)
    (losses,) = compare([runs((5.0, None)), runs((5.0, None))]).losses
    assert losses.first_step is None


def test_runs_without_common_steps_are_not_compared_by_loss(runs):
    (losses,) = compare([runs(), runs((), state="failed")]).losses
    assert (losses.num_common, losses.first_step) == (0, None)


def test_replicates_share_a_column_with_mean_and_deviation(runs):
    values = (2.0, 2.5, 4.5)
    seeds = [runs((value,), config={"seed": seed}) for seed, value in enumerate(values)]
    found = compare([seeds[0], runs((3.0,), config={"optimizer.lr": 0.1, "seed": 9}), *seeds[1:]])
    assert [len(column.runs) for column in found.columns] == [3, 1]
    first, second = measures(found)["loss"]
    assert first.mean == 3.0 and first.deviation == pytest.approx(statistics.stdev(values)) and first.count == 3
    assert (second.mean, second.deviation) == (3.0, None)
    assert keys(found.config) == {"optimizer.lr": (0.003, 0.1)}  # a column has no seed of its own
    assert found.over_seeds == {}


def test_runs_that_differ_only_in_the_seed_get_a_spread_over_all(runs):
    found = compare([runs((2.0,), config={"seed": 1}), runs((4.0,), config={"seed": 2})])
    assert len(found.columns) == 2 and keys(found.config) == {"seed": (1, 2)}
    assert found.over_seeds["loss"].mean == 3.0 and found.over_seeds["loss"].deviation == pytest.approx(math.sqrt(2))


def test_other_versions_are_no_replicates(runs):
    a, b = (runs(config={"seed": seed}) for seed in (1, 2))
    c, d = (runs(config={"seed": seed}, versions={"torch": "2.11.0"}) for seed in (1, 2))
    found = compare([a, b, c, d])
    assert [len(column.runs) for column in found.columns] == [2, 2]


def test_a_column_lacks_a_result_that_one_of_its_runs_lacks(runs):
    a, b = runs(config={"seed": 1}), runs(config={"seed": 2}, val_loss=None)
    found = compare([a, b, runs(config={"optimizer.lr": 1.0})])
    assert [one is None for one in measures(found)["val_loss"]] == [True, False]


def test_changes_are_relative_to_the_size_of_the_first(runs):
    found = compare([runs(tokens_per_s=100.0), runs(tokens_per_s=90.0)])
    row = next(row for row in found.measures if row.key == "tokens_per_s")
    assert row.changes == (0.0, pytest.approx(-0.1))
    assert (relative(-1.0, -2.0), relative(0.0, 0.0), relative(1.0, 0.0)) == (0.5, 0.0, math.inf)


def test_labels():
    assert [label(index) for index in (0, 25, 26, 53)] == ["A", "Z", "A2", "B3"]
