"""A run's status as Prometheus text (exposition format 0.0.4), for node_exporter's textfile collector. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

STATES = ("running", "done", "failed", "preempted", "interrupted")


def exposition(status: Mapping[str, Any], run: str) -> str:
    """Return `status`, the fields of status.json, as gauges with the label `run`.

    `parallelrun_run_state` is 1 for the state of the run and 0 for the others. The exit code has a value once the run
    has ended, the failed save once there was one.
    """
    label = f'run="{_escaped(run)}"'
    gauges = [
        ("step", "Last step of the run.", {label: status["step"]}),
        ("state", "1 for the state of the run.", {f'{label},state="{s}"': int(s == status["state"]) for s in STATES}),
        ("exit_code", "Exit code of the run, once it has ended.", {label: status["exit_code"]}),
        ("failed_save_step", "Last step whose save failed.", {label: status.get("failed_save_step")}),
        ("updated_timestamp_seconds", "When the status was written.", {label: round(time.time(), 3)}),
    ]
    lines = []
    for name, meaning, all_values in gauges:
        values = {labels: value for labels, value in all_values.items() if value is not None}
        if not values:
            continue
        lines += [f"# HELP parallelrun_run_{name} {meaning}", f"# TYPE parallelrun_run_{name} gauge"]
        lines += [f"parallelrun_run_{name}{{{labels}}} {value}" for labels, value in values.items()]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    """A label's value: backslashes, quotes and line breaks have escapes."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
