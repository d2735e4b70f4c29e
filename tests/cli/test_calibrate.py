"""`parallelrun calibrate` on this machine: two ranks, one training, a few seconds."""

from __future__ import annotations

import json

import pytest

from parallelrun.calibrate import devices, session, training
from parallelrun.calibrate.measurements import CPU
from parallelrun.cli import calibrate
from parallelrun.cli.main import main
from parallelrun.errors import ConfigError, EnvironmentProblem

TRAINING = ("two ranks", ("model=gpt", "model.hidden=16", "model.layers=2", "model.seq=16", "strategy=ddp", "dp=2",
                          "global_batch=4"))  # fmt: skip
TIMED = ("bench.warmup=1", "bench.steps=3", "dataset=synthetic")


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """A calibration of one training, in a folder of its own."""
    monkeypatch.setenv("PARALLELRUN_CONFIG", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training, "STEPS", (TRAINING,))
    monkeypatch.setattr(training, "TIMED_STEPS", TIMED)
    monkeypatch.setattr(session, "MEASUREMENT_S", 0.005)
    monkeypatch.setattr(session, "ALLOWED_S", 1.0)
    # Of everything that is timed as many, but smaller: what is fitted to the times is not looked at.
    for name, small in {"REPEATS": 2, "HIDDEN": (16, 32, 64), "MISALIGNED": ((25, 26, 27),) * 3, "PEAK_SIZES": (96, 96),
                        "COPIED": (2**12, 2**14), "EXCHANGED": (2**10, 2**12, 2**14, 2**16)}.items():  # fmt: skip
        monkeypatch.setattr(devices, name, small)
    return tmp_path / "config" / "cluster" / "mine.yaml"


def test_a_calibration_writes_a_cluster_and_takes_runs_later(quick, capfd):
    assert main(["calibrate", "cluster=mine", "seconds=60"]) == 0
    out, said = capfd.readouterr()
    assert "measuring: training: two ranks" in said and str(quick) in out.replace("\n", "")
    text = quick.read_text()
    assert "cores:" in text and "Fitted to 42 products, " in text and " 1 trainings" in text
    assert main(["plan", "model=gpt", "strategy=ddp", "dp=2", "cluster=mine", "--json"]) == 0
    parts = json.loads(capfd.readouterr().out)["time"]
    assert parts["step_s"] > 0 and sum(parts["parts"].values()) == pytest.approx(parts["step_s"])
    bench = ["bench", *TRAINING[1], *TIMED, "name=run", "runs=runs"]
    assert main([*bench]) == 0
    assert main(["calibrate", "from=runs/latest", "--json"]) == 0
    document = json.loads(capfd.readouterr().out[-20_000:].partition("\n{")[2].join(["{", ""]))
    (added,) = document["added"]
    assert added["source"] == "runs/latest" and abs(added["after"] - 1) <= abs(added["before"] - 1) + 0.01
    assert "Added: runs/latest" in quick.read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [(["cluster=a100_dgx"], "built in"), (["clutser=x"], "no such key"), (["seconds=soon"], "not a number"),
     (["seconds=1"], "not enough"), (["backend=mpi"], "not one of"), (["from=/nonexistent/run"], "no config.yaml"),
     (["cluster=mine"], "cannot write")],
)  # fmt: skip
def test_mistakes_are_said_before_anything_is_measured(words, said, monkeypatch, capfd, tmp_path):
    unwritable = said == "cannot write"
    monkeypatch.setattr(session, "run_task", lambda *arguments: pytest.fail("ranks were started"))
    monkeypatch.setenv("PARALLELRUN_CONFIG", "/proc/none" if unwritable else str(tmp_path))
    code = main(["calibrate", *words])
    assert code == (3 if unwritable else 2) and said in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [(("strategy=single",), "waiting threads"), (("strategy=ps", "dp=2", "servers=1"), "threads of servers")],
)
def test_what_the_cpu_clock_does_not_show_is_not_timed(words, said, monkeypatch, tmp_path):
    monkeypatch.setattr(session, "run_task", lambda *arguments: pytest.fail("ranks were started"))
    with pytest.raises(EnvironmentProblem, match=said):
        session.Session().training(tmp_path, "a plan", ("model=gpt", *words), 2, True, CPU)


def test_the_last_of_a_flag_is_its_folder():
    assert str(calibrate.read(["--config-dir", "conf"]).config_dir) == "conf"
    assert calibrate.read(["--config-dir=conf", "--json"]).json
    with pytest.raises(ConfigError):
        calibrate.read(["cluster="])
