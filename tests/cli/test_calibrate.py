"""`parallelrun calibrate` on this machine: two ranks, one training, a few seconds."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from parallelrun.base.errors import ConfigError
from parallelrun.cli.calibration import devices, session, training
from parallelrun.cli.main import main
from parallelrun.cli.tools import calibrate
from tests.cli.launcher import program_in, run_to_end

TRAINING = ("two ranks", ("model=gpt", "model.hidden=16", "model.layers=2", "model.seq=16", "strategy=ddp", "dp=2",
                          "global_batch=4"))  # fmt: skip
TIMED = ("bench.warmup=1", "bench.steps=3", "dataset=synthetic")


def quickly(call: dict[str, Any]) -> int:
    """The program in a process of its own, which calibrates with one training."""
    training.STEPS, training.TIMED_STEPS = (TRAINING,), TIMED
    session.MEASUREMENT_S, session.ALLOWED_S = 0.005, 1.0
    # Of everything that is timed as many, but smaller: what is fitted to the times is not looked at.
    products = devices.Products("fp32", (128, 1024), (16, 32, 64), ((25, 26, 27),) * 3, 96)
    precisions = {"fp32": devices.PRECISIONS["fp32"]}  # fp16 is emulated, on a busy machine below any plausible rate
    for name, small in {"REPEATS": 2, "PRECISIONS": precisions, "PRODUCTS": {"cpu": products}, "COPIED": (2**12, 2**14),
                        "EXCHANGED": (2**10, 2**12, 2**14, 2**16)}.items():  # fmt: skip
        setattr(devices, name, small)
    return program_in(call)


@pytest.mark.slow
def test_a_calibration_writes_a_cluster(tmp_path):
    def program(*words: str) -> subprocess.CompletedProcess[str]:
        done = run_to_end(
            *words, cwd=tmp_path, function=f"{__name__}:quickly", PARALLELRUN_CONFIG=str(tmp_path / "config")
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    file = tmp_path / "config" / "cluster" / "mine.yaml"
    first = program("calibrate", "cluster=mine", "seconds=60")
    assert "measuring: training: two ranks" in first.stderr and str(file) in first.stdout.replace("\n", "")
    text = file.read_text()
    assert "cores:" in text and "Fitted to 42 products, " in text and " 1 training," in text
    parts = json.loads(program("plan", "model=gpt", "strategy=ddp", "dp=2", "cluster=mine", "--json").stdout)["time"]
    assert parts["step_s"] > 0 and sum(parts["parts"].values()) == pytest.approx(parts["step_s"])


@pytest.mark.parametrize(
    ("words", "said"),
    [(["cluster=a100_dgx"], "built in"), (["clutser=x"], "clutser=x is none of"), (["seconds=soon"], "not a number"),
     (["seconds=1"], "not enough"), (["backend=mpi"], "must be one of"),
     (["cluster=mine"], "cannot write")],
)  # fmt: skip
def test_mistakes_are_said_before_anything_is_measured(words, said, monkeypatch, capfd, tmp_path):
    unwritable = said == "cannot write"
    monkeypatch.setattr(session, "run_task", lambda *arguments: pytest.fail("ranks were started"))
    monkeypatch.setenv("PARALLELRUN_CONFIG", "/proc/none" if unwritable else str(tmp_path))
    code = main(["calibrate", *words])
    assert code == (3 if unwritable else 2) and said in capfd.readouterr().err


def test_the_last_of_a_flag_is_its_folder():
    assert str(calibrate.parse(["--config-dir", "conf"])[0].config_dir) == "conf"
    assert calibrate.parse(["--config-dir=conf", "--json"])[0].json
    with pytest.raises(ConfigError):
        calibrate.parse(["cluster="])
