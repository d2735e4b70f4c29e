"""Reads one run directory into plain data, and names the file and key of whatever is broken.

A run that has failed or still trains lacks files: what is missing is empty, what exists must be right.
"""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from parallelrun.base.errors import EXIT_MISMATCH, ConfigError, ParallelrunError, Problem
from parallelrun.report.records.find import CONFIG, MANIFEST, STATUS, is_run

METRICS, PLAN = "metrics.jsonl", "plan.json"
RESULTS = ("summary.json", "bench.json", "verify.json")  # of the verbs run, bench and verify
FIRST_TIMED_STEP = 3  # as in training.metrics.step_records: steps 1 and 2 are slower
_NUMBERS = ("loss", "val_loss", "step_time_s", "tokens_per_s", "grad_norm", "lr")  # of metrics.jsonl


@dataclass(frozen=True)
class RunRecord:
    """The contents of a run directory. config, plan, manifest and results are flat: `optimizer.lr`, `degrees.tp`.

    state: running, done, failed, preempted, interrupted or unknown; results: the summary's values, or those that
    the steps so far give; rows: the rows of metrics.jsonl, ascending by step.
    """

    directory: Path
    state: str
    config: Mapping[str, Any]
    plan: Mapping[str, Any]
    manifest: Mapping[str, Any]
    results: Mapping[str, Any]
    rows: tuple[Mapping[str, Any], ...]

    def number(self, key: str) -> float | None:
        """Return a result if it is a number, else None."""
        value = self.results.get(key)
        return float(value) if is_number(value) else None


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value is a number: True and False are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def read(directory: Path) -> RunRecord:
    """Return the record of a run directory.

    Raises ConfigError (exit 2) if it holds no run, ParallelrunError (exit 4) if a file is broken.
    """
    if not is_run(directory):
        raise ConfigError(Problem(f"{directory} is not a run: it has no {CONFIG}", str(directory)))
    rows = read_rows(directory / METRICS)
    results_file = next((name for name in RESULTS if (directory / name).is_file()), None)
    results = flatten(read_object(directory / results_file)) if results_file else of_rows(rows)
    return RunRecord(
        directory=directory,
        state=str(read_object(directory / STATUS).get("state") or results.get("state") or "unknown"),
        config=flatten(read_yaml(directory / CONFIG)),
        plan=flatten(read_object(directory / PLAN)),
        manifest=flatten(read_object(directory / MANIFEST)),
        results=results,
        rows=rows,
    )


def broken(path: Path, what: str, key: str = "") -> ParallelrunError:
    """Return the error (exit 4) for a file that a run cannot have written."""
    return ParallelrunError(Problem(f"{path}: {what}", f"{path}{f':{key}' if key else ''}"), exit_code=EXIT_MISMATCH)


@contextlib.contextmanager
def expecting(path: Path, key: str = "") -> Iterator[None]:
    """Raise the error of `broken` if the block does not find in a file's content what a run writes."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise broken(path, f"incomplete: {error!r}", key) from error


def read_object(path: Path) -> dict[str, Any]:
    """Return a JSON file's object; {} if there is no such file. Raises ParallelrunError (exit 4)."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise broken(path, f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise broken(path, "not a JSON object")
    return value


def read_yaml(path: Path) -> dict[str, Any]:
    """Return a YAML file's mapping; {} if there is no such file. Raises ParallelrunError (exit 4)."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        value = yaml.load(path.read_text(encoding="utf-8"), loader)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise broken(path, f"not YAML: {error}") from error
    if not isinstance(value, dict):
        raise broken(path, "not a mapping")
    return value


def read_rows(path: Path) -> tuple[dict[str, Any], ...]:
    """Return the rows of metrics.jsonl by step; the last line may be torn, because a run may have been killed.

    Raises ParallelrunError (exit 4) naming the line and the key.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except (OSError, ValueError) as error:
        raise broken(path, str(error)) from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                break
            raise broken(path, f"line {number} is not JSON: {error}", str(number)) from error
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise broken(path, f"line {number} has no step", f"{number}: step")
        wrong = next((key for key in _NUMBERS if not isinstance(row.get(key, 0.0), (int, float, type(None)))), None)
        if wrong:
            raise broken(path, f"line {number}: {wrong} is not a number", f"{number}: {wrong}")
        rows.append(row)
    return tuple(sorted(rows, key=lambda row: row["step"]))


def of_rows(rows: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """Return the results that the steps so far give, for a run without a summary."""
    if not rows:
        return {}
    timed = [row for row in rows if row["step"] >= FIRST_TIMED_STEP] or list(rows)
    medians = {
        name: statistics.median(values)
        for name, key in (("step_time_median_s", "step_time_s"), ("tokens_per_s", "tokens_per_s"))
        if (values := [row[key] for row in timed if row.get(key) is not None])
    }
    val = [row["val_loss"] for row in rows if "val_loss" in row]
    last = {"steps": rows[-1]["step"], "first_loss": rows[0].get("loss"), "loss": rows[-1].get("loss")}
    return {**last, **medians, **({"val_loss": val[-1]} if val else {})}


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one with dotted keys; lists stay values."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
