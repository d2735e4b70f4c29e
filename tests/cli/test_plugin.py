"""A package outside the repository adds a data strategy, a tensor layout, a model and a dataset.

The package is `tests/plugin`. It is installed by its entry points alone; nothing in this repository names it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.launcher import run_to_end
from tests.matrix import FULL

PLUGIN = Path(__file__).parents[1] / "plugin"
ENTRY_POINTS = """\
[parallelrun.strategies]
data.each_tensor = demo_plugin.each_tensor
tensor.always_sequence = demo_plugin.always_sequence
[parallelrun.models]
bowl = demo_plugin.bowl
[parallelrun.datasets]
ramp = demo_plugin.ramp
[parallelrun.trackers]
diary = demo_plugin.diary
"""


def install(site: Path) -> Path:
    """Write into a folder of the path what an installer would: the package, and its entry points beside it."""
    shutil.copytree(PLUGIN / "demo_plugin", site / "demo_plugin", ignore=shutil.ignore_patterns("__pycache__"))
    info = site / "demo_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: demo-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return site


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    return install(tmp_path_factory.mktemp("site"))


def parallelrun(site: Path, directory: Path, *words: str, cold: bool = False) -> subprocess.CompletedProcess[str]:
    """cold: in a process that `python` starts; else in a warm one, which finds the plug-in in the same way."""
    words = words if words[0] == "ls" else (*words, "--config-dir", str(PLUGIN / "conf"))
    if not cold:
        return run_to_end(*words, cwd=directory, site=site)
    command = [sys.executable, "-m", "parallelrun", *words]
    env = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, timeout=240)


DATA = (
    "strategy=each_tensor",
    "dp=2",
    "model=gpt",
    "model.layers=2",
    "model.hidden=16",
    "model.heads=2",
    "model.seq=8",
)
MODEL = ("strategy=ptdp", "model=bowl", "dataset=ramp", "tp=2", "dp=2")
LAYOUT = ("strategy=ptdp", "layout=1d_sequence", "tp=2", *DATA[2:])
SMALL = ("steps=2", "global_batch=8", "eval.every=0")


@pytest.mark.parametrize(
    "words",
    [(*DATA, "strategy.data.max_pending=2"), MODEL, LAYOUT]
    if FULL
    else [(*MODEL, "strategy.data.kind=each_tensor", "strategy.data.max_pending=2"), LAYOUT],
    ids=["data strategy", "model and dataset", "tensor layout"] if FULL else ["all but the layout", "tensor layout"],
)
def test_a_plug_in_is_verified_against_one_device(site, tmp_path, words):
    done = parallelrun(site, tmp_path, "verify", *words, *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = tmp_path.rglob("verify.json")
    assert json.loads(found.read_text())["passed"]


@pytest.mark.parametrize(
    "words",
    [(*MODEL, "strategy.data.kind=each_tensor"), LAYOUT, *([DATA] if FULL else [])],
    ids=["all", "layout", *(["data"] if FULL else [])],
)
def test_a_plug_in_runs_and_sends_what_was_predicted(site, tmp_path, words):
    done = parallelrun(site, tmp_path, "run", *words, *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = [path for path in tmp_path.rglob("comm.json") if "latest" not in path.parts]
    rows = json.loads(found.read_text())["rows"]
    assert rows and all(
        (row["calls"], row["payload_bytes"]) == (row["predicted_calls"], row["predicted_payload_bytes"]) for row in rows
    )


def test_a_plug_in_declares_its_samples(site, tmp_path):
    wrong = parallelrun(site, tmp_path, "run", "model=gpt", "dataset=ramp", "strategy=single", *SMALL)
    assert wrong.returncode == 2 and "dataset=ramp gives features, and model=gpt reads tokens" in wrong.stderr
    assert "model=mlp" in wrong.stderr and not list(tmp_path.iterdir())
    other = parallelrun(site, tmp_path, "plan", "model=bowl", "dataset=pystdlib", "strategy=single")
    assert other.returncode == 2 and "dataset=pystdlib gives tokens, and model=bowl reads features" in other.stderr
    fixed = parallelrun(site, tmp_path, "run", "model=mlp", "dataset=ramp", "strategy=single", *SMALL)
    assert fixed.returncode == 0, fixed.stderr


def test_plug_ins_are_planned_listed_and_suggested(site, tmp_path):
    planned = parallelrun(site, tmp_path, "plan", "--json", *DATA, cold=True)
    assert planned.returncode == 0, planned.stderr
    document = json.loads(planned.stdout)
    assert document["data"]["kind"] == "each_tensor" and "torch" not in planned.stderr
    wrong = parallelrun(site, tmp_path, "plan", "strategy=ddp", "strategy.data.kind=each_tensr")
    assert wrong.returncode == 2 and "each_tensor" in wrong.stderr


def test_a_key_of_a_plug_in_is_listed_bounded_and_refused_where_nothing_reads_it(site, tmp_path):
    key = "strategy.data.max_pending"
    listed = parallelrun(site, tmp_path, "ls", "keys")
    assert key in listed.stdout and "all-reduces that may be under way at once" in listed.stdout
    planned = json.loads(parallelrun(site, tmp_path, "plan", "--json", *DATA, f"{key}=3").stdout)
    assert planned["data"]["max_pending"] == 3
    bounds = parallelrun(site, tmp_path, "plan", *DATA, f"{key}=0")
    assert bounds.returncode == 2 and f"{key}=0 is not a whole number of at least 1" in bounds.stderr
    unread = parallelrun(site, tmp_path, "plan", "strategy=ddp", "dp=2", f"{key}=2")
    assert unread.returncode == 2 and "strategy=each_tensor" in unread.stderr


def test_a_plug_in_that_cannot_be_imported_spoils_only_the_commands_that_choose_it(tmp_path):
    info = tmp_path / "site" / "broken-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    entries = "".join(f"{axis}.broken = nosuch_package\n" for axis in ("data", "tensor", "pipeline", "expert"))
    (info / "entry_points.txt").write_text(f"[parallelrun.strategies]\n{entries}")
    axes = (DATA[1:], ("layout=2d", "tp=4"), ("schedule=gpipe", "pp=2", "microbatches=4"))
    for words in axes if FULL else [sum(axes, ())]:
        planned = parallelrun(tmp_path / "site", tmp_path, "plan", "--json", "strategy=ptdp", *words)
        assert planned.returncode == 0, planned.stderr
    unread = parallelrun(tmp_path / "site", tmp_path, "plan", "strategy=ring", "dp=2", "staleness=2")
    assert unread.returncode == 2 and "strategy=ps" in unread.stderr
    chosen = parallelrun(tmp_path / "site", tmp_path, "plan", "strategy.data.kind=broken")
    assert chosen.returncode != 0 and "nosuch_package" in chosen.stderr
