"""The account of a plan: collectives, memory, FLOPs, against closed forms and against every single rank."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from parallelrun.config.schema.cluster_schema import ClusterConfig
from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.pieces.hosts import mesh_dims, ranks_in_node, rate_gb_s, stays_in_node
from parallelrun.planner.predict import cluster_cost, prediction, simulate
from parallelrun.planner.predict.traffic import traffic_of
from tests.matrix import FULL
from tests.plans import tiny_plan
from tests.unit.config.test_presets import plan as planned

PLANS = [
    {"pp": 2, "dp": 3, "tp": 2, "strategy.data.kind": "zero1", "model.vocab": 35, "global_batch": 12},
    {"dp": 3, "tp": 2, "strategy.data.kind": "fsdp", "strategy.tensor.sequence_parallel": True, "global_batch": 12},
    {"dp": 4},
    {"dp": 2, "strategy.data.kind": "zero1", "model.vocab": 35},
    {"dp": 3, "pp": 2, "strategy.data.kind": "zero2", "model.vocab": 35, "global_batch": 12},
    {"dp": 2, "pp": 2, "tp": 2, "strategy.data.kind": "local_sgd", "model.vocab": 35},
    {"dp": 4, "strategy.data.kind": "fsdp", "strategy.data.shard": 2, "tp": 2},
    {"tp": 4, "model.vocab": 37},
    {"tp": 4, "model.kv_heads": 2, "strategy.tensor.sequence_parallel": True},
    {"pp": 4, "dp": 2, "microbatches": 4},
    {"pp": 2, "schedule": "zbv"},
    {"pp": 2, "schedule": "interleaved", "tp": 2, "dp": 2, "model.vocab": 33},
    {"pp": 3, "tp": 2, "model.layers": 7, "model.tied_embeddings": False, "microbatches": 4},
    {"pp": 2, "dp": 2, "tp": 2, "strategy.data.kind": "fsdp", "model.vocab": 35},
]
EXPERTS = [
    {"dp": 4, "ep": 2, "tp": 2, "pp": 2, "strategy.data.kind": kind, "model.experts": 8, "model.expert_period": 2,
     "model.router.kind": "gshard", "model.router.capacity_factor": 1.25}
    for kind in ("ddp", "zero1", "fsdp")
]  # fmt: skip
RINGS = [
    {"dp": 7, "tp": 2, "strategy.data.kind": "ring", "global_batch": 14, "strategy.data.bucket_mb": 0.01},
    {"dp": 3, "tp": 2, "pp": 2, "strategy.data.kind": "ring", "global_batch": 12, "model.vocab": 37},
    {"dp": 3, "strategy.data.kind": "ring", "global_batch": 12, "strategy.data.algorithm": "halving_doubling"},
    {"dp": 4, "tp": 2, "strategy.data.kind": "ring", "strategy.data.algorithm": "hierarchical", "model.vocab": 37},
    {"dp": 4, "strategy.data.kind": "horovod", "strategy.data.algorithm": "ring",
     "strategy.data.process_sets": [[3, 0, 2, 1]], "strategy.data.bucket_mb": 0.01},
]  # fmt: skip


@pytest.mark.parametrize("overrides", PLANS + RINGS + EXPERTS, ids=str)
def test_the_totals_are_the_sum_over_every_rank(overrides):
    plan = tiny_plan(overrides)
    calls, payload = Counter(), Counter()
    for rank in range(plan.world):
        for row in prediction.collectives(plan, rank):
            calls[row.axis, row.operation, row.purpose] += row.calls
            payload[row.axis, row.operation, row.purpose] += row.payload_bytes
    _, rows = traffic_of(plan)
    assert {(r.axis, r.operation, r.purpose): r.total_calls for r in rows} == dict(calls)
    assert {(r.axis, r.operation, r.purpose): r.total_payload_bytes for r in rows} == dict(payload)


@pytest.mark.parametrize("overrides", PLANS + EXPERTS, ids=str)
def test_a_coordinate_s_memory_is_that_of_its_rank_that_holds_most(overrides):
    plan = tiny_plan(overrides)
    found = prediction.memories(plan)
    for pp_rank in range(plan.mesh.size("pp")):
        ranks = [rank for rank in range(plan.world) if plan.mesh.coordinate(rank)["pp"] == pp_rank]
        assert found[pp_rank].total == max(prediction.memory(plan, rank).total for rank in ranks)


@pytest.mark.parametrize("overrides", PLANS, ids=str)
def test_what_is_computed_once_for_like_ranks_is_that_of_each(overrides):
    plan = tiny_plan(overrides)
    for rank in range(plan.world):
        assert prediction.memory(plan, rank) == prediction.memory(replace(plan), rank)  # which has computed nothing yet


@pytest.mark.parametrize("overrides", PLANS, ids=str)
def test_what_is_sent_is_received_and_control_is_one_small_row(overrides):
    plan = tiny_plan(overrides)
    _, rows = traffic_of(plan)
    sent = Counter({r.purpose: r.total_calls for r in rows if r.operation == "send"})
    received = Counter({r.purpose: r.total_calls for r in rows if r.operation == "recv"})
    assert sent == received and (sum(sent.values()) > 0) == (plan.mesh.size("pp") > 1)
    (control,) = [row for row in rows if row.axis == "world"]
    assert (control.purpose, control.calls, control.group_size) == ("control", 1, plan.world)
    assert control.payload_bytes < 100


def test_one_rank_sends_nothing():
    assert prediction.collectives(tiny_plan(), 0) == []


def test_rows_are_merged_by_axis_operation_and_purpose():
    row = Collective("dp", "all_reduce", "gradients", 1, 10)
    assert prediction.merge([row, Collective("dp", "send", "x", 1, 1), row]) == [
        Collective("dp", "all_reduce", "gradients", 2, 20),
        Collective("dp", "send", "x", 1, 1),
    ]


@pytest.mark.parametrize(
    ("operation", "size", "expected"),
    [
        ("all_reduce", 4, 150),
        ("all_gather", 4, 75),
        ("reduce_scatter", 4, 75),
        ("all_to_all", 2, 50),
        ("send", 8, 100),
        ("recv", 8, 0),
        ("all_reduce", 1, 0),
    ],
)
def test_wire_bytes_are_what_a_bandwidth_optimal_algorithm_must_send(operation, size, expected):
    assert prediction.wire_bytes(Collective("dp", operation, "x", 1, 100), size) == expected


@pytest.mark.parametrize(("workers", "size"), [(2, 2), (1, 2)])
def test_servers_join_no_collective_of_all_ranks(workers, size):
    plan = tiny_plan({"dp": workers, "servers": 1, "strategy.data.kind": "ps"})
    assert prediction.group_size(plan, "world") == size


def test_memory_of_one_device_is_four_times_its_weights_under_adamw():
    plan = tiny_plan(microbatches=2)  # in the second backward pass, the gradients of the first are there
    memory = prediction.memory(plan, 0)
    weights = 4 * plan.spec.num_parameters
    assert (memory.weights, memory.gradients, memory.optimizer) == (weights, weights, 2 * weights)
    assert memory.total == 4 * weights + memory.activations + memory.temporary and memory.leaves_out


def test_zero2_shares_the_gradients_too_unless_the_schedule_leaves_them_to_its_end():
    for schedule, is_ours in ((None, True), ("1f1b", True), ("zero_bubble", False), ("zbv", False)):
        pipeline = {"schedule": schedule, "pp": 2} if schedule else {}
        one, two = (
            prediction.memory(tiny_plan({"dp": 2, "strategy.data.kind": f"zero{stage}", **pipeline}), 0)
            for stage in (1, 2)
        )
        assert (one.optimizer, one.weights) == (two.optimizer, two.weights)
        # zero1 has buckets for all gradients and this rank's half of their sum; zero2 its half. What a split backward
        # leaves in the weights comes in addition.
        in_weights = 0 if is_ours else one.weights
        assert one.gradients >= 1.49 * one.weights
        assert two.gradients == pytest.approx(0.5 * one.weights + in_weights, rel=0.05)


def test_time_of_communication_is_the_mean_over_a_round():
    cluster = ClusterConfig(intra_gb_s=1.0, latency_us=0.0)
    seconds = []
    for sync_every in (1, 10):
        overrides = {"dp": 2, "strategy.data.kind": "diloco", "strategy.data.sync_every": sync_every}
        plan = tiny_plan(overrides)
        rows = tuple(row for row in traffic_of(plan)[1] if row.purpose == "sync")
        seconds.append(cluster_cost.cost(plan, cluster, rows, 1.0).communication_s)
    assert seconds[0] == pytest.approx(10 * seconds[1]) and seconds[1] > 0


def test_the_busiest_rank_is_that_of_the_mean_over_steps():
    """The first and the last of three stages hold most weights, which travel rarely; the middle one sends both ways."""
    words = {"pp": 3, "dp": 2, "strategy.data.kind": "local_sgd", "model.vocab": 4096, "model.tied_embeddings": False}
    busiest = {every: traffic_of(tiny_plan({**words, "strategy.data.sync_every": every}))[0] for every in (1, 1000)}
    plan = tiny_plan(words)
    assert plan.mesh.coordinate(busiest[1])["pp"] != 1 and plan.mesh.coordinate(busiest[1000])["pp"] == 1


def test_flops_are_sc21_s_72_form():
    plan = tiny_plan({"dp": 2, "pp": 2, "recompute": "full"})
    b, s, layers, h, v = plan.batch.global_batch, 8, 4, 16, 32
    simulated = simulate.of_plan(plan)
    cost = cluster_cost.cost(plan, ClusterConfig(), traffic_of(plan)[1], simulated.makespan)
    assert cost.model_flops == pytest.approx(72 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h)))
    form_96 = 96 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert cost.hardware_flops == pytest.approx(form_96)
    assert cost.compute_s is None and cost.communication_s is None


def test_compute_takes_the_peak_of_the_dtype_that_computes():
    cluster = ClusterConfig(peak_tflops={"fp64": 1.0, "fp32": 2.0, "bf16": 16.0})
    times = {}
    for name in ("fp64", "fp32", "bf16", "fp16"):
        plan = tiny_plan({"precision.name": name})
        makespan = simulate.of_plan(plan).makespan
        times[name] = cluster_cost.cost(plan, cluster, (), makespan).compute_s
    assert times["fp64"] == 2 * times["fp32"] == 16 * times["bf16"] and times["fp16"] is None


def test_time_comes_from_the_cluster_s_rates_alone():
    plan = tiny_plan({"dp": 2, "strategy.data.bucket_mb": 0})
    _, rows = traffic_of(plan)
    assert max(row.calls for row in rows) > 10, "a bucket for each weight"
    makespan = simulate.of_plan(plan).makespan
    cluster = ClusterConfig(peak_tflops=1e-6, intra_gb_s=1e-3, latency_us=1000.0, gpus_per_node=2)
    cost = cluster_cost.cost(plan, cluster, rows, makespan)
    assert cost.compute_s == pytest.approx(cost.model_flops / 2 / 1e6)
    wire, calls = sum(row.wire_bytes for row in rows), sum(row.calls for row in rows)
    assert cost.communication_s == pytest.approx(wire / 1e6 + calls * 1e-3)
    assert (
        cluster_cost.cost(plan, ClusterConfig(intra_gb_s=1.0, gpus_per_node=1), rows, makespan).communication_s is None
    )


@pytest.mark.parametrize(("per_node", "inside"), [(2, {"tp"}), (4, {"tp", "dp"}), (8, {"tp", "dp", "pp"}), (3, set())])
def test_which_axes_stay_inside_a_host(per_node, inside):
    plan = tiny_plan(dp=2, tp=2, pp=2)
    cluster = ClusterConfig(gpus_per_node=per_node)
    assert {axis for axis in ("dp", "tp", "pp") if stays_in_node(plan, cluster, axis)} == inside


@pytest.mark.parametrize(
    ("overrides", "axis", "ranks", "rate"),
    [
        ({"dp": 8}, "dp", 4, 40.0),  # all 4 ranks of a host send at once
        ({"dp": 8}, "world", 4, 40.0),
        ({"dp": 4, "tp": 2}, "dp", 2, 20.0),
        ({"dp": 2, "tp": 4}, "dp", 1, 10.0),
        ({"dp": 2, "tp": 4}, "tp", 4, 100.0),
        ({"dp": 4, "tp": 2}, "tp", 2, 100.0),
        ({"dp": 8, "strategy.data.kind": "fsdp", "strategy.data.shard": 4}, "dp_shard", 4, 100.0),
        ({"dp": 8, "strategy.data.kind": "fsdp", "strategy.data.shard": 4}, "dp_replicate", 1, 10.0),
        ({"dp": 6}, "dp", 2, 20.0),  # hosts of 4 and of 2: the second decides
        ({"pp": 8, "model.layers": 8}, "pp", 4, 40.0),
    ],
)
def test_a_group_that_leaves_a_host_uses_the_ports_of_all_its_ranks_there(overrides, axis, ranks, rate):
    plan = tiny_plan({"global_batch": 48, **overrides})
    cluster = ClusterConfig(gpus_per_node=4, intra_gb_s=100.0, inter_gb_s=10.0)
    assert ranks_in_node(plan, cluster, axis) == ranks
    assert rate_gb_s(plan, cluster, axis, False) == rate
    mesh_dims = not stays_in_node(plan, cluster, axis)
    assert rate_gb_s(plan, cluster, axis, True) == (10.0 if mesh_dims else 100.0), "a message uses one port"
    assert rate_gb_s(plan, replace(cluster, inter_gb_s=90.0), axis, False) <= 100.0, "never above the rate inside"


def test_ranks_that_send_data_of_their_own_have_one_port_each():
    """All-to-alls of 4 ranks on 2 hosts, where sums use both ports of a host."""
    plan = planned("model=moe_gpt", "strategy=dropless", "dp=4", "ep=4")
    cluster = ClusterConfig(gpus_per_node=2, intra_gb_s=100.0, inter_gb_s=10.0)
    rows = {row.operation: row for row in traffic_of(plan)[1] if row.wire_bytes and row.axis in ("ep", "dp")}
    for operation, rate in (("all_to_all", 10e9), ("all_reduce", 20e9)):
        cost = cluster_cost.cost(plan, cluster, (rows[operation],), 1.0)
        assert cost.communication_s == pytest.approx(rows[operation].wire_bytes / rate), operation


@pytest.mark.parametrize("per_node", [3, 4, 6, 8])
@pytest.mark.parametrize(
    ("overrides", "axis"),
    [({"dp": 96}, "dp"), ({"dp": 90}, "dp"), ({"dp": 16, "tp": 2, "pp": 2}, "dp"), ({"dp": 12, "tp": 4}, "dp"),
     ({"dp": 16, "cp": 2, "tp": 3, "model.heads": 6, "model.hidden": 66}, "dp_cp"), ({"dp": 24, "pp": 2}, "dp+pp")],
)  # fmt: skip
def test_the_ranks_of_a_large_group_on_a_host_are_those_of_a_smaller_one(per_node, overrides, axis):
    plan = tiny_plan({"global_batch": 1440, "micro_batch": 1, **overrides})
    every = Counter(rank // per_node for rank in plan.mesh.group_of(0, *mesh_dims(plan, axis)))
    assert ranks_in_node(plan, ClusterConfig(gpus_per_node=per_node), axis) == min(every.values())


def test_rows_with_and_without_a_bound_are_added_and_held_to_it() -> None:
    exact = Collective("ep", "all_to_all", "experts", 2, 100)
    bounded = Collective("ep", "all_to_all", "experts", 2, 60, most_bytes=240)
    (row,) = prediction.merge([exact, bounded, bounded])
    assert row == Collective("ep", "all_to_all", "experts", 6, 220, most_bytes=580)
    assert row.allows(6, 580) and row.allows(6, 0) and not row.allows(6, 581) and not row.allows(5, 220)
    (plain,) = prediction.merge([exact, exact])
    assert plain.most_bytes is None and plain.allows(4, 200) and not plain.allows(4, 199)


def test_a_row_of_a_run_is_judged_as_its_prediction_says() -> None:
    row = {"calls": 1, "payload_bytes": 90, "predicted_calls": 1, "predicted_payload_bytes": 80}
    assert not prediction.matches_prediction(row)
    assert prediction.matches_prediction({**row, "predicted_most_bytes": 90})
    assert not prediction.matches_prediction({**row, "predicted_most_bytes": 89})


RECOMPUTE = ("none", "selective", "full")
SCHEDULES = ["none", "naive", "gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev"]
LITTLE_TO_COMPUTE = {"model.hidden": 64, "model.vocab": 64, "model.seq": 8, "model.layers": 8, "model.heads": 8}
STRATEGIES: list[dict[str, object]] = [
    {},
    {"model.norm": "rmsnorm", "model.activation": "swiglu", "model.position": "rope", "model.kv_heads": 4},
    {"tp": 2},
    {"tp": 2, "strategy.tensor.sequence_parallel": True, "strategy.tensor.overlap": False},
    {"tp": 4, "layout": "2d"},
    {"tp": 8, "layout": "2.5d", "depth": 2},
    {"tp": 8, "layout": "3d", "strategy.tensor.overlap": False},
    # Twice the tokens: at the peak is an expert's gradient in bf16 and in fp32, which few tokens do not outweigh.
    {"dp": 2, "model.experts": 4, "ep": 2, "model.seq": 16},
    {"dp": 2, "model.experts": 4, "ep": 2, "model.seq": 16, "strategy.expert.kind": "dropless",
     "strategy.expert.chunks": 2},
    *({"dp": 2, "strategy.data.kind": kind} for kind in ("zero1", "fsdp", "horovod", "ring", "local_sgd", "diloco")),
]  # fmt: skip


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_bf16_never_needs_more_memory_than_fp32(strategy):
    """Weights outweigh activations here: a rounded copy of them, of a microbatch or of a step, would be too much.

    Unless all is asked for, every second schedule is tried, the others with the next strategy, with one way to
    recompute, another one for each strategy.
    """
    for number, schedule in enumerate(SCHEDULES, STRATEGIES.index(strategy)):
        if not FULL and number % 2:
            continue
        for recompute in RECOMPUTE if FULL else RECOMPUTE[number % 3 :][:1]:
            sizes = {"global_batch": 16, "microbatches": 1 if schedule == "naive" else 4, "recompute": recompute}
            pipeline = {} if schedule == "none" else {"pp": 2, "schedule": schedule}
            wanted = {**LITTLE_TO_COMPUTE, **sizes, **pipeline, **strategy}
            plans = [tiny_plan({**wanted, "precision.name": name}) for name in ("bf16", "fp16", "fp32")]
            bf16, fp16, fp32 = ([one.total for one in prediction.memories(plan).values()] for plan in plans)
            assert bf16 == fp16 and all(a <= b for a, b in zip(bf16, fp32, strict=True)), (schedule, recompute)


def test_bf16_never_needs_more_memory_with_servers():
    for strategy in ({"strategy.data.kind": "ps", "dp": 2}, {"model.name": "mlp", "pp": 2, "schedule": "gpipe"}):
        bf16, fp32 = (tiny_plan({**strategy, "precision.name": name}) for name in ("bf16", "fp32"))
        for rank in range(bf16.world):
            assert prediction.memory(bf16, rank).total <= prediction.memory(fp32, rank).total
