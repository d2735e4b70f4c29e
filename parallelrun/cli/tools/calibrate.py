"""`parallelrun calibrate [cluster=mine] [from=RUN,...]`: measure this machine, or add runs to what was measured."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallelrun.base.errors import EXIT_OK, ConfigError, Problem
from parallelrun.cli.json_output import print_json, screen_on_stderr
from parallelrun.config import presets
from parallelrun.config.keys import nearest

USAGE = """usage: parallelrun calibrate [key=value ...] [--config-dir FOLDER] [--json]

Measures matrix products, memory, collectives and a few trainings of this machine, and writes the rates by which the
time of a step is predicted as a cluster, with date, versions and spread. Afterwards: parallelrun plan ... cluster=mine

  cluster=mine     the name of the cluster, in ~/.config/parallelrun/cluster (or FOLDER/cluster)
  seconds=100      how long to measure at most
  from=RUN,...     add the step times of runs (parallelrun bench) to an earlier calibration, and fit again
  backend=auto     of CPU collectives: auto | shm | gloo
  device=auto      auto: GPUs if there are any; cpu"""
_DEFAULTS = {"cluster": presets.MINE, "seconds": "100", "from": "", "backend": "auto", "device": "auto"}
_CHOICES = {"backend": ("auto", "shm", "gloo"), "device": ("auto", "cpu")}


@dataclass(frozen=True)
class Asked:
    """The options of the command line."""

    values: dict[str, str]
    seconds: float
    config_dir: Path | None
    json: bool


def main(words: list[str]) -> int:
    """Carry out the command line."""
    if any(word in ("-h", "--help") for word in words):
        print(USAGE)
        return EXIT_OK
    asked = read(words)
    with screen_on_stderr():
        document = _calibrate(asked)
    if asked.json:
        print_json(document)
    else:
        _show(document)
    return EXIT_OK


def read(words: list[str]) -> Asked:
    """Parse the words after `calibrate`. Raises ConfigError with every mistake."""
    values, problems, folder = dict(_DEFAULTS), [], None
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, equals, value = word.partition("=")
        if word in ("--json", "-v", "--verbose"):
            continue
        if key in ("--config-dir", "-cd"):
            folder = Path(value if equals else rest.pop(0) if rest else ".")
        elif key not in _DEFAULTS or not value:
            close = " or ".join(f"{name}=..." for name in nearest(key, list(_DEFAULTS)))
            problems.append(
                Problem(f"calibrate {word}: no such key", "command line", close, "parallelrun calibrate -h")
            )
        elif key in _CHOICES and value not in _CHOICES[key]:
            problems.append(Problem(f"{word}: not one of {', '.join(_CHOICES[key])}", key, f"{key}={_DEFAULTS[key]}"))
        else:
            values[key] = value
    try:
        seconds = float(values["seconds"])
    except ValueError:
        problems.append(Problem(f"seconds={values['seconds']} is not a number", "seconds", "seconds=100"))
    if problems:
        raise ConfigError(*problems)
    return Asked(values, seconds, folder, "--json" in words)


def _calibrate(asked: Asked) -> dict[str, Any]:
    """Measure or read, fit, write; return everything that is shown."""
    from parallelrun.cli.calibration import file
    from parallelrun.cli.calibration.constants import calibrated, ratios_of
    from parallelrun.cli.calibration.runs import check_folders, steps_of

    name = asked.values["cluster"]
    path = file.place(name, asked.config_dir)
    folders = asked.values["from"].split(",") if asked.values["from"] else []
    check_folders(folders)
    file.prepare(path)
    measured = _measured(asked, path)
    calibration, added, before = calibrated(measured, name), [], []
    if folders:
        added = steps_of(folders, measured, calibration.cluster)
        before = ratios_of(calibration.cluster, measured.clock, added)
        calibration = calibrated(measured, name, added)
    file.write(path, measured, calibration, added)
    return {
        "cluster": name,
        "path": str(path),
        "clock": measured.clock,
        "seconds": measured.seconds,
        "provenance": file.provenance(measured, calibration, added),
        "constants": {key: file.rounded(getattr(calibration.cluster, key)) for key in calibration.fitted},
        "median_error": calibration.error,
        "steps": [
            {"name": step.name, "source": step.source, "measured_s": step.sample.seconds(measured.clock),
             "spread": step.sample.spread, "predicted_over_measured": ratio}
            for step, ratio in calibration.ratios
        ],
        "added": [
            {"source": step.source, "before": old, "after": dict(calibration.ratios)[step]}
            for step, old in zip(added, before)
        ],
        "skipped": list(measured.skipped),
    }  # fmt: skip


def _measured(asked: Asked, path: Path) -> Any:
    from parallelrun.cli.calibration import file, measurements

    saved = file.measurements_of(path)
    if asked.values["from"] and saved.is_file():
        return measurements.load(saved)
    from parallelrun.cli.calibration.session import Session

    def say(what: str) -> None:
        print(f"measuring: {what}", file=sys.stderr, flush=True)

    return Session(asked.seconds, asked.values["backend"], asked.values["device"], say=say).measure()


def _show(document: dict[str, Any]) -> None:
    """Print the constants, and each training beside its prediction."""
    from parallelrun.report.screen import open_console, table

    console = open_console()
    constants = table("constant", ">", "value", title=f"cluster={document['cluster']}", padding=(0, 2, 0, 0))
    for key, value in document["constants"].items():
        constants.add_row(key, f"{value:g}")
    console.print(constants)
    clock = "CPU time" if document["clock"] == "cpu" else "time"
    steps = table("training", ">", f"{clock} of a step", ">", "predicted", ">", "spread", padding=(0, 2, 0, 0))
    for row in document["steps"]:
        measured = row["measured_s"] * 1e3
        predicted = measured * row["predicted_over_measured"]
        steps.add_row(row["name"], f"{measured:.1f} ms", f"{predicted:.1f} ms", f"{row['spread']:.0%}")
    console.print(steps)
    for row in document["added"]:
        before, after = (abs(row[key] - 1) for key in ("before", "after"))
        console.print(f"added {row['source']}: error {before:.1%} before, {after:.1%} after")
    for line in document["provenance"]:
        console.print(line)
    console.print(f"written: {document['path']}")
    console.print(f"parallelrun plan ... cluster={document['cluster']}")
