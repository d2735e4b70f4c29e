"""The run directory: exclusive, private, inside its root; the manifest without secrets."""

from __future__ import annotations

import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from parallelrun.base.errors import EnvironmentProblem
from parallelrun.base.records import redact
from parallelrun.launch.host import directory
from parallelrun.launch.host.directory import Status
from parallelrun.planner.resolve.freeze import load_frozen
from parallelrun.planner.resolve.resolve_config import resolve
from tests.plans import tiny_config, tiny_plan


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ({"dp": 2, "tp": 2}, "gpt-ptdp-dp2tp2"),
        ({"pp": 2}, "gpt-ptdp-pp2"),
        ({}, "gpt-ptdp-one"),
        ({"name": "my_run.1"}, "my_run.1"),
    ],
)
def test_a_run_is_named_by_model_strategy_and_degrees(overrides, name):
    assert directory.name_of(tiny_config(overrides), tiny_plan(overrides)) == name


def test_many_runs_at_once_get_directories_of_their_own(tmp_path):
    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(lambda _: directory.create(tmp_path / "runs", "a"), range(40)))
    assert len(set(made)) == 40
    assert (tmp_path / "runs" / "latest").resolve() in made
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["a", "latest"]


def test_the_directory_is_private_and_latest_points_at_it(tmp_path):
    made = directory.create(tmp_path / "runs", "a")
    assert made.parent == tmp_path / "runs" / "a"
    assert {stat.S_IMODE(p.stat().st_mode) for p in (made, made / "logs")} == {0o700}
    assert os.readlink(tmp_path / "runs" / "latest") == f"a/{made.name}"


def test_a_link_out_of_the_root_is_not_followed(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs" / "a").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EnvironmentProblem, match="is outside"):
        directory.create(tmp_path / "runs", "a")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_root_that_is_a_file_is_refused_by_name(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(EnvironmentProblem, match=r"cannot create the run directory in .*/runs"):
        directory.create(tmp_path / "runs", "a")


@pytest.mark.parametrize("held", ["config.yaml", "status.json", "metrics.jsonl", "checkpoints", "logs"])
def test_a_chosen_directory_is_used_as_it_is_unless_it_holds_a_run(tmp_path, held):
    assert directory.create(tmp_path / "runs", "a", tmp_path / "new" / "one") == tmp_path / "new" / "one"
    assert not (tmp_path / "runs").exists()
    (tmp_path / "taken" / held).mkdir(parents=True)
    with pytest.raises(EnvironmentProblem, match=f"holds another run.*{held}"):
        directory.create(tmp_path / "runs", "a", tmp_path / "taken")


def test_a_chosen_directory_goes_to_one_of_two_who_want_it(tmp_path):
    def claim(_):
        try:
            return directory.create(tmp_path, "a", tmp_path / "one")
        except EnvironmentProblem:
            return None

    with ThreadPoolExecutor(8) as pool:
        assert sum(made is not None for made in pool.map(claim, range(24))) == 1


def test_the_description_gives_the_same_plan_again(tmp_path):
    config, plan = tiny_config(dp=2, tp=2), tiny_plan(dp=2, tp=2)
    made = directory.create(tmp_path, "a")
    directory.describe(made, config, plan, ["run", "dp=2", "tracker.api_key=hush"], ["dp=2"])
    again = resolve(load_frozen((made / "config.yaml").read_text()))
    assert again == replace(plan, filled=())  # what was filled in is given now
    assert json.loads((made / "plan.json").read_text())["world"] == 4
    manifest = json.loads((made / "manifest.json").read_text())
    assert manifest["argv"] == ["run", "dp=2", "tracker.api_key=<redacted>"]
    assert manifest["schema"] == 1 and manifest["seeds"] == {"seed": config.seed}
    assert {"torch", "parallelrun", "python", "hydra-core"} <= manifest["versions"].keys()
    assert "hush" not in "".join(p.read_text() for p in made.iterdir() if p.is_file())


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("wandb.token=abc", "wandb.token=<redacted>"),
        ("SECRET_KEY=abc", "SECRET_KEY=<redacted>"),
        ("a.passwd=x=y", "a.passwd=<redacted>"),
        ("path=https://me:pw@host/x", "path=https://me:<redacted>@host/x"),
        ("model.kv_heads=2", "model.kv_heads=2"),
        ("tokenizer=bpe", "tokenizer=bpe"),
        ("monkey=1", "monkey=1"),
        ("-v", "-v"),
    ],
)
def test_secrets_on_the_command_line_are_not_kept(argument, shown):
    assert redact(argument) == shown


def test_the_code_s_fingerprint_changes_with_the_code(tmp_path, monkeypatch):
    before = directory.code_fingerprint()
    assert before == directory.code_fingerprint() and len(before) == 64
    (tmp_path / "x.py").write_text("1")
    found = type("Spec", (), {"submodule_search_locations": [tmp_path]})
    monkeypatch.setattr(directory, "find_spec", lambda name: found)
    one = directory.code_fingerprint()
    (tmp_path / "x.py").write_text("2")
    assert len({before, one, directory.code_fingerprint()}) == 3


@pytest.mark.parametrize(
    ("code", "state"), [(0, "done"), (75, "preempted"), (6, "failed"), (130, "interrupted"), (143, "interrupted")]
)
def test_the_status_says_how_a_run_ended(tmp_path, code, state):
    status = Status(tmp_path)
    status.running(step=4)
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "running"
    status.ended(code, "why" if code == 6 else None, 2 if code == 6 else None)
    fields = json.loads((tmp_path / "status.json").read_text())
    assert (fields["state"], fields["exit_code"], fields["step"]) == (state, code, 4)
    keys = ["schema", "state", "exit_code", "error", "failed_rank", "pid", "host", "step", "updated_utc"]
    assert list(fields) == keys
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
