"""The conditions of `--fail-on`."""

from __future__ import annotations

import pytest

from parallelrun.base.errors import ConfigError
from parallelrun.report.records.fail_conditions import failures, parse
from parallelrun.report.records.read import read
from parallelrun.report.records.run_differences import compare
from tests.run_files import write_run


@pytest.fixture
def two(tmp_path):
    """val_loss 3.0 -> 3.03 (+1 %), tokens_per_s 100 -> 95 (-5 %), peak_memory_bytes only in the first."""
    a = write_run(tmp_path / "a", max_vio=0.0)
    b = write_run(tmp_path / "b", (5.0, 4.5, 3.0, 2.0), config={"dp": 4}, val_loss=3.03, tokens_per_s=95.0,
                  peak_memory_bytes=None, max_vio=0.5)  # fmt: skip
    return compare([read(a), read(b)])


@pytest.mark.parametrize(
    ("text", "fails"),
    [
        ("val_loss>+1%", False),  # 3.03 is 1 % more, and not more than that
        ("val_loss>=+0.999%", True),
        ("val_loss>+0.9%", True),
        ("val_loss > +0.02", True),
        ("val_loss>+0.04", False),
        ("val_loss>3", True),
        ("val_loss<3", False),
        ("tokens_per_s<-4.9%", True),
        ("tokens_per_s<-5.1%", False),
        ("tokens_per_s<-6", False),
        ("tokens_per_s<96", True),
        ("loss>+0%", False),
        ("loss_difference>0", True),
        ("loss_difference>0.5", False),
        ("max_vio>+1e3%", True),  # from 0
        ("step_time_median_s<=.5e0", True),
        ("peak_memory_bytes>+50%", True),  # cannot be checked
        ("peak_memory_bytes>1", True),
    ],
)
def test_a_condition(two, text, fails):
    assert bool(failures(two, [parse(text)])) is fails


def test_a_failure_says_by_how_much(two):
    (text,) = failures(two, [parse("val_loss>+0.5%")])
    assert text == "val_loss>+0.5%: val_loss of B is 3.03, +1.000% from A's 3"
    (text,) = failures(two, [parse("peak_memory_bytes>+1%")])
    assert text == "peak_memory_bytes>+1%: cannot be checked: B has no peak_memory_bytes"


@pytest.mark.parametrize("text", ["val_loss", "val_loss>", "val_loss=3", "val_loss>1%", ">3", "val_loss>nan", "a b>3"])
def test_what_is_no_condition_is_refused(text):
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert caught.value.exit_code == 2 and caught.value.problems[0].where == "--fail-on"


def test_an_unknown_result_is_refused_with_the_closest(two):
    with pytest.raises(ConfigError) as caught:
        failures(two, [parse("val_los>+1%")])
    assert "val_loss" in caught.value.problems[0].suggestion
