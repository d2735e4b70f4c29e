"""Packages and programs that only some options need: exit 3 with the command that installs them, before any rank."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest

from parallelrun.base import packages
from parallelrun.base.errors import EnvironmentProblem
from parallelrun.cli import errors
from parallelrun.launch.entry import start
from parallelrun.launch.host import preflight
from tests.plans import tiny_config, tiny_plan
from tests.vision import RESNET

WITHOUT = [
    ({"tracker.use": ["tensorboard"]}, "tracker=tensorboard", "tensorboard", "'parallelrun[trackers]'"),
    ({**RESNET, "dataset.name": "digits", "dataset.vocab": None}, "dataset=digits", "scikit-learn", "scikit-learn"),
    ({**RESNET, "dataset.name": "imagefolder", "dataset.path": "/", "dataset.vocab": 2, "model.image": 8},
     "dataset=imagefolder", "pillow", "pillow"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "option", "package", "pip"), WITHOUT)
def test_a_run_without_the_package_of_an_option_ends_before_it_begins(
    monkeypatch, tmp_path, keys, option, package, pip
):
    config = tiny_config({**keys, "runs": str(tmp_path)})
    plan = tiny_plan(keys)
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem) as caught:
        start.start(config, plan, [], [])
    (problem,) = caught.value.problems
    assert problem.what == f"{option} needs the package {package}, which is not installed"
    assert (problem.command, caught.value.exit_code) == (f"pip install {pip}", 3)
    assert not list(tmp_path.iterdir())


def test_compiling_without_a_compiler_is_refused(monkeypatch):
    config, plan = tiny_config(compile=True), tiny_plan(compile=True)
    monkeypatch.delenv("CXX", raising=False)
    preflight.check(config, plan, None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(EnvironmentProblem, match=r"needs a C\+\+ compiler, and there is no g\+\+"):
        preflight.check(config, plan, None)


@pytest.mark.parametrize(
    ("choice", "package"),
    [
        ("hydra/sweeper/optuna", "hydra-optuna-sweeper"),
        ("hydra/launcher/submitit_slurm", "hydra-submitit-launcher"),
        ("hydra/launcher/nosuch", None),
        ("model/optuna", None),
    ],
)
def test_a_plugin_of_hydra_that_is_not_installed_is_named_by_its_package(choice, package):
    found = errors._missing_plugin([SimpleNamespace(missing_cfg_file=choice)])
    assert (found.problems[0].command if found else None) == (f"pip install {package}" if package else None)
    assert found is None or found.exit_code == 3
