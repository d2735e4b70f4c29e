"""Failures, checkpoints and repairs: the simulation against closed forms, published optima and Llama 3's training."""

from __future__ import annotations

import json
from math import exp

import pytest

from parallelrun.base.errors import ConfigError
from parallelrun.cli.main import main
from parallelrun.planner.facts.plan_facts import facts
from parallelrun.planner.predict.goodput import (
    REPAIR_HOURS,
    RESTART_S,
    Interruptions,
    Shares,
    daly_s,
    goodput,
    simulate,
    spare_nodes,
)
from parallelrun.planner.predict.prediction import checkpoint_bytes, copied_bytes
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.report.plans.training import goodput_text, training_s
from tests.plans import tiny_config, tiny_plan
from tests.unit.config.test_presets import composed, describe
from tests.unit.config.test_presets import plan as planned

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
CASES = {
    "a large cluster, fast storage": Interruptions(3 * HOUR, 3.0, 10 * MINUTE),
    "a large cluster, slow storage": Interruptions(3 * HOUR, 5 * MINUTE, 15 * MINUTE),
    "a small cluster": Interruptions(60 * DAY, MINUTE, 10 * MINUTE),
    "failures as often as restarts": Interruptions(15 * MINUTE, 5 * MINUTE, 10 * MINUTE),
}


def exact(case: Interruptions, interval_s: float) -> float:
    """The useful share without waiting for repairs: work is kept with the probability that no failure comes first."""
    mtbf = case.mtbf_s
    return interval_s / mtbf * exp(-case.restart_s / mtbf) / (exp((interval_s + case.save_s) / mtbf) - 1)


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
@pytest.mark.parametrize("factor", [0.3, 1.0, 3.0])
def test_the_simulation_agrees_with_the_exact_expectation(case, factor):
    interval = factor * daly_s(case.mtbf_s, case.save_s)
    shares = simulate(case, interval)
    assert shares.useful == pytest.approx(exact(case, interval), rel=0.01, abs=0.001)
    assert sum(vars(shares).values()) == pytest.approx(1, rel=1e-12) and shares.waiting == 0


def test_a_training_followed_by_hand():
    """Work of 8 s, a checkpoint of 2 s, restarts of 5 s; one spare node, and repairs take 250 s.

    100 s: restart, 9 checkpoints, 5 s lost; the spare takes over. 3 s: the restart itself fails, at 103 s, and nothing
    can be repaired before 350 s. 45 s, until 395 s: restart, 4 checkpoints, none lost; the first node was back, and
    trains, so the second, back at 353 s, takes over.
    """
    case = Interruptions(100.0, 2.0, 5.0, repair_s=250.0, spares=1)
    shares = simulate(case, 8.0, times=(1.0, 0.03, 0.45))
    by_hand = Shares(useful=13 * 8.0, saving=13 * 2.0, repeated=5.0, restarting=5.0 + 3.0 + 5.0, waiting=247.0)
    assert sum(vars(by_hand).values()) == 395
    for name, seconds in vars(by_hand).items():
        assert getattr(shares, name) == pytest.approx(seconds / 395), name


@pytest.mark.parametrize(("mtbf_s", "minutes"), [(24 * HOUR, 117), (6 * HOUR, 57), (15 * MINUTE, 9.1)])
def test_the_published_optima(mtbf_s, minutes):
    """Daly 2006, figures 3 to 5: checkpoints of 5 minutes, restarts of 10."""
    assert daly_s(mtbf_s, 5 * MINUTE) / MINUTE == pytest.approx(minutes, rel=0.006)


def test_daly_s_formula():
    assert daly_s(1.8e9, 1.0) == pytest.approx(60e3, rel=1e-4), "Young's, where checkpoints are cheap"
    assert daly_s(100.0, 200.0) == daly_s(100.0, 900.0) == 100.0
    # Daly's equation 37 holds up to a checkpoint of twice the mean time between failures: sqrt(2 x 150 x 100), which is
    # 173.205, times 1 + sqrt(0.75) / 3 + 0.75 / 9, less 150.
    assert daly_s(100.0, 150.0) == pytest.approx(87.639, abs=1e-3)


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_no_other_interval_is_better(case):
    best = daly_s(case.mtbf_s, case.save_s)
    others = [exact(case, best * factor) for factor in (0.25, 0.5, 0.8, 1.25, 2, 4)]
    assert max(others) <= 1.002 * exact(case, best)


