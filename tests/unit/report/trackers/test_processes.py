"""Trackers in processes of their own: whatever one does, training and the others go on, and the user is told once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from parallelrun.report.trackers.processes import following
from tests.cli.launcher import read, survivors, wait_for
from tests.cli.test_plugin import install
from tests.unit.report.trackers.run_directory import begin, end, train

FAULTY = """
import json, os, signal, sys, threading, time
from demo_plugin.diary import Diary

class Faulty(Diary):
    at = ""
    def fault(self):
        raise RuntimeError("the server is away")
    def __init__(self, run):
        self.at == "begin" and self.fault()
        super().__init__(run)
    def write(self, **line):
        with open(f"{self.path}.{type(self).__name__}", "a") as file:
            file.write(json.dumps(line) + "\\n")
    def log(self, step, metrics):
        print("chatter of a library", flush=True)
        step == 2 and self.at == "log" and self.fault()
        super().log(step, metrics)
    def finish(self, state, summary):
        self.at == "finish" and self.fault()
        super().finish(state, summary)

class Hanging(Faulty):
    at = "log"
    def fault(self):
        time.sleep(3600)

class Deaf(Faulty):
    at = "begin"
    def fault(self):
        os.kill(os.getpid(), signal.SIGSTOP)  # as if it held the interpreter for ever

class Full(Faulty):
    at = "log"
    def fault(self):
        raise OSError(28, "No space left on device")

class Leaving(Faulty):
    at = "finish"
    def fault(self):
        sys.exit("enough")

class Threaded(Faulty):
    def log(self, step, metrics):
        super().log(step, metrics)
        step == 1 and threading.Thread(target=time.sleep, args=(3600,)).start()
"""
MODULES = {
    **{name.lower(): f"from faulty import {name} as TRACKER" for name in ("Hanging", "Deaf", "Full", "Leaving")},
    "threaded": "from faulty import Threaded as TRACKER",
    "begin_fails": "from faulty import Faulty\nclass TRACKER(Faulty):\n    at = 'begin'",
    "log_fails": "from faulty import Faulty\nclass TRACKER(Faulty):\n    at = 'log'",
    "finish_fails": "from faulty import Faulty\nclass TRACKER(Faulty):\n    at = 'finish'",
    "absent": "import no_such_library",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The plug-in of tests/plugin, and trackers with faults, installed by entry points."""
    folder = install(tmp_path_factory.mktemp("site"))
    (folder / "faulty.py").write_text(FAULTY)
    for name, text in MODULES.items():
        (folder / f"tracker_{name}.py").write_text(text)
    lines = [f"{name} = tracker_{name}" for name in MODULES]
    info = folder / "faulty-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join(["[parallelrun.trackers]", *lines]))
    return folder


@pytest.fixture
def followed(site, tmp_path, monkeypatch, capfd):
    """A function: trains a few steps under trackers. Returns the run's directory, what was printed, and seconds that
    the end took. keep_up: trackers that have logged all steps when the training ends."""
    monkeypatch.syspath_prepend(str(site))

    def run(*names: str, timeout_s: float = 60.0, keep_up: tuple[str, ...] = ()) -> tuple[Path, str, float]:
        directory = begin(tmp_path, "run", **{"tracker.timeout_s": timeout_s})
        with following(directory, names, timeout_s):
            train(directory, [1, 2, 3])
            for name in keep_up:
                wait_for(lambda name=name: '"step": 3' in read(directory / "trackers" / f"{name}.json"), name)
            end(directory)
            began = time.monotonic()
        return directory, capfd.readouterr().err, time.monotonic() - began

    return run


def diary(directory: Path, ending: str = "") -> list[dict]:
    return [json.loads(line) for line in (directory / f"diary.jsonl{ending}").read_text().splitlines()]


AWAY = "RuntimeError: the server is away"
REASONS = {
    "begin_fails": AWAY, "log_fails": AWAY, "finish_fails": AWAY, "full": "OSError: [Errno 28] No space left on device",
    "leaving": "SystemExit: enough", "absent": "ModuleNotFoundError: No module named 'no_such_library'",
}  # fmt: skip


def test_each_tracker_that_fails_says_so_once(followed):
    _, said, _ = followed(*REASONS)
    expected = [f"warning: tracker={name} failed: {why}; the training is not affected" for name, why in REASONS.items()]
    assert sorted(said.splitlines()) == sorted(expected)


def test_of_two_trackers_one_fails_and_the_other_sees_everything(followed):
    directory, said, _ = followed("log_fails", "diary")
    assert said.count("warning: ") == 1 and "tracker=log_fails" in said
    assert diary(directory)[-1]["ended"] == "finished"
    log = (directory / "logs" / "tracker_log_fails.log").read_text()
    assert "RuntimeError: the server is away" in log and "Traceback" in log and "chatter of a library" in log


def test_calls_that_hang_end_after_the_timeout(followed):
    names = ("hanging", "deaf", "threaded", "diary")
    directory, said, seconds = followed(*names, timeout_s=3, keep_up=("threaded", "diary"))
    assert sorted(said.splitlines()) == [
        "warning: tracker=deaf does not answer, not even to the end of training; the training is not affected",
        "warning: tracker=hanging has not finished 3 s after the end of training (tracker.timeout_s); "
        "the training is not affected",
    ]
    assert seconds < 25
    assert diary(directory)[-1]["ended"] == "finished"
    assert diary(directory, ".Threaded")[-1]["ended"] == "finished"  # a thread of a library keeps no process alive


LAUNCHER = """
import sys, time
from pathlib import Path
from parallelrun.report.trackers.processes import following
with following(Path(sys.argv[1]), ["diary"], 30.0):
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_end_of_the_launcher_is_the_end_of_the_run(site, tmp_path, number):
    directory = begin(tmp_path, "run", **{"tracker.timeout_s": 30.0})
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *sys.path])}
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(directory)], env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert launcher.stdout is not None and launcher.stdout.readline() == b"ready\n"
        wait_for((directory / "diary.jsonl").exists, "the tracker")
        [follower] = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        train(directory, [1])
        end(directory, *(("interrupted", 130) if number == signal.SIGINT else ("failed", 6)))
        launcher.send_signal(number)
        launcher.wait(30)
        assert survivors([int(follower)], 30) == []
    finally:
        launcher.kill()
        launcher.wait()
    assert diary(directory)[-1]["ended"] == ("interrupted" if number == signal.SIGINT else "failed")
    assert [line["step"] for line in diary(directory) if "step" in line] == [1]
