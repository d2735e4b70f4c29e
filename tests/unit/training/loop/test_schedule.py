"""Learning rates by value, and the fp16 loss scale."""

from __future__ import annotations

import pytest

from parallelrun.config.schema.run_schema import OptimizerConfig, PrecisionConfig
from parallelrun.training.loop.schedules import LARGEST, SMALLEST, LossScaler, learning_rate


def rates(steps: int, **fields) -> list[float]:
    config = OptimizerConfig(**{"lr": 1.0, "warmup": 0, "min_lr_ratio": 0.0, **fields})
    return [learning_rate(config, step, steps) for step in range(1, steps + 1)]


def test_warmup_rises_in_equal_steps_to_the_peak():
    assert rates(8, schedule="constant", warmup=4) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1])


def test_linear_falls_to_its_floor_at_the_last_step():
    assert rates(5, schedule="linear", warmup=1) == pytest.approx([1, 0.75, 0.5, 0.25, 0])
    assert rates(5, schedule="linear", warmup=1, min_lr_ratio=0.2) == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])


def test_cosine_is_half_way_down_in_the_middle():
    found = rates(9, schedule="cosine", warmup=1, min_lr_ratio=0.1)
    assert found[0] == pytest.approx(1.0)
    assert found[4] == pytest.approx(0.55)
    assert found[2] == pytest.approx(0.1 + 0.9 * (1 + 2**-0.5) / 2)
    assert found[-1] == pytest.approx(0.1)


def test_without_warmup_the_first_step_is_already_on_the_way_down():
    assert rates(2, schedule="linear") == pytest.approx([0.5, 0.0])


def test_a_run_shorter_than_its_warmup_and_steps_beyond_the_end():
    assert rates(3, schedule="cosine", warmup=10) == pytest.approx([0.1, 0.2, 0.3])
    assert learning_rate(OptimizerConfig(lr=1.0, warmup=0, min_lr_ratio=0.1), 99, 10) == pytest.approx(0.1)


def test_lr_scale_multiplies_everything():
    assert rates(4, schedule="linear", warmup=2, lr_scale=3.0) == pytest.approx([1.5, 3.0, 1.5, 0.0])


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
