"""Horovod's data parallelism on real ranks: its semantics, and its equality with one device or its own rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from parallelrun.strategies.data.horovod import adasum
from parallelrun.training.loop import step as step_module
from parallelrun.training.loop.build import Training
from parallelrun.training.loop.data_runtime import DataRuntime
from tests.matrix import FULL, TWO_STEPS, shared
from tests.parity import assert_equal, parity
from tests.pool import run_ranks
from tests.ranks import horovod_body as body

HOROVOD: dict[str, Any] = {"strategy.data.kind": "horovod"}


def data(**settings: Any) -> dict[str, Any]:
    return {**HOROVOD, **{f"strategy.data.{key}": value for key, value in settings.items()}}


EXPERTS = {"model.layers": 2, "model.experts": 4, "model.expert_period": 2}
SETS_OF_THREE = data(process_sets=((0, 2, 4), (5, 1)), algorithm="ring")
CELLS: dict[str, dict[str, Any]] = {
    "dp 3, uneven sums by ring": {"dp": 3, "global_batch": 12, **data(algorithm="ring")},
    "backward passes per step": {**TWO_STEPS, "dp": 2, "microbatches": 4, **HOROVOD},
    "every tensor alone": {"dp": 2, **data(bucket_mb=0.0)},
    "in a tensor and pipeline plan": {"dp": 2, "tp": 2, "pp": 2, **HOROVOD},
    "zero bubble": {"dp": 2, "pp": 2, "strategy.pipeline.kind": "zero_bubble", **HOROVOD},
    "adasum": {"dp": 4, **data(reduction="adasum")},
    "adasum, many buckets, accumulation": {"dp": 2, "microbatches": 2, **data(reduction="adasum", bucket_mb=0.005)},
    "adasum in a tensor plan": {"dp": 2, "tp": 2, **data(reduction="adasum")},
    "adasum of two stages with a tied weight": {"dp": 2, "pp": 2, **data(reduction="adasum")},
    "adasum in fp16 of groups of ep": {"dp": 4, "ep": 2, **EXPERTS, **data(reduction="adasum", compression="fp16")},
    "adasum over cp": {"dp": 2, "cp": 2, **data(reduction="adasum", bucket_mb=0.005)},
    "process sets over cp": {
        "dp": 3,
        "cp": 2,
        "global_batch": 12,
        **data(process_sets=((0, 2),), compression="powersgd"),
    },
    "process sets": {"dp": 4, **data(process_sets=((0, 3), (1, 2)))},
    "process sets, each by itself": {"dp": 2, **data(process_sets=((0,), (1,)))},
    "process sets, adasum": {"dp": 4, **data(process_sets=((0, 2), (1, 3)), reduction="adasum")},
    "process sets, powersgd": {"dp": 4, **data(process_sets=((0, 2), (1, 3)), compression="powersgd")},
    "a process set that leaves workers out": {"dp": 4, **data(process_sets=((0, 2),))},
    "process sets of three, of two and of one": {"dp": 6, **SETS_OF_THREE, "global_batch": 12},
    "a process set that leaves workers out, adasum": {"dp": 4, **data(process_sets=((3, 1),), reduction="adasum")},
    "a process set that leaves workers out, x tp": {
        "dp": 3,
        "tp": 2,
        "global_batch": 12,
        **data(process_sets=((0, 2),)),
    },
    "process sets of groups of ep, sums by ring": {
        "dp": 6,
        "ep": 2,
        "global_batch": 12,
        **EXPERTS,
        **data(process_sets=((4, 5, 0, 1),), algorithm="ring"),
    },
    "join": {"dp": 3, "global_batch": 12, **data(worker_batches=(5, 1, 2))},
}  # `test_counts.py` has join with ignored targets

# What the full matrix adds: their settings are in other cells.
FULL_MATRIX = (
    "in a tensor and pipeline plan", "adasum over cp", "process sets, adasum", "process sets, powersgd",
    "a process set that leaves workers out", "process sets of three, of two and of one",
    "a process set that leaves workers out, x tp",
)  # fmt: skip


@pytest.mark.parametrize("cell", shared(cell for cell in CELLS if FULL or cell not in FULL_MATRIX))
def test_a_plan_equals_what_it_promises_and_sends_what_it_says(cell):
    assert_equal(parity(CELLS[cell]))


# -- bugs that somebody could plant


def adasum_averages(training: Training) -> None:
    adasum.weigh = lambda a, b, products: (a + b) / 2


def adasum_of_whole_buffers(training: Training) -> None:
    """One coefficient for all tensors of a fused buffer."""
    right = adasum.all_combine
    from parallelrun.strategies.data.horovod import runtime

    runtime.all_combine = lambda vector, lengths, group: right(vector, [sum(lengths)], group)


def sets_average_with_everyone(training: Training) -> None:
    training.data._group = training.mesh.group("dp")


def lone_workers_divide_by_everyone(training: Training) -> None:
    if training.data._group.size == 1:
        training.data._group = replace(training.data._group, ranks=tuple(range(training.mesh.group("dp").size)))


def joined_workers_are_not_counted(training: Training) -> None:
    right = step_module.count_valid
    step_module.count_valid = lambda *arguments: (right(*arguments)[0] * 2 / 3, right(*arguments)[1])


def broadcast_forgotten(training: Training) -> None:
    if training.mesh.coordinate["dp"]:
        training.parameters[0].tensor.data.mul_(1.001)


def updates_of_ranks_not_of_workers(training: Training) -> None:
    """The ranks of a group of ep do not sum their gradients before they step."""
    training.data.finish_gradients = lambda: DataRuntime.finish_gradients(training.data)


BUGS = {
    "a group of ep steps by its ranks' own gradients": (
        CELLS["adasum in fp16 of groups of ep"],
        updates_of_ranks_not_of_workers,
    ),
    "adasum averages": (CELLS["adasum"], adasum_averages),
    "adasum of whole buffers": (CELLS["adasum"], adasum_of_whole_buffers),
    "sets average with everyone": (CELLS["process sets"], sets_average_with_everyone),
    "lone workers divide by everyone": (
        CELLS["a process set that leaves workers out"],
        lone_workers_divide_by_everyone,
    ),
    "joined workers are not counted": (CELLS["join"], joined_workers_are_not_counted),
    "weights differ at the start": ({"dp": 2, **HOROVOD}, broadcast_forgotten),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_seen(bug):
    overrides, fault = BUGS[bug]
    assert not parity(overrides, fault=fault)["passed"]


# -- broadcast


def test_ranks_that_draw_different_weights_start_from_those_of_worker_0():
    everyone = run_ranks(3, body.weights_after_start, {"dp": 3, "global_batch": 12})
    for weights in everyone[1:]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights, everyone[0]))
    without = run_ranks(2, body.weights_after_start, {"dp": 2, "strategy.data.kind": "ddp"})
    assert not torch.equal(without[0][0], without[1][0])


def test_a_run_that_goes_on_takes_worker_0s_optimizer_state(tmp_path):
    (states, weights), (other_states, other_weights) = run_ranks(2, body.optimizer_state, str(tmp_path))
    assert len(states) == 3 * len(weights), "two moments and a step count per weight"
    assert all(torch.equal(*pair) for pair in zip(states, other_states))
    assert all(torch.equal(*pair) for pair in zip(weights, other_weights))


# -- join


def test_all_stages_of_a_worker_join_together():
    """They pass nothing on then, so what is sent is less than a full step's."""
    document = parity({"dp": 2, "pp": 2, **data(worker_batches=(5, 1))})
    assert document["passed"], document["max_error"]
    assert document["surprises"] and all("pp" in surprise for surprise in document["surprises"])


