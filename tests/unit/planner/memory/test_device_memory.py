"""What a GPU holds beside tensors: communicators as the plan's groups, constants as the cluster gives them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallelrun.config.schema.cluster_schema import ClusterConfig
from parallelrun.planner.contract.memory import Memory
from parallelrun.planner.contract.plan import EMBEDDING, WORLD, Plan
from parallelrun.planner.memory import device_memory
from parallelrun.planner.predict import cluster_cost, prediction
from tests.plans import tiny_plan

GPU = ClusterConfig(memory_gb=80.0, context_gb=0.5, communicator_gb=0.25, allocator_slack=0.1)
UNTIED = {"model.tied_embeddings": False}
EXPERTS = {"model.experts": 4, "model.expert_period": 1, "dp": 4, "ep": 2}
PLANS: dict[str, dict] = {
    "one rank": {},
    "dp": {"dp": 2},
    "tp": {"tp": 2},
    "pp": {"pp": 2} | UNTIED,
    "pp, tied": {"pp": 2},
    "pp 4, tied": {"pp": 4},
    "dp x tp": {"dp": 2, "tp": 2},
    "pp x dp x tp": {"pp": 2, "dp": 2, "tp": 2} | UNTIED,
    "pp x dp x tp, tied": {"pp": 2, "dp": 2, "tp": 2},
    "hsdp": {"dp": 4, "strategy.data.kind": "fsdp", "strategy.data.shard": 2},
    "zero1 x tp": {"dp": 2, "tp": 2, "strategy.data.kind": "zero1"},
    "2d": {"tp": 4, "layout": "2d"},
    "ep": EXPERTS,
    "ep x tp": EXPERTS | {"tp": 2},
    "servers": {"dp": 2, "servers": 1, "strategy.data.kind": "ps"},
}


def groups_that_send(plan: Plan, rank: int) -> set[tuple[str, tuple[int, ...]]]:
    """The groups of several ranks in which the rank is predicted to send, an axis over all ranks being the world's."""
    coordinate, found = plan.mesh.coordinate(rank), set()
    for row in prediction.collectives(plan, rank):
        if row.axis == EMBEDDING:
            found.add((EMBEDDING, (coordinate["pp"],)))
        elif row.axis == WORLD or prediction.group_size(plan, row.axis) > 1:
            axes = row.axis.split("+")
            ranks = plan.mesh.group_of(rank, *axes) if row.axis != WORLD else tuple(range(plan.num_workers))
            found.add((WORLD if len(ranks) == plan.num_workers else row.axis, ranks))
    return found


@pytest.mark.parametrize("name", PLANS)
def test_a_rank_has_a_communicator_for_every_group_in_which_it_sends(name):
    plan = tiny_plan(PLANS[name])
    for pp_rank in range(plan.mesh.size("pp")):
        sending = groups_that_send(plan, plan.mesh.rank(pp=pp_rank))
        counted = device_memory.num_communicators(plan, pp_rank)
        assert len(sending) <= counted <= len(sending) + 1, (pp_rank, sending)


def test_communicators_are_the_world_s_and_those_of_the_axes():
    numbers = {name: device_memory.num_communicators(tiny_plan(PLANS[name]), 0) for name in PLANS}
    assert numbers["one rank"] == 0
    assert numbers["dp"] == numbers["tp"] == numbers["pp"] == 1  # the world's group is the axis's
    assert numbers["pp, tied"] == 2 and numbers["dp x tp"] == 3
    assert numbers["pp x dp x tp"] == 4 and numbers["pp x dp x tp, tied"] == 5
    inner = tiny_plan(PLANS["pp 4, tied"])
    assert [device_memory.num_communicators(inner, pp_rank) for pp_rank in range(4)] == [2, 1, 1, 2]


@pytest.mark.parametrize("name", PLANS)
def test_parts_sum_to_the_total_and_nothing_is_added_on_cpu(name):
    plan = tiny_plan(PLANS[name])
    on_cpu, on_gpu = prediction.memories(plan, ClusterConfig()), prediction.memories(plan, GPU)
    assert on_cpu == prediction.memories(plan)
    for pp_rank, memory in on_gpu.items():
        number = device_memory.num_communicators(plan, pp_rank)
        assert memory.tensors == on_cpu[pp_rank].total
        assert memory.context == 500_000_000 + number * 250_000_000
        assert memory.slack == round(0.1 * memory.tensors)
        assert sum(memory.parts.values()) == memory.total == memory.tensors + memory.context + memory.slack
        assert set(memory.parts) - set(on_cpu[pp_rank].parts) == {"context", "slack"}
        assert memory.leaves_out == on_cpu[pp_rank].leaves_out[2:]


@pytest.mark.parametrize(
    ("tensors", "verdict", "why"),
    [
        (71, "yes", "a device has 74.5 GiB"),
        (72, "unknown", "a device has 74.5 GiB; the allocator may need more than the 6.5 GiB left"),
        (80, "no", "a device has 74.5 GiB"),
    ],
)
def test_context_decides_and_slack_leaves_it_open(tensors, verdict, why):
    memory = Memory(tensors * 10**9, 0, 0, 0, context=10**9, slack=tensors * 10**8)
    assert cluster_cost.fits(memory, GPU) == verdict
    assert cluster_cost.fits(replace(memory, slack=0), GPU) == ("no" if verdict == "no" else "yes")
    assert cluster_cost.why_fits(memory, GPU) == why


@pytest.mark.parametrize("name", PLANS)
def test_the_lower_bound_is_below_the_peak_and_counts_all_weights_and_state(name):
    plan = tiny_plan(PLANS[name])
    memories = prediction.memories(plan)
    held = [sum(prediction.held_bytes(plan, plan.mesh.coordinate(plan.mesh.rank(pp=pp_rank)))) for pp_rank in memories]
    for least, memory in zip(held, memories.values(), strict=True):
        assert memory.weights + memory.optimizer <= least < memory.tensors
