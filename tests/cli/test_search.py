"""`plan` without a strategy, `strategy=auto`, and the rank of a plan: what is printed can be typed again."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from parallelrun.cli import main as program
from parallelrun.planner.resolve.freeze import load_frozen
from parallelrun.planner.resolve.resolve_config import resolve
from tests.cli.launcher import run_to_end
from tests.matrix import FULL

MODEL = ("model=gpt2_124m", "cluster=a100_dgx", "precision=bf16", "global_batch=16", "micro_batch=4")
HELD = (*MODEL, "recompute=none", "layout=1d", "strategy.data.kind=ddp", "pp=1")  # a space of a few plans, for auto
SPACE = (*HELD[:-1], "gpus=4")


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """run("plan", "gpus=4") -> (exit code, stdout, stderr), in an empty working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PARALLELRUN_CONFIG", str(tmp_path / "own"))  # no calibration of this machine

    def call(*words: str):
        code = program.main(list(words))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def of_label(label: str, text: str) -> str:
    (line,) = [line for line in text.splitlines() if line.startswith(f"{label} ")]
    return line.removeprefix(label).strip()


def test_the_best_plans_are_printed_with_the_command_that_runs_the_first(run):
    code, out, _ = run("plan", *SPACE)
    assert code == 0 and out.startswith("search: gpt2_124m on 4 devices of a100_dgx, 16.4 k tokens a step (")
    for label in ("searched", "best", "pp", "products", "step", "memory", "why  ", "run it"):
        assert any(line.strip().startswith(label) for line in out.splitlines()), label
    command = shlex.split(out.splitlines()[-1])  # on a line of its own
    assert command[0] == "parallelrun" and not any(word.startswith(("strategy=", "plan")) for word in command)
    code, again, _ = run("plan", "--json", *command[1:])
    first = json.loads(run("plan", "--json", *SPACE)[1])["search"]["best"][0]
    assert code == 0 and json.loads(again)["time"]["step_s"] == first["step_s"]


def test_the_document_of_a_search(run):
    code, out, _ = run("plan", "--json", *SPACE, "tokens=1e9")
    document = json.loads(out)
    search = document["search"]
    assert code == 0 and (document["model"], document["world"], document["schema"]) == ("gpt2_124m", 4, 1)
    assert search["considered"] >= search["fitting"] >= len(search["best"]) == 3
    times = [one["step_s"] for one in search["best"]]
    assert times == sorted(times) and {"nearest", "removed", "unpriced"} <= search.keys()
    for one in search["best"]:
        assert sum(one["parts"].values()) == pytest.approx(one["step_s"]) and one["heaviest_gib"] > 0
    assert document["command"].startswith("parallelrun model=gpt2_124m") and "tokens" not in document["command"]


def test_explain_draws_the_waterfall_and_names_limits_and_flips(run, monkeypatch):
    monkeypatch.setattr("parallelrun.planner.search.crossovers.BUDGET_S", float("inf"))
    code, out, _ = run("plan", *HELD, "strategy=auto", "gpus=4", "explain=true")
    assert code == 0
    why = out.partition("why: the parts of a step:")[2]
    step = float(next(line for line in why.splitlines() if line.startswith("step ")).split()[1])
    parts = [line.split() for line in why.splitlines() if "█" in line and not line.startswith("step ")]
    shown = sum(float(next(word for word in line if word[0].isdigit())) for line in parts)
    assert len(parts) >= 4 and shown == pytest.approx(step, abs=1e-6)
    assert "a step would be" in of_label("limits", why) and "on the heaviest rank" in of_label("memory", why)
    assert "another plan wins below 8 samples a step (now 16): dp=2 tp=2" in of_label("crossovers", why)


NAMED = (*MODEL, "strategy=ddp", "dp=2")


def test_a_plan_that_is_named_is_ranked_among_all(run):
    code, out, _ = run("plan", *NAMED)
    found = json.loads(run("plan", "--json", *NAMED)[1])
    search = found["search"]
    least = "" if search["counted"] else f"{search['best_rank']:,} to "
    most = "" if search["counted"] else "at most "
    rank = f"{least}{search['rank']:,} of {most}{search['fitting']:,} plans that fit, "
    behind = f"{found['time']['step_s'] / search['best'][0]['step_s']:.2f} times the fastest"
    assert code == 0 and 1 < search["best_rank"] <= search["rank"]
    assert of_label("rank", out) == rank + behind
    fastest = " ".join(search["best"][0]["overrides"])
    assert of_label("fastest", out).startswith(fastest) and of_label("why", out).startswith("the fastest is ")
    best = json.loads(run("plan", "--json", *MODEL[:-1], "gpus=2")[1])["search"]["best"][0]
    assert search["best"][0]["step_s"] == best["step_s"], "what a search for a plan finds"


def test_a_large_space_is_compared_only_where_that_is_asked_for(run, monkeypatch):
    monkeypatch.setattr("parallelrun.planner.search.requested_searches.MOST_RANKED", 100)
    code, out, _ = run("plan", *NAMED)
    assert code == 0 and of_label("rank", out) == (
        "not compared with more than 100 other plans; explain=true does, in seconds"
    )
    assert json.loads(run("plan", "--json", *NAMED)[1])["search"] is None
    assert json.loads(run("plan", "--json", *NAMED, "explain=true")[1])["search"]["rank"] > 1


