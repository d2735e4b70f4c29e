"""The rows of a sweep: the files of its directory (`results.jsonl`, filled by `cli.sweeps.sweep`)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = "results.jsonl"
_RECORD = {"run": "summary.json", "bench": "bench.json", "verify": "verify.json"}
DEGREES = ("world", "dp", "cp", "tp", "pp", "ep", "servers")
PLANNED = "planned"
FINISHED = ("done", PLANNED)  # states of points that have figures


def read(directory: Path) -> list[dict[str, Any]]:
    """Return the rows of a sweep, by point. Of a configuration that several invocations have run, only the last
    invocation's rows count; points that repeat within one invocation are all listed. A torn last line is ignored."""
    by_config: dict[str, dict[int, dict[str, Any]]] = {}
    for row in read_jsonl(directory / RESULTS):
        points = by_config.setdefault(row.get("config_sha256") or f"point {row.get('point')}", {})
        if any(old.get("invocation") != row.get("invocation") for old in points.values()):
            points.clear()
        points[row.get("point", 0)] = row
    rows = [row for points in by_config.values() for row in points.values()]
    return sorted(rows, key=lambda row: row.get("point", 0))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file's lines, without torn lines; [] if there is no such file."""
    rows = []
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                row = json.loads(line)
                rows += [row] if isinstance(row, dict) else []
    return rows


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON file's object, or {} if it has none."""
    with contextlib.suppress(OSError, json.JSONDecodeError):
        value = json.loads(path.read_text(encoding="utf-8"))
        return value if isinstance(value, dict) else {}
    return {}


def summary(directory: Path, verb: str) -> dict[str, Any]:
    """Return a run directory's summary.json, bench.json or verify.json as one flat row; nested keys are dotted."""
    flat: dict[str, Any] = {}
    for key, value in read_json(directory / _RECORD[verb]).items():
        if isinstance(value, dict):
            flat |= {f"{key}.{inner}": item for inner, item in value.items() if not isinstance(item, (dict, list))}
        elif key not in ("schema", "overrides", "state") and not isinstance(value, list):
            flat[key] = value
    return flat


def is_crowded(row: Mapping[str, Any]) -> bool:
    """Return whether ranks of a point shared cores."""
    return (row.get("ranks_per_core") or 0) > 1


def overridden(row: dict[str, Any]) -> dict[str, str]:
    """Return the overrides of a point by key."""
    return dict(text.split("=", 1) for text in row.get("overrides", ()))


def varied(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return, per row, the overrides that are not common to all rows."""
    common = set.intersection(*(set(row.get("overrides", ())) for row in rows)) if len(rows) > 1 else set()
    return [[text for text in row.get("overrides", ()) if text not in common] for row in rows]
