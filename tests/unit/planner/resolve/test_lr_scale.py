"""optimizer.lr_scale=linear is a number as soon as there is a plan, and the reference keeps it."""

from __future__ import annotations

import pytest

from parallelrun.base.errors import ConfigError
from parallelrun.planner.contract.optimizers import with_lr_scale
from parallelrun.planner.resolve.freeze import freeze, load_frozen
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.training.loop.schedules import learning_rate
from parallelrun.training.verify.checked import single_device as single_device
from tests.plans import tiny_config, tiny_plan

LINEAR = {"dp": 4, "tp": 2, "optimizer.lr_scale": "linear"}


def test_linear_is_the_number_of_replicas_and_is_said():
    config = tiny_config(LINEAR)
    plan = resolve(config)
    assert with_lr_scale(config, plan).optimizer.lr_scale == 4.0
    assert "lr_scale=4 (filled: linear, dp 4)" in plan.filled


def test_ranks_and_the_reference_read_a_number():
    config = tiny_config(LINEAR)
    plan = resolve(config)
    assert load_frozen(freeze(config, plan)).optimizer.lr_scale == 4.0
    assert single_device(config, plan)[0].optimizer.lr_scale == 4.0


def test_the_rate_is_that_many_times_as_large_after_its_warm_up():
    scaled = with_lr_scale(tiny_config({**LINEAR, "optimizer.warmup": 2}), tiny_plan(LINEAR)).optimizer
    plain = tiny_config({"optimizer.warmup": 2}).optimizer
    for step in (1, 2, 5):
        assert learning_rate(scaled, step, 10) == pytest.approx(4 * learning_rate(plain, step, 10))


@pytest.mark.parametrize("value", ["square", 0, -1.0, float("inf"), True])
def test_anything_else_is_refused(value):
    with pytest.raises(ConfigError, match="neither linear nor a finite number above 0"):
        tiny_plan({"dp": 2, "optimizer.lr_scale": value})
