"""A model reads the kind of samples that the dataset declares, or the plan is refused with words that are accepted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from parallelrun.base.errors import ConfigError
from parallelrun.cli.main import main
from parallelrun.config.schema.run_schema import Config
from parallelrun.data import open_dataset
from parallelrun.data.images.digits import Digits
from parallelrun.planner.model import definitions
from parallelrun.planner.resolve.resolve_config import resolve
from tests.plans import tiny_config

NET = Path(__file__).parents[1] / "user_net.py"
READ: dict[str, set[str]] = {  # by model
    "gpt": {"tokens"},
    "bert": {"tokens"},
    "mlp": {"tokens", "features"},
    "resnet": {"images"},
    "vgg16": {"images"},
    f"module {NET}:build": {"tokens"},
    f"module {NET}:build_images": {"images"},
}
GIVEN: dict[str, set[str]] = {  # by dataset
    "pystdlib": {"tokens"},
    "text": {"tokens"},
    "digits": {"features", "images"},
    "cifar10": {"features", "images"},
    "synthetic": {"tokens", "features", "images"},
}


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["plan", "--json", "strategy=single", "global_batch=8", *words])
    return code, capsys.readouterr().err


# Every kind beside every other, and each model and dataset once beside one of its kind and one of another.
PAIRS = [(model, dataset) for model in ("gpt", "mlp", "resnet") for dataset in ("pystdlib", "digits", "synthetic")]
PAIRS += [("bert", "text"), ("bert", "cifar10"), ("vgg16", "text"), ("vgg16", "cifar10")]
PAIRS += [(model, dataset) for model in READ if model.startswith("module") for dataset in ("pystdlib", "digits")]


@pytest.mark.parametrize(("model", "dataset"), PAIRS)
def test_kinds_decide(model: str, dataset: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, _, source = model.partition(" ")
    words = [f"model={name}", *([f"model.source={source}"] if source else []), f"dataset={dataset}"]
    words += ["model.image=32"] if name in ("resnet", "vgg16") else []
    code, message = plan(capsys, *words, *(["dataset.path=."] if dataset in ("text", "cifar10") else []))
    assert code == (0 if READ[model] & GIVEN[dataset] else 2), message
    if code:
        assert f"dataset={dataset} gives" in message and "reads " in message
        (fixes,) = re.findall("did you mean: (.*)", message)
        for fix in fixes.split(" or "):
            rest = [word for word in words if not word.startswith(fix.split("=")[0])]
            if not (fix.startswith("model=") and dataset in ("text", "cifar10")):  # they need a path, and files in it
                assert plan(capsys, fix, *rest)[0] == 0, fix


def config(**overrides: Any) -> Config:
    return tiny_config({"dataset.name": "digits", "model.vocab": None, **overrides})


def test_a_dataset_without_a_declaration_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(Digits):
        kinds = ()

    monkeypatch.setattr(definitions, "dataset", lambda config: Silent())
    for name in ("gpt", "resnet"):
        with pytest.raises(ConfigError, match=r"does not declare its samples: .*Silent.kinds is") as refusal:
            resolve(config(**{"model.name": name, "model.preset": name}))
        (problem,) = refusal.value.problems
        assert problem.suggestion.startswith("kinds = (")
    monkeypatch.setattr(Silent, "kinds", ("pictures",))
    with pytest.raises(ConfigError, match="does not declare its samples"):
        resolve(config())


def test_opening_checks_too() -> None:
    spec = resolve(config(**{"dataset.name": "synthetic"})).spec
    with pytest.raises(ConfigError, match="dataset=digits gives images or features, and model=gpt reads tokens"):
        open_dataset(config(), spec)


def test_parts_of_a_mixture_have_one_kind(capsys: pytest.CaptureFixture[str]) -> None:
    code, message = plan(capsys, "model=gpt", "dataset=mixture", "dataset.mixture=[{name: pystdlib}, {name: digits}]")
    assert code == 2 and "the parts of a mixture need samples of one kind" in message, message
    code, message = plan(capsys, "model=resnet", "dataset=mixture", "dataset.mixture=[{name: pystdlib, weight: 1}]")
    assert code == 2 and "images" in message, message
