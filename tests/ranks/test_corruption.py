"""Wrong bits in one rank of a real training are found in the next check, its rank is named, the steps are undone."""

from __future__ import annotations

import pytest
import torch

from parallelrun.base.errors import EXIT_CORRUPTION, CorruptionError
from parallelrun.distributed.comm.counter import CommunicationCounter
from parallelrun.planner.facts.corruption_cost import checks
from parallelrun.planner.predict.prediction import group_size, wire_bytes
from parallelrun.training.corruption.probe import Probe
from parallelrun.training.corruption.replicas import Replicas
from parallelrun.training.corruption.state import Snapshot
from parallelrun.training.loop.build import build
from parallelrun.training.loop.schedules import LossScaler
from parallelrun.training.loop.step import finish_gradients, forward_backward, train_step
from tests.corruption import (
    ACTIVATIONS,
    BASE,
    FLIP,
    GRADIENTS,
    PLANS,
    SEVERAL,
    STUCK,
    SUMS,
    WEIGHTS,
    Case,
    Fault,
    judge,
    run,
)
from tests.matrix import FULL, shared
from tests.plans import tiny_config, tiny_plan

CASES = [
    ("ddp", FLIP, WEIGHTS, 3, False),
    ("powersgd", STUCK, GRADIENTS, 3, False),
    ("ring", SEVERAL, SUMS, 2, False),  # two of three replicas agree
    ("zero1", SEVERAL, WEIGHTS, 2, False),
    ("fsdp", FLIP, ACTIVATIONS, 1, True),
    ("fsdp", STUCK, ACTIVATIONS, 4, False),
    ("tp", SEVERAL, GRADIENTS, 1, True),
    ("ptdp", STUCK, ACTIVATIONS, 3, False),
    ("ptdp", FLIP, GRADIENTS, 1, True),
    ("one", STUCK, WEIGHTS, 2, False),
    ("gshard", FLIP, SUMS, 1, True),
    ("zero2", SEVERAL, GRADIENTS, 1, True),
    ("tp2d", STUCK, SUMS, 3, False),
    ("dropless", FLIP, ACTIVATIONS, 1, True),
    ("powersgd", FLIP, ACTIVATIONS, 1, True),
]
SHOWN = CASES if FULL else [CASES[index] for index in (0, 2, 5, 6)]  # every place and every kind


@pytest.mark.parametrize("plan,kind,place,every,recompute", SHOWN, ids=["-".join(map(str, one)) for one in SHOWN])
def test_a_fault_is_found_and_its_rank_named(tmp_path, run_ranks, plan, kind, place, every, recompute):
    world = tiny_plan({**BASE, **PLANS[plan]}).world
    step = 4  # the first after a check where N is 3, so that wrong weights have time to spread
    over = PLANS[plan] if FULL or every == 4 else {**PLANS[plan], "steps": 6}  # the next check, and what follows
    case = Case(plan, over, Fault(kind, place, world - 1, step, 7), every, recompute)
    (tmp_path / "clean").mkdir()
    (tmp_path / "wrong").mkdir()
    clean = run_ranks(world, run, {**BASE, **over}, None, tmp_path / "clean")
    found = run_ranks(world, run, case.all_overrides, case.fault, tmp_path / "wrong")
    result = judge(case, clean, found)
    assert result.acted, "the fault changed nothing"
    assert result.is_right, (result, found[0].events, [one.error for one in found])


@pytest.mark.parametrize("plan", shared([*PLANS] if FULL else ["ptdp", "gshard", "adasum"]))
def test_a_run_without_faults_has_the_same_bits_and_no_alarm(tmp_path, run_ranks, plan):
    over = {**BASE, **PLANS[plan], "dropout": 0.1, "steps": 8 if FULL else 4}
    world = tiny_plan(over).world
    (tmp_path / "plain").mkdir()
    (tmp_path / "watched").mkdir()
    plain = run_ranks(world, run, over, None, tmp_path / "plain")
    watched = run_ranks(world, run, {**over, "sdc.every": 3, "sdc.recompute": True}, None, tmp_path / "watched")
    assert not watched[0].events and [one.state for one in plain] == [one.state for one in watched]


def test_a_stuck_lane_that_one_known_answer_misses_is_found_by_the_last_check(tmp_path, run_ranks):
    """The batch whose turn it is in the only check after the fault has the bits that it had without."""
    case = Case("fsdp", PLANS["fsdp"], Fault(STUCK, SUMS, 0, 7, 5754), 4, False)
    found = run_ranks(2, run, case.all_overrides, case.fault, tmp_path)
    assert found[0].planted[0] == 7
    assert found[0].events[0]["step"] == 8 and found[0].events[0]["ranks"] == [0]


