"""How many devices to rent: days, device-hours and price by size, and the size that an objective chooses."""

from __future__ import annotations

import re

import pytest

from parallelrun.base.errors import ConfigError
from parallelrun.planner.search import device_counts as sizes
from parallelrun.planner.search import requested_searches as searches
from tests.unit.config.test_presets import composed

SMALL = ("model=gpt2_124m", "cluster=a100_dgx", "precision=bf16", "global_batch=16", "recompute=none", "layout=1d",
         "strategy.data.kind=ddp", "pp=1", "tp=1", "tokens=1e9")  # fmt: skip


def compared(*words: str) -> tuple[list[sizes.Size], sizes.Size]:
    found = composed(*SMALL, *words)
    assert sizes.compares_sizes(found.config)
    return sizes.compared(found.config, found.given, 1)


def test_the_training_follows_from_the_best_plan():
    found = composed(*SMALL, "gpus=2", "cluster.price_per_gpu_hour=2.5")
    search = searches.searched(found.config, found.given, 2)
    training, best = sizes.training_of(found.config, search), search.best[0]
    assert training is not None and best.time is not None
    steps = -(-1_000_000_000 // (16 * 1024))
    assert training.days == pytest.approx(steps * best.time.step_s / 86400)
    assert training.device_hours == pytest.approx(2 * 24 * training.days)
    assert training.price == pytest.approx(2.5 * training.device_hours)
    assert not sizes.compares_sizes(found.config), "a number of devices was asked for"


def test_where_one_device_is_cheapest_no_smaller_size_is_tried():
    found = composed("model=gpt", "cluster=h100_dgx", "objective=cost", "gpus=2", "tokens=1e9")
    every, best = sizes.compared(found.config, found.given, 1)
    assert best.devices == 1 and [one.devices for one in every] == [1, 2]


def test_the_fewest_devices_that_are_fast_enough():
    every, _ = compared("objective=gpus", "days=99", "gpus=16")
    assert [one.devices for one in every] == [1], "one device is enough"
    every, _ = compared("objective=cost", "gpus=16")
    assert [one.devices for one in every] == sorted(one.devices for one in every) and len(every) >= 5
    days = {one.devices: one.training.days for one in every}
    within = (days[4] + days[8]) / 2
    again, best = compared("objective=gpus", f"days={within}", "gpus=16")
    assert best.devices == 8 and best in again
    assert all(one.training.days > within for one in again if one.devices < 8)


def test_the_cheapest_size_within_the_days():
    every, best = compared("objective=cost", "gpus=16")
    assert best.training.device_hours == min(one.training.device_hours for one in every)
    quicker = best.training.days * 0.7
    again, other = compared("objective=cost", "gpus=16", f"days={quicker}")
    enough = [one for one in again if one.training.days <= quicker]
    assert other.devices > best.devices
    assert other.training.device_hours == min(one.training.device_hours for one in enough)


def test_no_size_beyond_gpus_is_tried_and_too_few_days_are_refused():
    assert max(one.devices for one in compared("objective=cost", "gpus=4")[0]) == 4
    with pytest.raises(ConfigError) as caught:
        compared("objective=gpus", "days=1e-6", "gpus=4")
    (problem,) = caught.value.problems
    at_least = re.fullmatch(r"days=1, or a larger gpus: at least ([\d,]+)", problem.suggestion)
    assert at_least and int(at_least[1].replace(",", "")) > 4 and "up to 4; days=1e-06" in problem.what


@pytest.mark.parametrize(
    ("words", "key"),
    [(("objective=cost",), "tokens"), (("objective=gpus", "tokens=1e9"), "days"), (("gpus=8", "days=3"), "days")],
)
def test_what_an_objective_lacks_is_named(words, key):
    with pytest.raises(ConfigError) as caught:
        sizes.compares_sizes(composed("model=gpt2_124m", "cluster=a100_dgx", *words).config)
    assert caught.value.problems[0].where == key and caught.value.exit_code == 2
