"""The plan that a strategy is compared with has one rank, whatever degrees and kinds the plan has."""

from __future__ import annotations

import pytest

from parallelrun.training.verify.checked import single_device
from tests.plans import tiny_config, tiny_plan


@pytest.mark.parametrize(
    "overrides",
    [
        {"dp": 2, "tp": 2, "pp": 2, "strategy.pipeline.kind": "interleaved"},
        {"cp": 2, "tp": 2},
        {"cp": 4, "dp": 2, "strategy.data.kind": "fsdp", "strategy.context.kind": "usp", "model.heads": 4},
        {"cp": 2, "strategy.context.order": "striped"},
        {"dp": 2, "ep": 2, "model.experts": 4},
        {"dp": 2, "strategy.data.kind": "ps", "servers": 1},
    ],
)
def test_one_rank_and_the_same_batch(overrides):
    config, plan = tiny_config(overrides), tiny_plan(overrides)
    _, alone = single_device(config, plan)
    assert alone.world == 1 and set(alone.degrees.values()) == {1} and alone.servers == 0
    assert alone.batch.global_batch == plan.batch.global_batch