def test_a_gradient_that_is_huge_on_one_rank_does_not_part_the_ranks(tmp_path, run_ranks):
    """Ranks that measure the norm alone do not agree on whether it is finite: the highest bit of an exponent."""
    found = run_ranks(
        2, run, {**BASE, "dp": 2, "steps": 6, "sdc.every": 3}, Fault(FLIP, SUMS, 1, 4, 7, bit=30), tmp_path
    )
    assert found[1].planted[:1] == [4] and found[0].events and not any(one.error for one in found)


def test_a_broken_device_has_an_exit_code_of_its_own():
    assert CorruptionError("x").exit_code == EXIT_CORRUPTION == 9


def differing_after_a_flip(over):
    """Return what replicas see if the last rank has a wrong bit: by kind of tensor, the names that differ."""
    training = build(tiny_config(over), tiny_plan(over), torch.device("cpu"))
    train_step(training, 1, 1e-3, LossScaler(training.config.precision, scaled=False))
    parameter, replicas = training.parameters[-1], Replicas(training)
    tensors = {"weight": parameter.tensor.detach(), "gradient": parameter.tensor.grad}
    tensors |= training.optimizer.state(parameter.name)
    found = {"nothing": [*replicas.differing()]}
    for kind, tensor in tensors.items():
        words = tensor.view(-1).view(torch.int32)
        is_wrong = int(training.mesh.rank == training.plan.world - 1)
        words[-1] ^= is_wrong
        found[kind] = [*replicas.differing()]
        words[-1] ^= is_wrong
    training.close()
    return parameter.name, found


def test_replicas_on_several_axes_compare_weights_gradients_and_optimizer_state(run_ranks):
    for name, found in run_ranks(4, differing_after_a_flip, {**BASE, "dp": 2, "cp": 2}):
        assert found.pop("nothing") == [] and {"weight", "gradient", "exp_avg", "exp_avg_sq", "step"} == {*found}
        assert found == {kind: [f"{name} {kind}"] for kind in found}


def answers_without_an_update(over):
    """Return what differs in known answers after a pass whose update is skipped, and in those after them."""
    training = build(tiny_config(over), tiny_plan(over), torch.device("cpu"))
    probe = Probe(training)
    train_step(training, 1, 1e-3, LossScaler(training.config.precision, scaled=False))
    forward_backward(training, 2)
    finish_gradients(training)
    differ = [bool(probe.answer(number)) for number in (0, 1)]
    training.close()
    return differ


@pytest.mark.parametrize("plan", [*PLANS] if FULL else ["adasum"])
def test_a_skipped_update_leaves_known_answers_as_they_were(run_ranks, plan):
    """Adasum combines updates, and would take the exchange of the weights for one."""
    over = {**BASE, **PLANS[plan], "sdc.every": 50}
    assert run_ranks(tiny_plan(over).world, answers_without_an_update, over) == [[False, False]] * tiny_plan(over).world


def check_costs(over):
    """Return the bytes of host copies of the checks, and the bytes that a check's batches send without control."""
    config, plan = tiny_config(over), tiny_plan(over)
    training = build(config, plan, torch.device("cpu"))
    scaler = LossScaler(config.precision, scaled=False)
    train_step(training, 1, 1e-3, scaler)
    copies, probe = Snapshot(training, scaler), Probe(training)
    copies.take(1)
    with CommunicationCounter(training.mesh) as counter:
        probe.answer(0)
    sent = sum(wire_bytes(row, group_size(plan, row.axis)) for row in counter.rows() if row.purpose != "control")
    kept = [tensor for tensor in copies._copies.values() if tensor.dim()]  # without the counts of steps
    training.close()
    return sum(tensor.nbytes for tensor in (*kept, *probe._copies)), sent


@pytest.mark.parametrize("plan", shared([*PLANS] if FULL else ["fsdp", "adasum", "tp2d", "local_sgd"]))
def test_a_plan_says_what_the_checks_keep_and_send(run_ranks, plan):
    over = {**BASE, **PLANS[plan], "sdc.every": 50}
    found = run_ranks(tiny_plan(over).world, check_costs, over)
    said = checks(tiny_plan(over), tiny_config(over))
    assert max(kept for kept, _ in found) == said.host_bytes
    from_even = 0.1 if tiny_plan(over).spec.router else 0.0  # the rows that experts get depend on the data
    assert max(sent for _, sent in found) == pytest.approx(said.wire_bytes, rel=from_even)