@pytest.mark.parametrize("mean", [1e-3, 0.04, 0.06, 1.0, 7.76, 30.0, 500.0, 1e5])
def test_spare_nodes_are_the_95_percent_quantile_of_a_poisson_distribution(mean):
    number = spare_nodes(mean)
    assert mean - 1 <= number <= mean + 1.645 * mean**0.5 + 2
    if mean <= 500:
        terms = [exp(-mean)]
        for count in range(1, number + 1):
            terms.append(terms[-1] * mean / count)
        assert sum(terms) >= 0.95 > sum(terms[:-1])
    assert spare_nodes(0.0) == 0


def test_with_the_spare_nodes_hardly_anything_waits_and_without_them_almost_everything():
    mtbf, repair = 3 * HOUR, 24 * HOUR
    enough = spare_nodes(repair / mtbf)
    shares = [
        simulate(Interruptions(mtbf, 3.0, 600.0, repair, spares), 250.0) for spares in (0, enough // 2, enough, 40)
    ]
    assert shares[0].waiting > 0.85 and 0.1 < shares[1].waiting < 0.6
    assert shares[2].waiting < 0.02 and shares[3].waiting == 0


LLAMA_3_405B = (
    "model=llama3_70b", "model.layers=126", "model.hidden=16384", "model.heads=128", "model.ffn=53248", "strategy=ptdp",
    "tp=8", "pp=16", "dp=128", "global_batch=2048", "precision=bf16", "cluster=h100_dgx",
)  # fmt: skip
# The Llama 3 paper: 419 unexpected interruptions of 16,384 GPUs in 54 days (section 3.3.4), 2 TB/s of storage (3.3.1)
LLAMA_3_FAILURES = (f"mtbf_gpu_hours={16_384 * 54 * 24 / 419}", "checkpoint_gb_s=2000")


def test_llama_3_s_training_was_effective_for_more_than_90_percent_of_its_time():
    config = composed(*LLAMA_3_405B, *LLAMA_3_FAILURES).config
    plan = planned(*LLAMA_3_405B)
    assert plan.world == 16_384 and plan.spec.num_parameters == pytest.approx(405e9, rel=0.01)
    found = goodput(plan, config, step_s=None)
    assert found is not None and found.nodes == 2048
    assert found.mtbf_s == pytest.approx(54 * DAY / 419)
    assert 0.90 < found.shares.useful < 0.94, "published: higher than 90 %"
    assert found.restart_s == RESTART_S + found.save_s and found.repair_s == REPAIR_HOURS * HOUR
    slow = composed(*LLAMA_3_405B, LLAMA_3_FAILURES[0], "checkpoint_gb_s=20").config
    assert goodput(plan, slow, step_s=None).shares.useful < 0.8, "with slow storage it would not have been"


def test_a_checkpoint_has_weights_and_optimizer_state_once():
    plan = tiny_plan(dp=2, tp=2, pp=2)
    assert checkpoint_bytes(plan) == 3 * 4 * plan.spec.num_parameters
    assert checkpoint_bytes(tiny_plan({"dp": 2, "optimizer.name": "sgd"})) == 4 * plan.spec.num_parameters
    replicas = tiny_plan({"dp": 2, "strategy.name": "local_sgd", "strategy.data.kind": "local_sgd"})
    assert checkpoint_bytes(replicas) == 3 * checkpoint_bytes(plan), "the mean, and each of two replicas"
    diloco = tiny_plan({"dp": 2, "strategy.name": "diloco", "strategy.data.kind": "diloco"})
    assert checkpoint_bytes(diloco) == (3 * 3 + 2) * 4 * plan.spec.num_parameters, "shared weights, outer momentum"


def test_a_started_node_counts_and_every_restart_reads_the_checkpoint():
    """12 ranks on hosts of 8; a checkpoint of so many bytes is read in 2 s, beside the 30 s that the user gives."""
    plan = tiny_plan(dp=12, global_batch=24)
    keys = {"verb": "plan", "cluster.gpus_per_node": 8, "mtbf_gpu_hours": 1e4, "restart_s": 30.0}
    found = goodput(plan, tiny_config({**keys, "checkpoint_gb_s": checkpoint_bytes(plan) / 2e9}), 0.1)
    assert found.nodes == 2 and found.save_s == pytest.approx(2.0) and found.restart_s == pytest.approx(32.0)


@pytest.mark.parametrize(("every", "asynchronous", "copies"), [(0, True, 0), (2, False, 0), (2, True, 1)])
def test_an_asynchronous_save_holds_one_copy_in_the_hosts_memory(every, asynchronous, copies):
    keys = {"checkpoint.every": every, "checkpoint.asynchronous": asynchronous}
    config, plan = tiny_config({"dp": 4, "steps": 10, **keys}), tiny_plan(dp=4)
    assert copied_bytes(config, plan) == copies * checkpoint_bytes(plan)


OVERRIDES = ("model=gpt3_175b", "strategy=ptdp", "tp=8", "pp=8", "dp=16", "precision=bf16", "cluster=a100_dgx")
FAILURES = ("mtbf_gpu_hours=50000", "checkpoint_gb_s=20")


def test_the_interval_is_in_whole_steps_and_on_screen_and_in_the_document():
    config, plan = composed(*FAILURES, *OVERRIDES, "tokens=300e9").config, planned(*OVERRIDES)
    data = describe(plan, config)
    found = data["goodput"]
    assert found["interval_s"] == pytest.approx(found["interval_steps"] * data["time"]["step_s"])
    assert found["mtbf_s"] == pytest.approx(50_000 * HOUR / 1024)
    assert found["checkpoint_bytes"] == 12 * plan.spec.num_parameters
    assert sum(found["shares"].values()) == pytest.approx(1)
    computed = facts(plan, config)
    text = goodput_text(computed.goodput, training_s(computed))
    lines = text.splitlines()
    assert lines[0].startswith(f"{found['shares']['useful']:.1%} of the time is useful: ") and "every 2.03 days" in text
    assert f"{found['shares']['saving']:.1%} saving" in lines[1]
    assert lines[2].startswith(f"checkpoint.every={found['interval_steps']}, ")
    assert lines[3].startswith(f"{found['spares']} spare nodes beside 128: 95% sure")
    assert describe(plan, composed(*OVERRIDES).config)["goodput"] is None


def test_a_search_says_it_of_the_fastest_plan(capsys):
    line = ["plan", "model=gpt", "cluster=a100_dgx", "gpus=1", "micro_batch=48", "recompute=none", "precision=bf16"]
    assert main([*line, *FAILURES]) == 0
    screen = capsys.readouterr().out
    assert "of the time is useful with failures every 2083 days" in screen and "checkpoint.every=" in screen
    assert main([*line, *FAILURES, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    best = found["search"]["best"][0]
    assert found["goodput"]["interval_s"] == pytest.approx(found["goodput"]["interval_steps"] * best["step_s"])
    assert "mtbf" not in found["command"], "a run does not read it"
    assert main([*line, "--json"]) == 0 and json.loads(capsys.readouterr().out)["goodput"] is None


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        ({"verb": "plan", "mtbf_gpu_hours": 5e4}, {"checkpoint_gb_s"}),
        ({"verb": "plan", "checkpoint_gb_s": 20.0}, {"mtbf_gpu_hours"}),
        ({"verb": "plan", "repair_hours": 1.0}, {"mtbf_gpu_hours", "checkpoint_gb_s"}),
        ({"verb": "plan", "mtbf_gpu_hours": 1.8e8, "checkpoint_gb_s": 20.0}, {"mtbf_gpu_hours"}),
        ({"mtbf_gpu_hours": 5e4, "checkpoint_gb_s": 20.0}, {"mtbf_gpu_hours", "checkpoint_gb_s"}),
    ],
)
def test_what_is_missing_or_unread_is_refused(overrides, where):
    with pytest.raises(ConfigError) as caught:
        resolve(tiny_config(overrides))
    assert {problem.where for problem in caught.value.problems} == where
    assert all(problem.suggestion for problem in caught.value.problems)
