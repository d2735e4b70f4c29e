"""The predicted time of a step where ranks share the cores of a host: CPUs, parameter servers, other models."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallelrun.config.schema.cluster_schema import ClusterConfig
from parallelrun.planner.contract.pipeline_schedule import Action
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.predict import simulate
from parallelrun.planner.predict.step_time import blocks, cores, servers, spread
from parallelrun.planner.predict.step_time.rates import rates_of
from parallelrun.planner.predict.step_time.step import step_time, why_unknown
from tests.unit.config.test_presets import plan as planned
from tests.unit.planner.predict.step_time.test_step_time import with_stack

HOST = ClusterConfig(
    name="host", nodes=1, cores=2, peak_tflops=0.1, memory_gb_s=10.0, intra_gb_s=4.0, kernel_us=0.0, operation_us=5.0,
    collective_us=100.0, step_us=1000.0, convolution_efficiency=0.5,
)  # fmt: skip
SMALL = ("model=gpt", "model.layers=4", "model.seq=32", "dataset=synthetic")


def parts(plan: Plan, cluster: ClusterConfig = HOST) -> dict[str, float]:
    found = step_time(plan, cluster)
    assert found is not None, why_unknown(plan, cluster)
    assert sum(found.parts.values()) == pytest.approx(found.step_s, rel=1e-12)
    assert 0 < found.mfu < 1
    tokens = plan.batch.global_batch * max(1, plan.spec.seq)  # servers are ranks too
    assert found.tokens_per_s_per_gpu * plan.world * found.step_s == pytest.approx(tokens)
    return dict(found.parts)


def test_ranks_beyond_the_cores_take_turns():
    """Twice the ranks with the same samples each: every part of a rank's own work takes twice as long."""
    two, four = (parts(planned(*SMALL, "strategy=ddp", f"dp={dp}", "local_batch=4")) for dp in (2, 4))
    for name in (blocks.PRODUCTS, blocks.HOST, spread.OPTIMIZER, spread.FIXED):
        assert four[name] == pytest.approx(2 * two[name], rel=1e-9), name


def test_a_rank_with_several_cores_computes_with_as_many_threads():
    plan = planned(*SMALL, "strategy=single")
    alone, helped = (parts(plan, replace(HOST, cores=cores)) for cores in (1, 2))
    assert helped[blocks.MEMORY_BOUND] == pytest.approx(alone[blocks.MEMORY_BOUND] / (1 + HOST.thread_efficiency))
    assert helped[blocks.HOST] == alone[blocks.HOST], "a second thread issues no operations"


def test_attention_on_cores_depends_on_the_size_of_heads():
    """The same FLOPs by heads of 16 and of 8 numbers: narrow heads take 2 x 1.4 times as long."""
    wide, narrow = (
        parts(planned(*SMALL, "model.hidden=64", f"model.heads={heads}", "strategy=single")) for heads in (4, 8)
    )
    assert narrow[blocks.ATTENTION] == pytest.approx(2.8 * wide[blocks.ATTENTION])


def test_nothing_is_hidden_where_the_host_computes():
    plan = planned(*SMALL, "strategy=ddp", "dp=2")
    assert step_time(plan, HOST).parts == step_time(with_stack(plan, data_overlap=False), HOST).parts


def test_a_device_for_each_rank_has_the_rates_of_the_keys():
    plan, cluster = planned(*SMALL, "strategy=ddp", "dp=4"), replace(HOST, cores=None)
    rates = rates_of(cluster, "fp32")
    assert cores.of_a_rank(rates, plan, cluster) is rates


F = [Action("F", 0, 0)]


@pytest.mark.parametrize(("most", "seconds"), [(4, 3.0), (3, 3.0), (2, 3.5), (1, 6.0), (0.5, 12.0)])
def test_working_ranks_share_the_cores_and_leave_them_when_they_end(most, seconds):
    """1, 2 and 3 seconds of work. On two cores: all work at 2/3 until 1.5, then two at full rate, one from 2.5 on."""
    orders = [[Action("F", 0, 0)], [Action("F", 0, 1)] * 2, [Action("F", 0, 2)] * 3]
    assert cores.shared(orders, {"F": [1.0]}, most) == pytest.approx(seconds)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_a_pipeline_on_shared_cores_is_between_its_bounds(schedule):
    shape = (*SMALL, "model.layers=8", "strategy=ptdp", "pp=4", "microbatches=4", "global_batch=8")
    plan = planned(*(word for word in shape if word != "model.layers=4"), f"schedule={schedule}")
    times = {kind: [seconds] * len(plan.stages) for kind, seconds in (("F", 1.0), ("B", 2.0), ("I", 1.0), ("W", 1.0))}
    full, ideal = simulate.run(plan, times).makespan, simulate.run(plan, times).ideal
    assert cores.makespan(plan, replace(HOST, cores=4), times, ideal) == pytest.approx(full)
    shared = cores.makespan(plan, HOST, times, ideal)
    assert max(ideal, full / 2) < shared < full
    assert cores.shared(plan.pipeline.actions(plan), times, 4) == pytest.approx(full), "as many cores as ranks"