def test_a_plan_that_does_not_fit_has_no_rank_but_a_fastest_that_does(run):
    large = ("model=llama3_8b", "cluster=a100_dgx", "precision=bf16", "global_batch=8", "strategy=ddp")
    code, out, _ = run("plan", *large, "dp=4")
    assert code == 0 and of_label("rank", out).startswith("it does not fit; ")
    assert "strategy.data.kind=fsdp" in out and of_label("fastest", out)
    code, out, _ = run("plan", *large, "dp=1")
    assert code == 0 and of_label("rank", out) == "no plan that a search tries fits as many devices"


def test_a_plan_without_a_predicted_time_has_no_rank(run):
    code, out, _ = run("plan", "model=gpt", "dp=2")
    assert code == 0 and not any(line.startswith("rank ") for line in out.splitlines())
    assert json.loads(run("plan", "--json", "model=gpt", "dp=2")[1])["search"] is None


def test_explain_of_a_plan_that_is_not_predicted_says_why(run):
    code, _, err = run("plan", "strategy=ddp", "dp=2", "explain=true")
    assert code == 2 and "cluster.peak_tflops.fp32" in err
    assert run("model=gpt", "explain=true")[0] == 2


def test_sizes_are_compared_for_an_objective(run):
    words = [*HELD, "strategy=auto", "tokens=1e9", "objective=cost", "cluster.price_per_gpu_hour=2", "gpus=4"]
    code, out, _ = run("plan", *words)
    assert code == 0 and out.startswith("sizes of a100_dgx:")
    assert "* the fewest device-hours to train on 1 B tokens" in out
    document = json.loads(run("plan", "--json", *words)[1])
    (chosen,) = [row for row in document["sizes"] if row["chosen"]]
    assert chosen["price"] == 2 * chosen["device_hours"] == 2 * min(row["device_hours"] for row in document["sizes"])
    assert document["world"] == chosen["devices"] and f"gpus={chosen['devices']}" in document["command"].split()
    assert document["command"].count("gpus=") == 1
    code, _, err = run("plan", *MODEL, "strategy=ddp", "dp=2", "objective=cost")
    assert code == 2 and "objective is read by a search" in err


@pytest.mark.parametrize("verb", ["run", "verify", "bench"] if FULL else ["verify"])
def test_auto_starts_the_winner_as_a_plain_plan(run, monkeypatch, verb):
    started = []
    monkeypatch.setattr(
        "parallelrun.launch.entry.start.start", lambda config, plan, *rest, **more: started.append((config, plan)) or 0
    )
    code, _, err = run(verb, *HELD, "strategy=auto", "world=4")
    assert code == 0 and err.startswith("strategy=auto: ")
    ((config, plan),) = started
    best = json.loads(run("plan", "--json", *HELD, "strategy=auto", "world=4")[1])["search"]["best"][0]
    assert {f"{axis}={size}" for axis, size in plan.degrees.items()} >= {
        text for text in best["overrides"] if text.split("=")[0] in plan.degrees
    }
    assert config.strategy.name == plan.preset == "ptdp" and not config.strategy.searches


def test_auto_in_a_recipe_and_in_a_sweep(run, monkeypatch):
    Path("auto.yaml").write_text("defaults:\n  - override /strategy: auto\nworld: 2\nglobal_batch: 16\n")
    started = []
    monkeypatch.setattr(
        "parallelrun.launch.entry.start.start", lambda config, plan, *rest, **more: started.append(plan) or 0
    )
    words = [word for word in HELD if not word.startswith("global_batch")]
    assert run("recipe=./auto.yaml", *words)[0] == 0 and started[0].world == 2
    code, out, _ = run("plan", "-m", "--json", *HELD, "strategy=auto,ddp", "world=4")
    auto, ddp = json.loads(out)["points"]
    assert code == 0 and auto["step_time_predicted_s"] <= ddp["step_time_predicted_s"]


def test_a_run_of_auto_is_frozen_without_a_search(tmp_path):
    """With real ranks: config.yaml holds plain degrees and a plain strategy, and repeats the run."""
    rates = ["cluster=laptop", "cluster.memory_gb_s=10", "strategy=auto", "world=2", "micro_batch=4", "recompute=none"]
    tiny = ["model.layers=2", "model.hidden=32", "model.seq=16", "global_batch=8", "steps=1", "eval.batches=1"]
    done = run_to_end("model=gpt", *rates, *tiny, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    frozen = (tmp_path / "runs" / "latest" / "config.yaml").read_text()
    assert "searches: false" in frozen and "name: auto" not in frozen
    config = load_frozen(frozen)
    assert resolve(config).world == 2 and None not in (config.dp, config.tp, config.pp)
    again = json.loads(run_to_end("plan", "--json", "recipe=runs/latest/config.yaml", cwd=tmp_path).stdout)
    assert again["degrees"]["dp"] == config.dp and again["degrees"]["pp"] == config.pp


def test_auto_uses_the_rates_that_were_measured_here(run, tmp_path):
    folder = tmp_path / "own" / "cluster"
    folder.mkdir(parents=True)
    rates = "peak_tflops: {fp32: 0.1}\nmemory_gb_s: 10.0\nintra_gb_s: 2.0\n"
    (folder / "mine.yaml").write_text(f"name: mine\ndescription: measured\n{rates}")
    words = ["model=gpt", "strategy=auto", "world=2", "micro_batch=4", "global_batch=16", "recompute=none"]
    code, out, _ = run("plan", *words)
    assert code == 0 and out.startswith("search: gpt on 2 devices of mine, 1.02 k tokens a step (16 samples of 64):")
    code, _, err = run("plan", *words, "cluster=laptop")
    assert code == 2 and "cluster=laptop does not give cluster.memory_gb_s" in err
    assert "cluster=mine after a calibration" in err and "try: parallelrun calibrate" in err
