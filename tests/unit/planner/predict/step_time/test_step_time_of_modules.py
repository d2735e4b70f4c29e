"""The predicted time of a user's own module: by what computes, not by what it is called."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallelrun.planner.predict.step_time import blocks
from parallelrun.planner.predict.step_time.step import step_time, why_unknown
from tests.unit import user_net
from tests.unit.config.test_presets import composed
from tests.unit.config.test_presets import plan as planned

SIZES = (
    "model.hidden=2048", "model.seq=2048", "model.vocab=32000", "dataset=synthetic", "strategy=ddp", "dp=8",
    "precision=bf16", "global_batch=64", "micro_batch=4", "cluster=h100_dgx",
)  # fmt: skip
MODULE = ("model=module", "model.arguments={depth: 4, head_dim: 128}", "model.blocks=[embed,layers.*,head]")
ROLES = (
    'model.roles={"layers.*.[qkv]": column_parallel, "layers.*.out": row_parallel, "layers.*.fc1": column_parallel, '
    '"layers.*.fc2": row_parallel}'
)
SOURCE = f"model.source={user_net.__file__}"
IMAGES = ("model=module", f"{SOURCE}:build_patches", "model.hidden=32", "model.vocab=10", "dataset=synthetic", "dp=2")


@pytest.mark.parametrize("more", [(), (ROLES,)])
def test_a_module_takes_about_as_long_as_the_model_that_it_repeats(more):
    overrides = (*SIZES, *MODULE, f"{SOURCE}:build", *more)
    plan, cluster = planned(*overrides), composed(*overrides).config.cluster
    assert not cluster.convolution_efficiency and not plan.spec.has_convolutions
    time = step_time(plan, cluster)
    own = step_time(planned(*SIZES, "model=gpt", "model.layers=4", "model.heads=16"), cluster)
    assert time is not None and own is not None
    assert time.step_s == pytest.approx(own.step_s, rel=0.15)
    assert time.parts[blocks.PRODUCTS] == pytest.approx(own.parts[blocks.PRODUCTS], rel=0.15)
    assert time.parts[blocks.ATTENTION] > 0


def test_heads_are_split_over_tp_and_layers_without_a_role_are_not():
    overrides = (*SIZES[:4], "strategy=ptdp", "dp=1", "precision=bf16", "global_batch=4", "cluster=h100_dgx", *MODULE)
    overrides = (*overrides, f"{SOURCE}:build", ROLES)
    cluster = composed(*overrides).config.cluster
    one, two = (step_time(planned(*overrides, "pp=1", f"tp={tp}"), cluster) for tp in (1, 2))
    assert one is not None and two is not None
    assert one.parts[blocks.ATTENTION] == pytest.approx(2 * two.parts[blocks.ATTENTION])
    assert one.parts[blocks.PRODUCTS] > two.parts[blocks.PRODUCTS] > one.parts[blocks.PRODUCTS] / 2


def test_a_module_with_convolutions_needs_their_rate():
    plan, cluster = planned(*IMAGES, "cluster=h100_dgx"), composed(*IMAGES, "cluster=h100_dgx").config.cluster
    assert step_time(plan, cluster) is None
    assert why_unknown(plan, cluster) == "the model has convolutions, and cluster.convolution_efficiency is not given"
    (block,) = plan.spec.blocks
    assert block.convolution_flops == 2 * 3 * 4**2 * 32 * 4**2
    times = [step_time(plan, replace(cluster, convolution_efficiency=part)) for part in (0.25, 0.5)]
    slow, fast = (time.parts[blocks.PRODUCTS] for time in times if time)
    seconds = 3 * plan.batch.micro_batch * block.convolution_flops / 989e12
    assert slow - fast == pytest.approx(seconds * (1 / 0.25 - 1 / 0.5), rel=1e-6)