def test_a_schedule_of_many_actions_gets_a_bound(monkeypatch):
    plan = planned(*SMALL, "schedule=1f1b", "strategy=ptdp", "pp=4", "microbatches=4", "global_batch=8")
    times = {kind: [1.0] * 4 for kind in "FBIW"}
    monkeypatch.setattr(cores, "MOST_ACTIONS", 1)
    assert cores.makespan(plan, HOST, times, 8.0) == pytest.approx(8.0)


PS = (*SMALL, "strategy=ps")


def test_servers_exchange_what_their_messages_say():
    few, many = (parts(planned(*PS, "dp=2", f"servers={n}", "local_batch=4", "model.hidden=128")) for n in (1, 2))
    assert many[spread.DATA] < few[spread.DATA], "two servers share the bytes"
    assert many[spread.OPTIMIZER] < few[spread.OPTIMIZER]
    wide = replace(HOST, intra_gb_s=8.0, collective_us=0.0, hop_us=0.0, operation_us=0.0)
    narrow = replace(wide, intra_gb_s=4.0)
    plan = planned(*PS, "dp=2", "servers=1", "local_batch=4")
    assert parts(plan, narrow)[spread.DATA] == pytest.approx(2 * parts(plan, wide)[spread.DATA], rel=1e-6)


def test_servers_wait_while_workers_compute():
    """Two workers and a server on two cores: the workers compute as fast as two replicas do."""
    beside = parts(planned(*PS, "dp=2", "servers=1", "local_batch=4"))
    alone = parts(planned(*SMALL, "strategy=ddp", "dp=2", "local_batch=4"))
    for name in (blocks.PRODUCTS, blocks.HOST, blocks.MEMORY_BOUND):
        assert beside[name] == pytest.approx(alone[name]), name


@pytest.mark.parametrize(("consistency", "updates"), [("sync", 1), ("async", 16)])
def test_a_server_makes_an_update_for_each_push_unless_its_workers_are_in_step(consistency, updates):
    plan = planned(*PS, "dp=16", f"consistency={consistency}", "servers=1", "local_batch=1")
    rates = replace(rates_of(HOST, "fp32"), intra_bytes_s=1e18, collective_s=0.0, hop_s=0.0)
    waiting, update = servers.exchange(plan, HOST, rates, 0.0)
    assert update > 0 and waiting + update == pytest.approx(updates * update, rel=1e-3)


def test_servers_beside_several_gpus_have_no_known_rate():
    plan = planned(*PS, "dp=2", "servers=1")
    assert "parameter servers" in why_unknown(plan, replace(HOST, cores=None, gpus_per_node=8))
    assert not why_unknown(plan, replace(HOST, cores=None, gpus_per_node=1, inter_gb_s=1.0))


@pytest.mark.parametrize("model", ["resnet", "alexnet"])
def test_convolutions_have_a_rate_of_their_own(model):
    plan = planned(f"model={model}", "dataset=synthetic", "strategy=single", "model.image=64", "global_batch=4")
    slow, fast = (parts(plan, replace(HOST, convolution_efficiency=e)) for e in (0.25, 0.5))
    layers = [layer for layer in plan.spec.layers() if layer.parameters and layer.layer_role != "batch_norm"]
    dense = sum(2.0 * layer.in_features * layer.out_features for layer in layers if not layer.areas)
    rate = 1e11 * (1 + HOST.thread_efficiency)
    seconds = 3 * 4 * (plan.spec.forward_flops - dense) / rate
    assert slow[blocks.PRODUCTS] - fast[blocks.PRODUCTS] == pytest.approx(seconds * (1 / 0.25 - 1 / 0.5), rel=1e-6)
    plan = planned(f"model={model}", "dataset=synthetic", "strategy=tp", "tp=2", "model.image=64", "global_batch=4")
    slow, fast = (parts(plan, replace(HOST, convolution_efficiency=e)) for e in (0.25, 0.5))
    halves = [layer.convolution_flops / 2 for layer in layers if layer.areas and layer.layer_role]
    seconds = 3 * 4 * (plan.spec.forward_flops - dense - sum(halves)) / 1e11  # each rank has one of the two cores
    assert slow[blocks.PRODUCTS] - fast[blocks.PRODUCTS] == pytest.approx(seconds * (1 / 0.25 - 1 / 0.5), rel=1e-6)


def test_an_mlp_needs_no_convolutions():
    plan = planned("model=mlp", "dataset=synthetic", "strategy=single")
    assert parts(plan, replace(HOST, convolution_efficiency=None))[blocks.PRODUCTS] > 0
