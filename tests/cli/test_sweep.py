"""Sweeps: illegal points are skipped, failing ones do not stop it, and it can go on where it stopped.

The launcher is replaced where many points are needed; `test_program` sweeps with real ranks.
"""

from __future__ import annotations

import csv
import json
import math
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from parallelrun.base.records import write_json
from parallelrun.cli import main as program
from parallelrun.report.sweeps import sweep_rows
from tests import compositions

pytestmark = pytest.mark.usefixtures("composed_once")


class Launcher:
    """Stands for `launch.entry.start.start`: writes the files of a run and returns the code chosen for its degrees."""

    def __init__(self):
        self.codes: dict[str, int] = {}
        self.started: list[str] = []

    def __call__(self, config, plan, argv, overrides, run_root):
        self.started.append(plan.preset)
        run_root.mkdir(parents=True)
        code = self.codes.get(plan.preset, 0)
        if isinstance(code, BaseException):
            raise code
        write_json(run_root / "status.json", {"state": "done" if code == 0 else "failed", "error": f"code {code}"})
        write_json(run_root / "summary.json", {"world": plan.world, "loss": 1.5, "degrees": {"dp": 2}, "times": [1, 2]})
        return code


@pytest.fixture
def launcher(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    launcher = Launcher()
    monkeypatch.setattr("parallelrun.launch.entry.start.start", launcher)
    return launcher


def sweep(line: str) -> int:
    return program.main(["-m", *line.split()])


def only_directory() -> Path:
    (directory,) = Path("runs").glob("sweep-*")
    return directory


def states(directory: Path) -> list[str]:
    return [row["state"] for row in sweep_rows.read(directory)]


def test_illegal_points_are_skipped_and_failing_ones_do_not_stop_it(launcher, capsys):
    launcher.codes["tp"] = 6
    assert sweep("strategy=ddp,tp,single,gpipe world=2") == 1
    directory = only_directory()
    assert launcher.started == ["ddp", "tp", "gpipe"]
    assert states(directory) == ["done", "failed", "skipped", "done"]
    rows = sweep_rows.read(directory)
    assert rows[1]["reason"] == "code 6" and rows[1]["exit_code"] == 6
    assert "one device" in rows[2]["reason"]
    assert rows[0]["loss"] == 1.5 and rows[0]["degrees.dp"] == 2 and "times" not in rows[0]
    assert (directory / rows[0]["directory"] / "summary.json").is_file()
    out = capsys.readouterr().out
    for text in ("strategy=tp", "failed", "code 6", "skipped", "one device", "results.csv", "1.5"):
        assert text in out


def test_a_point_that_differs_only_in_a_key_that_nobody_reads_is_run_once(launcher, capsys):
    assert sweep("strategy=ddp,ps world=4 consistency=sync,async") == 0
    assert launcher.started == ["ddp", "ps", "ps"]
    rows = sweep_rows.read(only_directory())
    assert [row["state"] for row in rows] == ["done", "skipped", "done", "done"]
    assert rows[1]["reason"].startswith("the same run as point 0; consistency=async is read by none")
    assert "skipped: the same run as point 0" in capsys.readouterr().out


def test_a_repeated_point_runs_once_and_is_listed_as_the_same_as_the_first(launcher, capsys):
    assert sweep("strategy=ddp,tp world=2 optimizer.lr=1e-3,0.001") == 0
    assert launcher.started == ["ddp", "tp"]
    rows = sweep_rows.read(only_directory())
    assert [row["state"] for row in rows] == ["done", "skipped", "done", "skipped"]
    assert [row.get("same_as") for row in rows] == [None, 0, None, 2] and rows[0]["loss"] == 1.5
    out = capsys.readouterr().out
    assert "skipped: the same run as point 0" in out and "same as 2" in out


def test_a_repeat_of_a_failed_point_is_not_run_either_and_the_failure_stands(launcher):
    launcher.codes["ddp"] = 6
    assert sweep("strategy=ddp world=2 optimizer.lr=1e-3,0.001") == 1
    assert launcher.started == ["ddp"] and states(only_directory()) == ["failed", "skipped"]


def test_repeated_points_are_listed_once_each_when_a_sweep_goes_on(launcher):
    points = "strategy=ddp,tp world=2 optimizer.lr=1e-3,0.001"
    launcher.codes["tp"] = 130
    assert sweep(points) == 130
    assert states(only_directory()) == ["done", "skipped", "stopped"]
    launcher.codes.clear()
    launcher.started.clear()
    assert sweep(f"{points} sweep.resume={only_directory()}") == 0
    assert launcher.started == ["tp"]
    rows = sweep_rows.read(only_directory())
    assert [(row["point"], row["state"], row.get("same_as")) for row in rows] == [
        (0, "done", None), (1, "skipped", 0), (2, "done", None), (3, "skipped", 2),
    ]  # fmt: skip
    assert rows[0]["loss"] == rows[2]["loss"] == 1.5


def csv_rows(directory: Path) -> list[dict[str, str]]:
    with open(directory / "results.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> tuple[Path, str]:
    """A sweep of eight points, of which the last two are illegal: its directory, and what it has printed."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as screen:
        patch.chdir(tmp_path_factory.mktemp("wide"))
        patch.setattr("parallelrun.launch.entry.start.start", Launcher())
        compositions.keep(patch)
        assert sweep("strategy=ddp,ps,tp,single world=4 optimizer.lr=1e-3,2e-3") == 0
        return only_directory().resolve(), screen.getvalue()


def test_the_csv_has_the_same_rows(wide):
    rows = csv_rows(wide[0])
    assert [row["state"] for row in rows] == states(wide[0]) == ["done"] * 6 + ["skipped"] * 2
    assert rows[0]["loss"] == "1.5" and rows[0]["overrides"] == "strategy=ddp world=4 optimizer.lr=0.001"
    assert rows[6]["loss"] == ""


def test_the_csv_has_every_override_and_every_degree_as_a_column(wide):
    rows = csv_rows(wide[0])
    assert [row["optimizer.lr"] for row in rows[:4]] == ["0.001", "0.002"] * 2
    assert [row["strategy"] for row in rows] == ["ddp", "ddp", "ps", "ps", "tp", "tp", "single", "single"]
    degrees = ("world", "dp", "tp", "pp", "ep", "servers")
    assert [[rows[point][key] for key in degrees] for point in (0, 2, 4)] == [
        ["4", "4", "1", "1", "1", "0"], ["4", "3", "1", "1", "1", "1"], ["4", "1", "4", "1", "1", "0"],
    ]  # fmt: skip
    assert rows[6]["state"] == "skipped" and rows[6]["world"] == "4" and rows[6]["dp"] == ""


DEGREES = ("dp=4", "dp=3 servers=1", "tp=4")


def test_the_table_of_runs_shows_the_degrees(wide):
    head, *lines = wide[1].partition("sweep of 8 points")[2].splitlines()[1:]
    assert "world  degrees" in head
    for number, line in enumerate(lines[:6]):
        assert f" 4  {DEGREES[number // 2]} " in line


def test_the_table_of_plans_shows_the_degrees(launcher, capsys):
    assert program.main(["plan", "-m", "strategy=ddp,ps,tp,single", "world=4"]) == 0
    head, *lines = capsys.readouterr().out.partition("sweep of 4 points")[2].splitlines()[1:]
    assert "world  degrees" in head
    for line, degrees in zip(lines, DEGREES, strict=False):
        assert f" 4  {degrees} " in line


def test_plans_are_one_table_unless_sections_are_asked_for(launcher, capsys):
    line = ["plan", "-m", "model=gpt2_124m", "strategy=ddp", "dp=8", "cluster=a100_dgx", "micro_batch=2,3,5"]
    assert program.main(line) == 0
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.strip() == "sweep of 3 points" and len(lines) == 6
    reason = "global_batch=48 is not divisible by dp x micro_batch = 8 x 5 = 40"
    assert lines[-2] == f"# 2 micro_batch=5: skipped: {reason}"
    assert program.main([*line, "detail=stages"]) == 0
    assert capsys.readouterr().out.count("stages and memory:") == 2


def test_a_planned_point_has_the_predicted_time_not_the_bound_at_the_peak_rate(launcher, capsys):
    line = ["plan", "-m", "--json", "strategy=ddp", "dp=8", "cluster=a100_dgx,ethernet_25g"]
    assert program.main(line) == 0
    predicted, bound = json.loads(capsys.readouterr().out)["points"]
    assert predicted["step_time_predicted_s"] == predicted["time"]["step_s"] and not predicted["step_time_is_bound"]
    assert predicted["tokens_per_s"] == pytest.approx(8 * predicted["time"]["tokens_per_s_per_gpu"])
    assert predicted["memory"]["heaviest_gib"] == predicted["memory_bytes"] / 2**30
    assert bound["time"] is None and bound["step_time_is_bound"]
    assert bound["step_time_predicted_s"] == bound["cost"]["compute_s"] + bound["cost"]["communication_s"]


def test_plans_of_a_number_of_tokens_have_their_days(launcher, capsys):
    line = ["plan", "-m", "strategy=ddp", "dp=8", "cluster=a100_dgx,ethernet_25g", "tokens=1e9", "global_batch=48"]
    assert program.main([*line, "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    for point in points:
        steps = point["training"]["steps"]
        assert steps == math.ceil(1e9 / (48 * 64))
        assert point["training_days"] == pytest.approx(steps * point["step_time_predicted_s"] / 86400)
    assert program.main(line) == 0
    _, head, first, second, *_ = capsys.readouterr().out.splitlines()
    assert "days" in head.split() and f"{points[0]['training_days']:.3g} " in first
    assert f"{points[1]['training_days']:.3g}* " in second  # of a bound
    assert program.main([word for word in line if "tokens" not in word]) == 0
    assert "days" not in capsys.readouterr().out


def test_all_done_is_0_and_none_legal_is_2(launcher):
    assert sweep("strategy=ddp,tp world=2") == 0
    assert sweep("strategy=single world=2,4") == 2


def test_an_exception_of_one_point_is_its_row_and_no_more(launcher, capsys):
    launcher.codes["ddp"] = ZeroDivisionError("by zero")
    assert sweep("strategy=ddp,tp world=2") == 1
    assert states(only_directory()) == ["failed", "done"]
    assert "by zero" in sweep_rows.read(only_directory())[0]["reason"]


def test_fail_fast_runs_nothing_after_a_failure(launcher):
    launcher.codes["ddp"] = 1
    assert sweep("strategy=ddp,tp,gpipe world=2 sweep.fail_fast=true") == 1
    assert launcher.started == ["ddp"]
    assert states(only_directory()) == ["failed", "skipped", "skipped"]


def test_fail_fast_forgets_the_failures_of_the_invocation_before(launcher):
    launcher.codes["ddp"] = 1
    points = "strategy=ddp,tp world=2 sweep.fail_fast=true"
    assert sweep(points) == 1
    launcher.codes.clear()
    assert sweep(f"{points} sweep.resume={only_directory()}") == 0
    assert states(only_directory()) == ["done", "done"]


def test_a_sweep_goes_on_where_it_stopped(launcher):
    launcher.codes["tp"] = 6
    assert sweep("strategy=ddp,tp world=2") == 1
    directory = only_directory()
    launcher.codes.clear()
    launcher.started.clear()
    assert sweep(f"strategy=ddp,tp,gpipe world=2 sweep.resume={directory}") == 0
    assert launcher.started == ["tp", "gpipe"]
    assert states(directory) == ["done", "done", "done"]
    assert only_directory() == directory
    assert len({row["directory"] for row in sweep_rows.read(directory)}) == 3


def test_a_sweep_that_is_killed_within_its_first_point_goes_on(launcher):
    class Killed(BaseException):
        """Nothing after it runs."""

    launcher.codes["ddp"] = Killed()
    with pytest.raises(Killed):
        sweep("strategy=ddp,tp world=2")
    directory = only_directory()
    launcher.codes.clear()
    assert sweep(f"strategy=ddp,tp world=2 sweep.resume={directory}") == 0
    assert launcher.started == ["ddp", "ddp", "tp"] and states(directory) == ["done", "done"]


def test_points_keep_no_last_state_unless_asked(launcher, monkeypatch):
    seen = []

    def start(config, *rest):
        seen.append(config.checkpoint.last)
        return launcher(config, *rest)

    monkeypatch.setattr("parallelrun.launch.entry.start.start", start)
    assert sweep("strategy=ddp,tp world=2") == sweep("strategy=ddp,tp world=2 checkpoint.last=true") == 0
    assert seen == [False, False, True, True]


@pytest.mark.parametrize("code", [130, 143, 75])
def test_an_interrupted_point_stops_the_sweep_with_its_code(launcher, capsys, code):
    launcher.codes["tp"] = code
    assert sweep("strategy=ddp,tp,gpipe world=2") == code
    assert launcher.started == ["ddp", "tp"]
    assert states(only_directory()) == ["done", "stopped"]
    assert "sweep.resume=" in capsys.readouterr().err


def test_a_sweep_may_say_where_its_files_go(launcher, capsys):
    assert sweep("strategy=ddp world=2,4 sweep.directory=here") == 0
    assert states(Path("here")) == ["done", "done"]
    assert sweep("strategy=ddp world=2,4 sweep.directory=here") == 3
    assert "already holds a sweep" in capsys.readouterr().err
    assert sweep("strategy=ddp world=2,4 sweep.resume=nowhere") == 3


def test_an_error_of_composition_starts_nothing_and_writes_nothing(launcher, tmp_path):
    assert sweep("model=gpt,gtp world=2") == 2
    assert launcher.started == [] and list(tmp_path.iterdir()) == []


def test_a_recipe_can_be_swept_and_is_shown_as_typed(launcher, tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults:\n  - override /strategy: tp\ntp: 2\n")
    assert sweep("recipe=./mine.yaml,quickstart steps=1") == 0
    assert launcher.started == ["tp", "ptdp"]
    assert sweep_rows.read(only_directory())[0]["overrides"] == ["recipe=./mine.yaml", "steps=1"]


def test_a_torn_last_line_is_left_out(tmp_path):
    (tmp_path / sweep_rows.RESULTS).write_text(json.dumps({"point": 0, "state": "done"}) + '\n{"point": 1, "sta')
    assert [row["point"] for row in sweep_rows.read(tmp_path)] == [0]


def test_the_table_names_what_varies():
    rows = [{"overrides": ["a=1", "b=2"]}, {"overrides": ["a=1", "b=3"]}]
    assert sweep_rows.varied(rows) == [["b=2"], ["b=3"]]
