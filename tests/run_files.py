"""Writes small run directories, as a run would, for the tests of what reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from parallelrun.base.records import append_jsonl, write_json

CONFIG = {
    "model": {"name": "gpt", "preset": "gpt", "description": "a small one", "layers": 8},
    "strategy": {"name": "ddp", "data": {"kind": "ddp"}},
    "optimizer": {"lr": 0.003},
    "dp": 2,
    "tp": 1,
    "pp": 1,
    "steps": 4,
    "seed": 1,
    "runs": "runs",
    "verb": "run",
    "checkpoint": {"keep": 2},
}
LOSSES = (5.0, 4.0, 3.0, 2.0)


def changed(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with dotted keys replaced."""
    found: dict[str, Any] = {key: dict(value) if isinstance(value, dict) else value for key, value in values.items()}
    for key, value in changes.items():
        group, _, name = key.rpartition(".")
        (found[group] if group else found)[name] = value
    return found


def write_run(
    directory: Path, losses: Sequence[float | None] = LOSSES, *, config: Mapping[str, Any] | None = None,
    versions: Mapping[str, str] | None = None, state: str = "done", **summary: Any,
) -> Path:  # fmt: skip
    """Write the files of a run. config: changes of CONFIG by dotted key; summary: fields; none if it has `None`."""
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(yaml.safe_dump(changed(CONFIG, config or {}), sort_keys=False))
    manifest = {"versions": {"torch": "2.13.0", **(versions or {})}, "code_sha256": "c0de", "started_utc": "2026"}
    write_json(directory / "manifest.json", manifest)
    write_json(directory / "plan.json", {"world": 2, "degrees": {"dp": 2}, "stages": [{"blocks": ["a"]}]})
    status = {"state": state, "exit_code": 0 if state == "done" else 1, "step": len(losses), "pid": 0, "host": ""}
    write_json(directory / "status.json", status)
    for step, loss in enumerate(losses, 1):
        row = {"step": step, "loss": loss, "step_time_s": 0.5, "tokens_per_s": 100.0, "time_s": 0.5 * step}
        append_jsonl(directory / "metrics.jsonl", row)
    if state == "done":
        results = {"loss": losses[-1], "val_loss": 3.0, "step_time_median_s": 0.5, "tokens_per_s": 100.0, "steps": 4,
                   "peak_memory_bytes": 2**20, "wire_bytes_per_step": 1000, "ranks_per_core": 1.0}  # fmt: skip
        write_json(directory / "summary.json", {"state": state, **results, **summary})
    return directory
