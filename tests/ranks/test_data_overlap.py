"""When buckets are sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from parallelrun.training.loop.schedules import LossScaler
from parallelrun.training.loop.step import train_step
from tests.pool import run_ranks
from tests.ranks.data_body import start

SMALL_BUCKETS = {"strategy.data.bucket_mb": 0.005}


def events(overrides: dict[str, Any]) -> list[str]:
    """`microbatch` (one starts), `launch` and `finish` (backward is over) in the order they happen in one step."""
    training = start({**SMALL_BUCKETS, **overrides})
    seen: list[str] = []
    for bucket in training.data._buckets:
        bucket.launch = _noted(bucket.launch, "launch", seen)
    training.model_parts[0].register_forward_pre_hook(_noted(lambda *_: None, "microbatch", seen))
    training.data.launch_gradients = _noted(training.data.launch_gradients, "finish", seen)
    train_step(training, 1, 0.1, LossScaler(training.config.precision, False))
    return seen


def _noted(function: Callable, word: str, seen: list[str]) -> Callable:
    def noted(*arguments: Any, **named: Any) -> Any:
        seen.append(word)
        return function(*arguments, **named)

    return noted


@pytest.mark.parametrize("kind", ["ddp", "zero1", "ring"])
def test_buckets_leave_during_the_last_backward_and_none_before(kind):
    for seen in run_ranks(2, events, {"dp": 2, "microbatches": 4, "strategy.data.kind": kind}):
        assert seen[:4] == ["microbatch"] * 4
        assert seen[-1] == "finish"
        assert len(seen) > 10 and set(seen[4:-1]) == {"launch"}


def test_under_zero_bubble_buckets_wait_for_the_schedule():
    overrides = {"dp": 2, "pp": 2, "strategy.pipeline.kind": "zero_bubble", "model.layers": 4}
    for seen in run_ranks(4, events, overrides):
        assert "launch" in seen
        assert seen.index("finish") < seen.index("launch")
