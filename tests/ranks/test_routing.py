"""Layers with experts once a step, on real ranks: every rank knows what one device would have seen, and moves alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallelrun.distributed.comm.counter import CommunicationCounter
from parallelrun.planner.pieces.router_settings import PURPOSE
from parallelrun.planner.predict import prediction
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.training.loop.build import Training, build
from parallelrun.training.loop.router_step import RoutingUpdater
from parallelrun.training.loop.schedules import LossScaler
from parallelrun.training.loop.step import measure, train_step
from parallelrun.training.verify.trace import Trace, _gather
from tests.matrix import FULL, shared
from tests.parity import assert_equal, parity
from tests.plans import tiny_config
from tests.pool import run_ranks

STEPS = 3 if FULL else 2
EXPERTS: dict[str, Any] = {
    "model.experts": 4, "model.router.kind": "gshard", "model.router.second_expert": "random",
    "model.router.capacity_factor": 0.5, "model.router.min_capacity": 1, "model.router.aux_coefficient": 0.5,
    "model.router.bias_rate": 0.02, "model.router.z_coefficient": 0.01, "precision.name": "fp64", "optimizer.lr": 0.1,
    "optimizer.name": "sgd",
}  # fmt: skip
PLANS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "tp, sequence parallel": {"tp": 2, "strategy.tensor.sequence_parallel": True},
    "pp, zero bubble": {"pp": 2, "schedule": "zero_bubble"},
    "fsdp, recompute": {"dp": 2, "strategy.data.kind": "fsdp", "recompute": "full", "microbatches": 2},
    "ep": {"dp": 2, "ep": 2},
    "ep of dp, recompute": {"dp": 4, "ep": 2, "recompute": "full"},
    "ep x tp x pp" if FULL else "ep x pp": {
        **({"tp": 2} if FULL else {}),
        "dp": 2,
        "ep": 2,
        "pp": 2,
        "schedule": "1f1b",
        "microbatches": 2,
    },
}


def seen(overrides: dict[str, Any]) -> dict[str, Any]:
    """One rank: what every step's routing was, and where the biases are after the last, whole, by name.

    Counted: a step's payload of the exchange, and of the all-to-alls of all ranks.
    """
    torch.set_num_threads(1)
    config = tiny_config({**EXPERTS, **overrides})
    plan = resolve(config)
    training = build(config, plan, torch.device("cpu"))
    scaler = LossScaler(config.precision, scaled=False)
    layers = []
    for step in range(1, STEPS + 1):
        measure(training)  # what it routes and sends is not the step's
        with CommunicationCounter(training.mesh) as counter:
            train_step(training, step, config.optimizer.lr, scaler)
        layers.append(training.routing.described())
    sent = {(row.axis, row.operation, row.purpose): row for row in counter.rows()}
    expected = {row.axis: row for row in prediction.collectives(plan, training.mesh.rank) if row.purpose == PURPOSE}
    bytes_sent = torch.tensor(float(sum(row.payload_bytes for key, row in sent.items() if key[1] == "all_to_all")))
    if plan.world > 1:
        dist.all_reduce(bytes_sent)
    whole = _gather(training, lambda p: p.tensor.detach(), Trace())  # asserts that the owners cover everything once
    return {
        "layers": layers,
        "exchange": sent.get(("world", "all_reduce", PURPOSE)),
        "predicted": expected.get("world"),
        "all_to_all_bytes": int(bytes_sent),
        "bias": {p.name: p.tensor.detach().tolist() for p in training.data.frozen},
        "whole": {name: value.tolist() for name, value in whole.items() if name.endswith("selection_bias")},
    }


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    (result,) = run_ranks(1, seen, {})
    return result


@pytest.mark.parametrize("name", shared(PLANS))
def test_every_rank_knows_what_one_device_would_have_seen(name: str, alone: dict[str, Any]) -> None:
    results = run_ranks(resolve(tiny_config({**EXPERTS, **PLANS[name]})).world, seen, PLANS[name])
    for result in results:
        for step, expected in zip(result["layers"], alone["layers"], strict=True):
            assert [layer["layer"] for layer in step] == ["layers.1.moe", "layers.3.moe"]
            for layer, one in zip(step, expected, strict=True):
                assert layer["load"] == one["load"] and layer["kept"] == one["kept"]  # counts: to the last token
                for key in ("drop_first", "drop_second", "overflow", "aux", "z_loss", "router_entropy", "max_vio"):
                    assert layer[key] == pytest.approx(one[key], rel=1e-10), key
        exchange, predicted = result["exchange"], result["predicted"]
        assert (exchange.calls, exchange.payload_bytes) == (1, 2 * (2 * 4 + 8 + 1) * 8)
        assert predicted is not None and predicted.allows(exchange.calls, exchange.payload_bytes)
        said = sum(layer["all_to_all_bytes"] for layer in result["layers"][-1])
        assert said == result["all_to_all_bytes"] and (said > 0) == ("ep" in PLANS[name])
    assert results[0]["whole"] == alone["whole"] and any(any(bias) for bias in alone["whole"].values())


def test_the_planted_bugs_would_be_seen(alone: dict[str, Any]) -> None:
    """What the test above rests on: tokens are dropped, loads are uneven and differ from step to step."""
    loads = [tuple(layer["load"]) for step in alone["layers"] for layer in step]
    assert len(set(loads)) == len(loads) and all(len(set(load)) > 1 for load in loads)
    assert all(layer["drop_first"] > 0 and layer["overflow"] > 0 for step in alone["layers"] for layer in step)


def data(**strategy: Any) -> dict[str, Any]:
    return {f"strategy.data.{key}": value for key, value in strategy.items()}


REPLAYED: dict[str, dict[str, Any]] = {
    "replicas that seldom meet": {"dp": 2, **data(kind="local_sgd", sync_every=2)},
    "compressed gradients": {"dp": 2, **data(kind="ddp", compression="powersgd")},
    "a replica without data": {"dp": 2, **data(kind="horovod", worker_batches=(5, 1))},
}


@pytest.mark.parametrize("name", REPLAYED)
def test_replicas_of_a_replayed_way_move_by_the_load_of_all(name: str) -> None:
    """Against the replicas one after the other in one process, their counts added up plainly."""
    document = parity({**EXPERTS, "verify.steps": 3, **REPLAYED[name]})
    assert_equal(document)
    assert document["equivalence"] == "replay"


def forget_the_scale_of_replicas(training: Training) -> None:
    training.routing.begin_step = lambda scale, samples: RoutingUpdater.begin_step(training.routing, 2 * scale, samples)


def move_by_the_own_load(training: Training) -> None:
    routing, collect = training.routing, training.routing.collect
    own: list[Any] = []

    def keep() -> Any:
        own[:] = [collect().clone()]
        return own[0].clone()

    routing.collect = keep
    routing.finish_step = lambda applied: RoutingUpdater.finish_step(routing, applied, own[0])


def move_in_one_replica_only(training: Training) -> None:
    if training.mesh.coordinate.get("dp", 0):
        finish = training.routing.finish_step
        training.routing.finish_step = lambda applied: finish(False)


def count_auxiliary_on_each_tensor_rank(training: Training) -> None:
    size = training.mesh.group("tp").size
    training.routing.begin_step = lambda scale, n: RoutingUpdater.begin_step(training.routing, size * scale, n)


FAULTS = {
    "the auxiliary loss counts twice": (forget_the_scale_of_replicas, {"dp": 2}),
    "replicas move by their own load": (move_by_the_own_load, {"dp": 2}),
    "only one replica moves": (move_in_one_replica_only, {"dp": 2}),
    "the auxiliary loss counts on each tensor rank": (count_auxiliary_on_each_tensor_rank, {"tp": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_verify_sees_a_planted_bug(fault: str) -> None:
    plant, overrides = FAULTS[fault]
    document = parity({**EXPERTS, "verify.steps": 3, **overrides}, fault=plant)
    assert not document["passed"], document["max_error"]
