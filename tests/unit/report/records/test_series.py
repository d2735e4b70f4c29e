"""The lines of a figure: grouped by keys, over seeds; what cannot be one point is refused."""

from __future__ import annotations

import statistics
from itertools import count

import pytest

from parallelrun.base.errors import ConfigError
from parallelrun.report.records.read import read
from parallelrun.report.records.series import series, value_of
from tests.run_files import write_run


@pytest.fixture
def run(tmp_path):
    numbers = count()

    def of(strategy: str, world: int, rate: float | None, seed: int = 1, **config):
        changes = {"strategy.name": strategy, "dp": world, "seed": seed, **config}
        return read(write_run(tmp_path / f"{next(numbers)}", config=changes, tokens_per_s=rate))

    return of


def test_a_line_for_each_value_and_a_point_for_each_x_over_the_seeds(run):
    runs = [run("ddp", 4, 40.0), run("ring", 2, 10.0), run("ddp", 2, 20.0), run("ddp", 4, 50.0, seed=2)]
    (ddp, ring), left_out = series(runs, "dp", "tokens_per_s", ["strategy"])
    assert (ddp.label, ring.label, left_out) == ("ddp", "ring", 0)
    assert [(point.x, point.y.mean, point.y.count) for point in ddp.points] == [(2, 20.0, 1), (4, 45.0, 2)]
    assert ddp.points[0].y.deviation is None
    assert ddp.points[1].y.deviation == pytest.approx(statistics.stdev([40.0, 50.0]))


def test_without_by_there_is_one_line_and_names_keep_their_order(run):
    (line,), _ = series([run("ring", 2, 1.0), run("ddp", 2, 2.0)], "strategy", "tokens_per_s", [])
    assert [point.x for point in line.points] == ["ring", "ddp"] and line.label == ""


def test_several_keys_make_a_label(run):
    lines, _ = series([run("ddp", 2, 1.0), run("ddp", 2, 2.0, tp=2)], "dp", "tokens_per_s", ["strategy", "tp"])
    assert [line.label for line in lines] == ["ddp, tp=1", "ddp, tp=2"]


def test_runs_without_the_result_are_counted(run):
    lines, left_out = series([run("ddp", 2, 1.0), run("ddp", 4, None)], "dp", "tokens_per_s", [])
    assert left_out == 1 and len(lines[0].points) == 1


def test_a_value_is_a_result_a_key_or_the_name_of_an_option(run):
    one = run("ddp", 2, 1.0)
    values = [value_of(one, key) for key in ("tokens_per_s", "model.layers", "strategy", "model", "nothing")]
    assert values == [1.0, 8, "ddp", "gpt", None]


@pytest.mark.parametrize(
    ("second", "told", "suggestion"),
    [
        (("ring", 2, 2.0), "differ in strategy", "--by strategy too"),
        (("ddp", 2, 2.0), "have the same seed", ""),
    ],
)
def test_runs_that_are_no_replicates_are_not_averaged(run, second, told, suggestion):
    with pytest.raises(ConfigError, match=told) as caught:
        series([run("ddp", 2, 1.0), run(*second)], "dp", "tokens_per_s", [])
    assert caught.value.exit_code == 2 and suggestion in caught.value.problems[0].suggestion


@pytest.mark.parametrize(
    ("x", "y", "by", "flag", "near"),
    [
        ("optimizer.lrr", "loss", [], "--x", "optimizer.lr"),
        ("dp", "tokens_per", [], "--y", "tokens_per_s"),
        ("dp", "loss", ["optimizer.l"], "--by", "optimizer.lr"),
    ],
)
def test_an_unknown_key_is_refused_with_the_closest(run, x, y, by, flag, near):
    with pytest.raises(ConfigError) as caught:
        series([run("ddp", 2, 1.0)], x, y, by)
    assert caught.value.problems[0].where == flag and near in caught.value.problems[0].suggestion
