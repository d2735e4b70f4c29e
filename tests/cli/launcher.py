"""A launcher for tests: `python -m tests.cli.launcher <json>`; runs `start` on the tiny plan with a worker of
`tests.cli.workers` and exits with its code."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path


def main(text: str) -> int:
    from parallelrun.cli import errors
    from parallelrun.launch.start import start
    from tests.plans import tiny_config, tiny_plan

    wanted = json.loads(text)
    overrides = wanted["overrides"]
    config = replace(tiny_config(overrides), runs=wanted["runs"], timeout_s=wanted["timeout_s"])
    words = [f"{key}={value}" for key, value in overrides.items()]
    root = Path(wanted["run_root"]) if wanted.get("run_root") else None
    try:
        return start(config, tiny_plan(overrides), words, words, root, wanted["worker"], wanted["method"])
    except Exception as error:
        return errors.report(error, False)


if __name__ == "__main__":
    os.chdir(Path(__file__).parents[2])
    sys.exit(main(sys.argv[1]))
