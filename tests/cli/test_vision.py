"""Image classifiers as a user runs them: the dataset comes with the model, accuracy is seen everywhere."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from parallelrun.cli import main as program
from parallelrun.config.schema.run_schema import Config
from parallelrun.report.progress import ProgressLine
from parallelrun.report.runs import final_panel as report
from tests.cli.launcher import run_to_end
from tests.plans import tiny_plan
from tests.unit.config.test_presets import composed as from_presets
from tests.vision import ALEXNET


def composed(*overrides: str) -> Config:
    """Compose anew: recipes of a test change."""
    return from_presets.__wrapped__(*overrides).config


@pytest.mark.parametrize("model", ["resnet", "resnet18", "resnet50", "alexnet", "vgg16"])
def test_image_models_bring_their_dataset(model: str) -> None:
    dataset = composed(f"model={model}").dataset
    assert (dataset.name, dataset.val_fraction) == ("digits", 0.2)


def test_what_the_user_says_of_the_dataset_stands() -> None:
    assert composed("model=gpt").dataset.name == "pystdlib"
    assert composed("model=resnet", "dataset=cifar10").dataset.crop == 4
    assert composed("model=resnet", "dataset=synthetic").dataset.name == "synthetic"
    kept = composed("model=resnet", "dataset.val_fraction=0.4", "dataset.flip=true").dataset
    assert (kept.name, kept.val_fraction, kept.flip) == ("digits", 0.4, True)


def test_large_models_bring_a_learning_rate_that_suits_them() -> None:
    assert composed("model=vgg16").optimizer.lr == 3e-5 and composed("model=resnet").optimizer.lr == 3e-3
    assert composed("model=vgg16", "optimizer.lr=0.5").optimizer.lr == 0.5
    assert composed("model=vgg16", "optimizer=sgd").optimizer.lr == composed("optimizer=sgd").optimizer.lr


def test_a_recipe_may_choose_the_dataset(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    text = "# mine\n# @package _global_\ndefaults:\n  - override /model: resnet\n{}dp: 2\n"
    recipe.write_text(text.format("  - override /dataset: mnist\n"))
    assert composed(f"recipe={recipe}").dataset.name == "mnist"
    assert composed(f"recipe={recipe}", "dataset=digits").dataset.name == "digits"
    recipe.write_text(text.format(""))
    assert composed(f"recipe={recipe}").dataset.name == "digits"


def test_a_sweep_gives_each_model_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["plan", "-m", "--json", "model=gpt,resnet", "strategy=ddp"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert [(point["model"]["name"], point["model"]["vocab"]) for point in points] == [("gpt", 256), ("resnet", 10)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    folder = tmp_path_factory.mktemp("digits")
    done = run_to_end("model=resnet", "strategy=ddp", "dp=2", "steps=40", "tracker=none", cwd=folder)
    (directory,) = folder.glob("runs/resnet-ddp-dp2/*")
    return done, directory


def test_a_small_resnet_learns_digits_in_seconds(trained: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    done, directory = trained
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    top1 = [row["val_top1"] for row in rows if "val_top1" in row]
    assert len(top1) == 4 and all("val_loss" in row for row in rows if "val_top1" in row)
    assert top1[-1] > 0.8 and top1[-1] > top1[0] + 0.2
    summary = json.loads((directory / "summary.json").read_text())
    assert (summary["val_top1"], summary["first_val_top1"]) == (top1[-1], top1[0])
    assert summary["communication_as_predicted"] is True and summary["dataset"] == "digits"


def test_accuracy_is_on_the_screen(
    trained: tuple[subprocess.CompletedProcess[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    done, directory = trained
    assert "val_top1" in done.stdout and "samples/s" in done.stdout and "tokens/s" not in done.stdout
    report.show(directory)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "val_top1" in line]
    assert line.count("%") == 2


@pytest.mark.parametrize(("tp", "counts"), [(1, True), (2, False)])
def test_any_classifier_has_an_accuracy_where_its_classes_are_not_split(tp: int, counts: bool) -> None:
    mlp = {"model.name": "mlp", "model.preset": "mlp", "tp": tp}
    assert tiny_plan(mlp).counts_right_answers is counts  # on synthetic features
    assert not tiny_plan().counts_right_answers and tiny_plan({**ALEXNET, "tp": tp}).counts_right_answers


def test_other_models_show_no_accuracy(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"step": 1, "loss": 1.0, "val_loss": 2.0, "grad_norm": 1.0, "lr": 0.1, "tokens_per_s": 5.0}
    ProgressLine(2, enabled=True).update({**row, "samples": 8, "tokens": 64})
    out = capsys.readouterr().out
    assert "top1" not in out and "tokens/s" in out
