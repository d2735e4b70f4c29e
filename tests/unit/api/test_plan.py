"""`parallelrun.planner` and `search`: the plans of the command line, and nothing is left behind in the process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import hydra
import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.version import VersionBase

import parallelrun as pr
from parallelrun import api
from parallelrun.cli.main import main

ROOT = Path(__file__).resolve().parents[3]
OLDER = {"version_base": "1.2"} if hydra.__version__.startswith("1.3") else {}  # Hydra 1.4 has none
TINY = ("model=gpt", "model.layers=2", "dataset=synthetic")
LIGHT = """
import sys
import parallelrun as pr
heavy = {"torch", "hydra", "omegaconf", "numpy", "yaml", "rich", "typing", "parallelrun.api"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert "run" in dir(pr) and pr.ConfigError.exit_code == 2
pr.plan("model=gpt", "tp=2")._repr_html_()
assert "torch" not in sys.modules
"""


def test_import_is_light_and_a_plan_needs_no_torch():
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_plan_is_that_of_the_command_line(capsys):
    words = (*TINY, "tp=2", "pp=2", "cluster=h100_dgx")
    planned = pr.plan(*words)
    assert capsys.readouterr() == ("", "")
    assert main(["plan", *words, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    printed.pop("search")
    assert json.loads(json.dumps(planned.document())) == printed
    assert planned.degrees == {"pp": 2, "dp": 1, "cp": 1, "tp": 2, "ep": 1} and planned.world == 4
    assert planned.step_s == printed["time"]["step_s"] and planned.fits == "yes"
    assert planned.memory.total == printed["memory"]["heaviest_gib"] * 2**30
    assert main(["plan", *words]) == 0
    title = capsys.readouterr().out.splitlines()[0]
    assert title.startswith("plan: gpt") and planned.text().splitlines()[0] == title
    assert re.match("<pre style=[^>]*>plan: gpt", planned._repr_html_())
    assert repr(planned).startswith("PlannedRun(") and len(repr(planned)) < 400 and str(planned) == planned.text()


def test_all_violations_are_raised_at_once():
    with pytest.raises(pr.ConfigError) as raised:
        pr.plan(*TINY, "tp=3", "pp=99")
    assert len(raised.value.problems) == 3 and {one.where for one in raised.value.problems} >= {"tp", "pp"}
    with pytest.raises(pr.ConfigError, match="nosuch") as raised:
        pr.plan("nosuch=1", "tp=two")
    assert len(raised.value.problems) == 2


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("model=nosuch",), "no such model"),
        (("-m",), "flags are for the command line"),
        (("hydra/launcher=joblib",), "Hydra's own settings"),
        ((3,), "overrides are texts"),
        (("recipe=nosuch",), "no such recipe"),
    ],
)
def test_wrong_overrides_are_config_errors(words, text):
    with pytest.raises(pr.ConfigError, match=text):
        pr.plan(*words)


def folder(path: Path, layers: int) -> Path:
    (path / "model").mkdir(parents=True)
    preset = f"defaults: [gpt, _self_]\nlayers: {layers}\npreset: mine\n"
    (path / "model" / "mine.yaml").write_text(preset)
    (path / "recipe").mkdir()
    (path / "recipe" / "ours.yaml").write_text(f"# @package _global_\nsteps: {layers}\n")
    return path


def test_two_config_dirs_in_one_process(tmp_path):
    few, many = folder(tmp_path / "few", 2), folder(tmp_path / "many", 6)
    for path, layers in ((few, 2), (many, 6), (few, 2)):
        planned = pr.plan("model=mine", "recipe=ours", "dataset=synthetic", config_dir=path)
        assert (planned.config.model.layers, planned.config.steps) == (layers, layers)
    with pytest.raises(pr.ConfigError, match="no such model"):
        pr.plan("model=mine")


def test_hydra_is_left_as_found(tmp_path):
    """Inside an application of Hydra, with a group `recipe` and a version base of its own."""
    (tmp_path / "config.yaml").write_text("size: 3\n")
    ConfigStore.instance().store(name="soup", node={"salt": 1}, group="recipe")
    try:
        with hydra.initialize_config_dir(str(tmp_path), **OLDER):
            before = GlobalHydra.instance(), GlobalHydra.instance().hydra, VersionBase.instance().getbase()
            assert pr.plan(*TINY, "tp=2").config.model.layers == 2
            with pytest.raises(pr.ConfigError):
                pr.plan("model=nosuch")
            now = GlobalHydra.instance(), GlobalHydra.instance().hydra, VersionBase.instance().getbase()
            assert now == before
            assert hydra.compose("config", ["+recipe=soup"]) == {"size": 3, "recipe": {"salt": 1}}
    finally:
        ConfigStore.instance().repo.pop("recipe")
    assert not GlobalHydra.instance().is_initialized()


def test_plan_and_verify_are_plain_functions():
    assert pr.plan is api.plan and pr.verify is api.verify
    with pytest.raises(AttributeError, match="nosuch"):
        _ = pr.nosuch  # type: ignore[attr-defined]
    assert all(getattr(pr, name) is not None for name in pr.__all__)


def test_mypy_checks_a_script_of_a_user():
    (files,) = re.findall(r"^files = (\[.*\])$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert "tests/unit/api/typed_script.py" in json.loads(files)
    assert (ROOT / "tests/unit/api/typed_script.py").is_file()


def test_search():
    found = pr.search("model=llama3_8b", "cluster=h100_dgx", "gpus=8", "global_batch=8", "precision=bf16", keep=3)
    assert len(found) == 3 and found.column("step_s") == sorted(found.column("step_s"))
    fastest = pr.plan("model=llama3_8b", "cluster=h100_dgx", "global_batch=8", "precision=bf16", *found[0].overrides)
    assert fastest.step_s == found[0].time.step_s
    with pytest.raises(pr.ConfigError, match="tp says what to plan"):
        pr.search("model=gpt", "cluster=h100_dgx", "tp=2")
