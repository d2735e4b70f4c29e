"""Sweepers that search: what a point answers them. A tiny sweeper holds it always, optuna's where it is installed."""

from __future__ import annotations

import csv
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins

from parallelrun.base.errors import ConfigError
from parallelrun.base.records import write_json
from parallelrun.cli import main as program
from parallelrun.cli.sweeps.objective import Pruned, objective
from tests.extras import needs

pytestmark = pytest.mark.usefixtures("composed_once")


@pytest.fixture
def losses(monkeypatch, tmp_path) -> dict[str, float | None]:
    """The val_loss that a run of each strategy shall end with; None: the run fails."""
    losses: dict[str, float | None] = {}

    def start(config, plan, argv, overrides, run_root):
        run_root.mkdir(parents=True)
        loss = losses[plan.preset]
        write_json(run_root / "summary.json", {"val_loss": loss, "tokens_per_s": 10.0 * plan.world, "model": "gpt"})
        return 0 if loss is not None else 6

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("parallelrun.launch.entry.start.start", start)
    return losses


@pytest.fixture
def answers(monkeypatch) -> list[Any]:
    """What the points of `hydra/sweeper=one_by_one` answer: a number, or the exception that stands for none."""
    return register_sweeper(monkeypatch)


def register_sweeper(monkeypatch) -> list[Any]:
    """Make `hydra/sweeper=one_by_one` known to Hydra; returns what its points will have answered."""
    monkeypatch.syspath_prepend(str(Path(__file__).with_name("plugins")))
    plugin = import_module("hydra_plugins.one_by_one")
    Plugins.instance().register(plugin.OneByOne)
    node = {"_target_": "hydra_plugins.one_by_one.OneByOne"}
    ConfigStore.instance().store(group="hydra/sweeper", name="one_by_one", node=node)
    monkeypatch.setattr(plugin, "answers", [])
    return plugin.answers


def sweep(line: str, sweeper: str = "one_by_one") -> int:
    return program.main(["-m", f"hydra/sweeper={sweeper}", *line.split()])


def csv_rows() -> list[dict[str, str]]:
    (directory,) = Path("runs").glob("sweep-*")
    with open(directory / "results.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_a_point_answers_its_validation_loss_and_illegal_and_failed_ones_an_exception(losses, answers):
    losses |= {"ddp": 2.5, "tp": None, "zero1": float("nan")}
    assert sweep("strategy=ddp,single,tp,zero1 world=2") == 1
    assert answers[0] == 2.5 and all(isinstance(answer, Pruned) for answer in answers[1:])
    assert "one device" in str(answers[1]) and "exit code 6" in str(answers[2]) and "finite" in str(answers[3])
    assert [row["state"] for row in csv_rows()] == ["done", "skipped", "failed", "done"]


def test_the_objective_may_be_any_number_of_the_summary(losses, answers):
    losses |= {"ddp": 2.5, "tp": 3.5}
    assert sweep("strategy=ddp,tp world=2 sweep.objective=tokens_per_s") == 0
    assert answers == [20.0, 20.0]


def test_an_objective_that_no_summary_has_stops_the_sweep_at_its_first_point(losses, answers, capsys):
    losses |= {"ddp": 2.5, "tp": 3.5}
    assert sweep("strategy=ddp,tp world=2 sweep.objective=val_los") == 2
    assert answers == [] and [row["state"] for row in csv_rows()] == ["done"]
    said = capsys.readouterr().err
    assert "sweep.objective=val_los" in said and "did you mean: val_loss" in said


def test_a_repeated_point_answers_what_the_first_did(losses, answers):
    losses |= {"ddp": 2.5}
    assert sweep("strategy=ddp,ddp world=2") == 0
    assert answers == [2.5, 2.5]


def test_a_plan_answers_the_predicted_time_of_a_step(losses, answers):
    words = ["hydra/sweeper=one_by_one", "strategy=ddp,tp", "world=2", "cluster=a100_80gb"]
    assert program.main(["plan", "-m", *words]) == 0
    assert len(answers) == 2 and all(0 < answer < 1 for answer in answers)


def test_a_number_is_neither_a_text_nor_a_truth():
    row = {"point": 0, "state": "done", "model": "gpt", "as_predicted": True, "loss": 1}
    assert objective(row, "loss", "run") == 1.0
    for key in ("model", "as_predicted", "nosuch"):
        with pytest.raises(ConfigError, match="records no number with this name"):
            objective(row, key, "run")


@needs("hydra_plugins.hydra_optuna_sweeper")
def test_optuna_goes_on_after_illegal_and_failed_points_and_finds_the_best(losses, capsys):
    losses |= {"ddp": 2.5, "tp": None, "zero1": 1.5}
    words = "hydra.sweeper.n_trials=12 hydra.sweeper.sampler.seed=1 strategy=ddp,single,tp,zero1 world=2"
    assert sweep(words, "optuna") == 1  # tp has failed
    rows = csv_rows()
    assert len(rows) == 12 and {row["strategy"] for row in rows} == {"ddp", "single", "tp", "zero1"}
    (best,) = Path("runs").glob("sweep-*/hydra/optimization_results.yaml")
    assert "strategy: zero1" in best.read_text() and "best_value: 1.5" in best.read_text()


@needs("hydra_plugins.hydra_optuna_sweeper")
def test_optuna_without_a_legal_point_ends_as_any_sweep_does(losses, capsys):
    assert sweep("hydra.sweeper.n_trials=2 strategy=single world=choice(2,4)", "optuna") == 2
    assert [row["state"] for row in csv_rows()] == ["skipped", "skipped"]
    assert "unexpected" not in capsys.readouterr().err