@pytest.mark.parametrize("degrees", [*[{"cp": 2}, {"tp": 2}] * FULL, {"dp": 4, "ep": 2, **EXPERTS}], ids=str)
def test_all_ranks_of_a_worker_join_together(degrees):
    """The messages inside a worker end when it joins, so that only the result is compared."""
    half = degrees.get("dp", 2) // 2
    assert parity({"dp": 2, **degrees, **data(worker_batches=(1,) * half + (5,) * half)})["passed"]


def test_a_joined_worker_adds_zero_and_the_divisor_stays():
    """Workers with the same samples: one of two has joined, so the mean is half of what it was (n - 1 of n)."""
    whole, half = (
        run_ranks(2, body.gradient_of_alike, {"dp": 2, **more})[0] for more in ({}, data(worker_batches=(3, 0)))
    )
    torch.testing.assert_close(half, whole / 2, rtol=1e-12, atol=0)


# -- Adasum over ranks


@pytest.mark.parametrize("world", [2, 4])
def test_all_ranks_get_the_same_bits_and_the_pairs_of_pairs(world):
    torch.manual_seed(world)
    lengths = [1, 7, 5]
    vectors = [torch.randn(13, dtype=torch.float64) for _ in range(world)]
    vectors[1][1:8] = 0  # a tensor that one worker did not change
    results = run_ranks(world, body.combined, vectors, lengths)
    assert all(torch.equal(result, results[0]) for result in results)
    parts = [vector.split(lengths) for vector in vectors]
    for number, part in enumerate(results[0].split(lengths)):
        level = [one[number] for one in parts]
        while len(level) > 1:
            level = [adasum.weigh(a, b, adasum.dots(a, b)) for a, b in zip(level[::2], level[1::2])]
        torch.testing.assert_close(part, level[0], rtol=1e-12, atol=1e-14)


# -- timeline


def test_the_timeline_shows_the_first_sum_before_backward_ends(tmp_path):
    overrides = {"dp": 2, "microbatches": 2, "strategy.data.bucket_mb": 0.005}
    events, nothing = run_ranks(2, body.timeline, overrides, str(tmp_path))
    assert nothing == []
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {"steps", "fusion buffer 0", "fusion buffer 1"} <= set(named.values())
    (over,) = [event["ts"] for event in events if event["name"] == "BACKWARD_OVER 2"]
    (second,) = [event["ts"] for event in events if event["name"] == "STEP 2"]
    sums = [event for event in events if event["name"] == "GLOO_ALLREDUCE" and event["ts"] > second]
    assert second < min(event["ts"] for event in sums) < over
    tensors = [event for event in events if event["name"] == "ALLREDUCE"]
    assert "embedding.position.weight" in {named[event["pid"]] for event in tensors}
    waits = {event["pid"]: event for event in events if event["name"] == "NEGOTIATE_ALLREDUCE" and event["ts"] > second}
    assert len(waits) == len(set(named.values()) - {"steps"}) - len([n for n in named.values() if "fusion" in n])
    assert any(event["dur"] > 0 for event in waits.values()), "gradients wait until their buffer is full"
    assert [event for event in events if event.get("dur", 0) < 0] == []
