"""`parallelrun calibrate [cluster=mine]`: measure this machine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from parallelrun.base.errors import EXIT_OK, ConfigError
from parallelrun.cli.json_output import print_json, screen_on_stderr
from parallelrun.cli.tool_settings import keys_of, read_settings
from parallelrun.config import presets
from parallelrun.config.keys import Key

_DESCRIPTION = """Measure matrix products, memory, collectives and a few trainings of this machine, and write the rates
by which the time of a step is predicted as a cluster, with date, versions and spread. Afterwards:
parallelrun plan ... cluster=mine

  cluster=mine     the name of the cluster, in ~/.config/parallelrun/cluster (or FOLDER/cluster)
  seconds=100      the longest time to measure
  backend=auto     of CPU collectives: auto | shm | gloo
  device=auto      auto: GPUs if there are any; cpu"""
_KEYS = keys_of(
    Key("cluster", "str", False),
    Key("seconds", "float", False, least=0),
    Key("backend", "str", False, choices=("auto", "shm", "gloo")),
    Key("device", "str", False, choices=("auto", "cpu")),
)
_DEFAULTS = {"cluster": presets.MINE, "seconds": 100.0, "backend": "auto", "device": "auto"}


def main(words: list[str]) -> int:
    """Carry out the command line."""
    options, settings = parse(words)
    with screen_on_stderr():
        document = _calibrate(settings, options.config_dir)
    if options.json:
        print_json(document)
    else:
        _show(document)
    return EXIT_OK


def parse(words: list[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """(the flags, the settings) of the words after `calibrate`. Raises ConfigError with every mistake."""
    parser = argparse.ArgumentParser(
        "parallelrun calibrate", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", nargs="*", metavar="key=value")
    parser.add_argument("--config-dir", "-cd", metavar="FOLDER", type=Path, help="write the cluster below this folder")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")
    options = parser.parse_intermixed_args(words)
    settings, problems = read_settings(options.settings, _KEYS, _DEFAULTS)
    if problems:
        raise ConfigError(*problems)
    return options, settings


def _calibrate(settings: dict[str, Any], config_dir: Path | None) -> dict[str, Any]:
    """Measure, fit, write; return everything that is shown."""
    from parallelrun.cli.calibration import file
    from parallelrun.cli.calibration.constants import calibrated
    from parallelrun.cli.calibration.session import Session

    name = settings["cluster"]
    path = file.place(name, config_dir)
    file.prepare(path)

    def say(part: str) -> None:
        print(f"measuring: {part}", file=sys.stderr, flush=True)

    measured = Session(settings["seconds"], settings["backend"], settings["device"], say=say).measure()
    calibration = calibrated(measured, name)
    file.write(path, measured, calibration)
    return {
        "cluster": name,
        "path": str(path),
        "seconds": measured.seconds,
        "provenance": file.provenance(measured, calibration),
        "constants": {key: file.rounded(getattr(calibration.cluster, key)) for key in calibration.fitted},
        "median_error": calibration.error,
        "steps": [
            {"name": step.name, "measured_s": step.sample.seconds,
             "spread": step.sample.spread, "predicted_over_measured": ratio}
            for step, ratio in calibration.ratios
        ],
        "skipped": list(measured.skipped),
    }  # fmt: skip


def _show(document: dict[str, Any]) -> None:
    """Print the constants, and each training beside its prediction."""
    from parallelrun.report.screen import open_console, table

    console = open_console()
    constants = table("constant", ">", "value", title=f"cluster={document['cluster']}", padding=(0, 2, 0, 0))
    for key, value in document["constants"].items():
        constants.add_row(key, f"{value:g}")
    console.print(constants)
    steps = table("training", ">", "time of a step", ">", "predicted", ">", "spread", padding=(0, 2, 0, 0))
    for row in document["steps"]:
        measured = row["measured_s"] * 1e3
        predicted = measured * row["predicted_over_measured"]
        steps.add_row(row["name"], f"{measured:.1f} ms", f"{predicted:.1f} ms", f"{row['spread']:.0%}")
    console.print(steps)
    for line in document["provenance"]:
        console.print(line)
    console.print(f"written: {document['path']}")
    console.print(f"parallelrun plan ... cluster={document['cluster']}")
