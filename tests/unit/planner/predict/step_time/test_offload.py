"""The predicted time of what is offloaded, and where offloading is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallelrun.base.errors import ConfigError
from parallelrun.planner.contract.optimizers import muon_matrices
from parallelrun.planner.predict import prediction
from parallelrun.planner.predict.step_time.matrices import orthogonalising_s
from parallelrun.planner.predict.step_time.rates import rates_of
from parallelrun.planner.predict.step_time.step import step_time, why_unknown
from tests.plans import tiny_plan
from tests.unit.config.test_presets import composed
from tests.unit.config.test_presets import plan as planned

FSDP = ("model=llama3_8b", "strategy=fsdp", "cluster=h100_dgx", "gpus=8", "precision=bf16", "global_batch=16")
CLUSTER = composed(*FSDP).config.cluster
LINK, MEMORY = 64e9 * CLUSTER.link_efficiency, 76.8e9 * CLUSTER.memory_efficiency


def test_computation_hides_the_inputs_of_blocks_unless_the_link_is_slow():
    full, offload = (planned(*FSDP, "micro_batch=1", f"recompute={kind}") for kind in ("full", "offload"))
    assert step_time(offload, CLUSTER).step_s == pytest.approx(step_time(full, CLUSTER).step_s)
    slow = replace(CLUSTER, host_gb_s=0.2)
    sent = 32 * 2 * 8192 * 4096 * 2 * 2  # layers x microbatches x tokens x features x bytes, there and back
    time = step_time(offload, slow)
    computed = time.step_s - time.parts["offload"]
    assert 0 < sent / (LINK / 64 * 0.2) - time.parts["offload"] < computed


def test_an_update_on_the_host_takes_the_rates_of_link_and_host():
    plan = planned(*FSDP, "optimizer.offload=true")
    size = 4 * plan.spec.num_parameters / 8
    assert step_time(plan, CLUSTER).parts["optimizer"] == pytest.approx(size * (3 / LINK + 7 / MEMORY), rel=1e-3)
    memory = prediction.memory(plan, 0)
    assert memory.optimizer == 0 and memory.host == pytest.approx(4 * size, rel=1e-3)
    assert memory.total == prediction.memory(planned(*FSDP), 0).total - 2 * memory.host / 4


def test_matrices_of_muon_go_to_the_device_and_back_and_have_one_state():
    muon = (*FSDP, "optimizer=muon")
    plan, there = (planned(*muon, f"optimizer.offload={value}") for value in ("true", "false"))
    size = 4 * plan.spec.num_parameters / 8
    matrices = sum(plan.spec.parameters[name].numel for name in muon_matrices(plan)) / 8
    of_matrices = orthogonalising_s(there, CLUSTER, rates_of(CLUSTER, "bf16"))
    moved = (3 * size + 2 * 2 * matrices) / LINK + (3 * size + 2 * (2 * size - 4 * matrices)) / MEMORY
    assert step_time(plan, CLUSTER).parts["optimizer"] == pytest.approx(moved + of_matrices, rel=1e-3)
    memory = prediction.memory(plan, 0)
    assert memory.optimizer == 0 and memory.host == pytest.approx(4 * (size - matrices), rel=1e-3)


def test_a_cluster_without_the_rate_has_no_time():
    plan, cluster = planned(*FSDP, "optimizer.offload=true"), replace(CLUSTER, host_gb_s=None)
    assert step_time(plan, cluster) is None and why_unknown(plan, cluster) == "cluster.host_gb_s is not given"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"dp": 2, "servers": 1, "strategy.data.kind": "ps"}, "servers have the optimizer's state"),
        ({"sdc.every": 2}, "sdc.every compares the optimizer's state"),
    ],
)
def test_state_on_the_host_that_others_need_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        tiny_plan({**overrides, "optimizer.offload": True})
