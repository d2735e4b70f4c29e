"""Learning rates by value, and the fp16 loss scale."""

from __future__ import annotations

import pytest

from parallelrun.base.errors import ConfigError
from parallelrun.config.schema.run_schema import OptimizerConfig, PrecisionConfig
from parallelrun.training.loop.schedules import LARGEST, SMALLEST, LossScaler, learning_rate
from tests.plans import tiny_plan


def rates(steps: int, **fields) -> list[float]:
    config = OptimizerConfig(**{"lr": 1.0, "warmup": 0, "min_lr_ratio": 0.0, **fields})
    return [learning_rate(config, step, steps) for step in range(1, steps + 1)]


@pytest.mark.parametrize(
    ("steps", "fields", "expected"),
    [
        (8, {"schedule": "constant", "warmup": 4}, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]),
        (5, {"schedule": "linear", "warmup": 1}, [1, 0.75, 0.5, 0.25, 0]),
        (5, {"schedule": "linear", "warmup": 1, "min_lr_ratio": 0.2}, [1, 0.8, 0.6, 0.4, 0.2]),
        (2, {"schedule": "linear"}, [0.5, 0.0]),  # without warm-up the first step is already on the way down
        (3, {"schedule": "cosine", "warmup": 10}, [0.1, 0.2, 0.3]),  # shorter than its warm-up
        (4, {"schedule": "linear", "warmup": 2, "lr_scale": 3.0}, [1.5, 3.0, 1.5, 0.0]),
        (5, {"schedule": "cosine", "warmup": 1, "min_lr_ratio": 0.1},
         [1, 0.1 + 0.9 * (1 + 2**-0.5) / 2, 0.55, 0.1 + 0.9 * (1 - 2**-0.5) / 2, 0.1]),
        (6, {"schedule": "linear", "warmup": 2, "decay_steps": 2, "min_lr_ratio": 0.1}, [0.5, 1, 0.55, 0.1, 0.1, 0.1]),
        (4, {"schedule": "linear", "warmup": 1, "decay_steps": 4}, [1, 0.75, 0.5, 0.25]),  # longer than the run
        (8, {"schedule": "wsd", "warmup": 2, "decay_steps": 4}, [0.5, 1, 1, 1, 0.75, 0.5, 0.25, 0]),
        (11, {"schedule": "wsd", "warmup": 1, "min_lr_ratio": 0.2}, [*[1] * 9, 0.6, 0.2]),  # 2 steps of 11
        (3, {"schedule": "wsd", "warmup": 1, "decay_steps": 9}, [1, 0.5, 0]),  # no stable part is left
        (6, {"schedule": "inverse_sqrt", "warmup": 2, "min_lr_ratio": 0.6},
         [0.5, 1, (2 / 3) ** 0.5, 0.5**0.5, 0.4**0.5, 0.6]),
    ],
)  # fmt: skip
def test_rates_by_step(steps, fields, expected):
    assert rates(steps, **fields) == pytest.approx(expected)


def test_steps_beyond_the_end_have_the_floor():
    assert learning_rate(OptimizerConfig(lr=1.0, warmup=0, min_lr_ratio=0.1), 99, 10) == pytest.approx(0.1)


def scaler(**fields) -> LossScaler:
    return LossScaler(PrecisionConfig(**{"loss_scale": 1024.0, "scale_window": 3, **fields}), scaled=True)


def test_the_scale_doubles_after_a_window_of_applied_steps():
    one = scaler()
    seen = []
    for _ in range(7):
        one.update(True)
        seen.append(one.scale)
    assert seen == [1024, 1024, 2048, 2048, 2048, 4096, 4096]


def test_an_overflow_halves_it_and_starts_the_window_again():
    one = scaler()
    for applied in (True, True, False, True, True):
        one.update(applied)
    assert one.scale == 512
    one.update(True)
    assert one.scale == 1024


def test_the_scale_has_a_floor_and_a_ceiling():
    small, large = scaler(loss_scale=2.0), scaler(loss_scale=LARGEST / 2, scale_window=1)
    for _ in range(5):
        small.update(False)
        large.update(True)
    assert (small.scale, large.scale) == (SMALLEST, LARGEST)


def test_its_state_continues_exactly():
    one, other = scaler(), scaler()
    one.update(False), one.update(True)
    other.load_state(one.state())
    for _ in range(4):
        one.update(True), other.update(True)
        assert one.scale == other.scale


def test_a_run_that_does_not_scale_stays_at_one():
    one = LossScaler(PrecisionConfig(), scaled=False)
    one.update(False)
    one.load_state({"scale": 4096.0, "applied_in_a_row": 7})
    one.update(True)
    assert one.scale == 1.0


@pytest.mark.parametrize("schedule", ["constant", "inverse_sqrt"])
def test_an_end_of_a_decay_without_one_is_refused(schedule):
    with pytest.raises(ConfigError, match="has no decay that ends"):
        tiny_plan(optimizer__schedule=schedule, optimizer__decay_steps=3)
