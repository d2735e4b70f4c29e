"""Sweeps (`-m`): Hydra composes every point; here each is resolved, run or skipped, and its row written down.

A sweep directory holds the points' run directories, `results.jsonl` (a row a point, appended when the point ends, the
last row of a point counts) and the same as `results.csv`. A point is known by `config.freeze.identity`, so that
`sweep.resume=<directory>` runs only what has not been done.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from parallelrun.cli import errors
from parallelrun.cli.argv import CommandLine
from parallelrun.cli.gpus import visible_gpus
from parallelrun.config import compose
from parallelrun.config.compose import Composed, Prepared
from parallelrun.config.freeze import identity
from parallelrun.config.overrides import unquoted
from parallelrun.errors import (
    EXIT_CONFIG,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_PREEMPTED,
    EXIT_RUN_FAILED,
    EXIT_TERMINATED,
    ConfigError,
    EnvironmentProblem,
    Problem,
)
from parallelrun.records import append_jsonl, document
from parallelrun.report import comparison
from parallelrun.report import sweep as report

_STOPPING = (EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_PREEMPTED)


class _Stopped(BaseException):
    """A point was interrupted: the sweep ends. No Exception, so that Hydra lets it through."""

    def __init__(self, exit_code: int):
        self.exit_code = exit_code


@dataclass(frozen=True)
class _Sweep:
    """What every point needs; plain data, because Hydra's launchers may send it to other processes."""

    line: CommandLine
    words: tuple[str, ...]
    prepared: Prepared
    directory: Path
    resumed: bool


def run(line: CommandLine, words: Sequence[str], prepared: Prepared) -> int:
    """Run every point of the sweep. 0: all done; 1: a point failed; 2: no point was legal."""
    with tempfile.TemporaryDirectory(prefix="parallelrun-sweep-") as scratch:
        planned = line.verb == "plan"
        directory = Path(scratch) if planned else _directory(line)
        sweep = _Sweep(line, tuple(words), prepared, directory, bool(_given(line, "sweep.resume")))
        hydra_argv = (*prepared.argv, *_hydra_directories(line, directory, scratch))
        stopped = EXIT_OK
        try:
            compose.run_hydra(Prepared(hydra_argv, prepared.recipe_keys, prepared.shown), lambda c: _point(c, sweep))
        except (KeyboardInterrupt, _Stopped) as error:
            stopped = error.exit_code if isinstance(error, _Stopped) else EXIT_INTERRUPTED
        rows = report.read(directory)
        if planned:
            _show_plans(rows, line.json)
        elif rows:
            report.write_csv(directory)
            report.show(directory)
            for path in comparison.write(directory):
                print(f"comparison: {path}", flush=True)
    if stopped:
        print(f"parallelrun: stopped; go on with sweep.resume={directory}", file=sys.stderr)
        return stopped
    states = {row["state"] for row in rows}
    if "failed" in states:
        return EXIT_RUN_FAILED
    return EXIT_OK if states - {"skipped"} else EXIT_CONFIG


def _given(line: CommandLine, key: str) -> str | None:
    values = [unquoted(override.value) for override in line.overrides if override.key == key]
    return os.path.expanduser(values[-1]) if values and values[-1].lower() != "null" else None


def _directory(line: CommandLine) -> Path:
    """The sweep's own directory: a new one, or the one to go on with."""
    resume = _given(line, "sweep.resume")
    if resume is not None:
        if not (Path(resume) / report.RESULTS).is_file():
            what = f"sweep.resume={resume}: no sweep directory (it has no {report.RESULTS})"
            raise EnvironmentProblem(Problem(what, "sweep.resume", command="ls -d runs/sweep-*"))
        return Path(resume).absolute()
    chosen = _given(line, "sweep.directory") or _given(line, "hydra.sweep.dir")
    if chosen is not None:
        if (Path(chosen) / report.RESULTS).exists():
            what = f"{chosen} holds another sweep"
            raise EnvironmentProblem(Problem(what, "sweep.directory", f"sweep.resume={chosen}, or another directory"))
        return Path(chosen).absolute()
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    return (Path(_given(line, "runs") or "runs") / f"sweep-{stamp}-{secrets.token_hex(3)}").absolute()


def _hydra_directories(line: CommandLine, directory: Path, scratch: str) -> list[str]:
    """Hydra writes a multirun.yaml: into a scratch folder, or, when a launcher plug-in keeps files, beside ours."""
    if any(override.key == "hydra.sweep.dir" for override in line.overrides):
        return []
    plugin = any(override.key == "hydra/launcher" for override in line.overrides)
    return [f"hydra.sweep.dir='{directory / 'hydra' if plugin else scratch}'"]


def _point(task_config: Any, sweep: _Sweep) -> None:
    """One point: skipped with its reason, planned, or run; its row appended. Raises only to stop the whole sweep."""
    number = compose.point_number()
    row: dict[str, Any] = {"point": number, "overrides": compose.point_overrides(sweep.prepared)}
    try:
        composed = compose.composed(task_config, sweep.prepared)
        row["config_sha256"] = identity(composed.config)
        row |= _resolve_and_run(composed, row, sweep)
    except ConfigError as error:
        row |= {"state": "skipped", "exit_code": error.exit_code, **_reasons(error)}
        _say(sweep, f"point {number}: skipped: {error.problems[0].what}")
    except Exception as error:
        known = errors.translate(error) or error
        code = errors.report(known, sweep.line.verbose)
        row |= {"state": "failed", "exit_code": code, "reason": str(known) or type(known).__name__}
    if row.get("state") == "done before":
        return
    sweep.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    append_jsonl(sweep.directory / report.RESULTS, row)
    if row.get("exit_code") in _STOPPING:
        raise _Stopped(row["exit_code"])


def _resolve_and_run(composed: Composed, row: dict[str, Any], sweep: _Sweep) -> dict[str, Any]:
    from parallelrun.plan.resolve import resolve

    earlier = {old["config_sha256"]: old for old in report.read(sweep.directory) if "config_sha256" in old}
    before = earlier.get(row["config_sha256"], {}).get("state")
    if sweep.resumed and before == "done":
        _say(sweep, f"point {row['point']}: done before")
        return {"state": "done before"}
    if composed.config.sweep.fail_fast and any(old["state"] == "failed" for old in earlier.values()):
        return {"state": "skipped", "exit_code": EXIT_OK, "reason": "an earlier point failed (sweep.fail_fast)"}
    plan = resolve(composed.config, given=composed.given, gpus=visible_gpus(), sweep=True)
    row["run_sha256"] = identity(composed.config, plan)
    twin = next((old for old in earlier.values() if old.get("run_sha256") == row["run_sha256"]), None)
    if twin and twin["state"] != "failed" and twin["point"] != row["point"]:
        # only a key that nobody reads makes two points one
        reason = "; ".join((f"the same run as point {twin['point']}", *plan.warnings))
        _say(sweep, f"point {row['point']}: skipped: {reason}")
        return {"state": "skipped", "exit_code": EXIT_OK, "reason": reason}
    if sweep.line.verb == "plan":
        from parallelrun.cli.compute import show_plan, write_plot
        from parallelrun.plan.compare import compare
        from parallelrun.report import layouts
        from parallelrun.report import plan as plan_report

        if sweep.line.json:
            found = plan_report.facts(plan, composed.config)
            write_plot(plan, composed.config, found, row["point"])
            return {"state": "planned", "plan": plan_report.document(plan, composed.config, found)}
        _say(sweep, f"\npoint {row['point']}: {' '.join(row['overrides'])}")
        show_plan(plan, composed.config, as_json=False, point=row["point"])
        return {"state": "planned", "layouts": layouts.sweep_row(compare(plan, composed.config))}
    return _run(composed, plan, row, sweep)


def _run(composed: Composed, plan: Any, row: dict[str, Any], sweep: _Sweep) -> dict[str, Any]:
    from parallelrun.launch.start import start

    _say(sweep, f"\npoint {row['point']}: {' '.join(row['overrides'])}")
    degrees = "".join(f"{axis}{size}" for axis, size in plan.degrees.items() if size > 1)
    sweep.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    (sweep.directory / report.RESULTS).touch(mode=0o600)  # a sweep that is killed within its first point can go on, too
    place = _fresh(sweep.directory, f"{row['point']:03d}-{plan.preset}-{degrees or 'one'}")
    if composed.config.checkpoint.last is None:  # nobody goes on from a point, and many points fill a disk
        checkpoint = replace(composed.config.checkpoint, last=False)
        composed = replace(composed, config=replace(composed.config, checkpoint=checkpoint))
    try:
        code = start(composed.config, plan, list(sweep.words), composed.overrides, place)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    state = "done" if code == EXIT_OK else "stopped" if code in _STOPPING else "failed"
    found: dict[str, Any] = {"state": state, "exit_code": code, "directory": place.name}
    if state == "failed":
        found["reason"] = report.read_json(place / "status.json").get("error") or f"exit code {code}"
    if plan.warnings:
        found["notes"] = list(plan.warnings)
    summary = report.summary(place, sweep.line.verb)
    return {**summary, **found}


def _fresh(directory: Path, name: str) -> Path:
    """A directory that no earlier attempt at this point has used."""
    place, attempt = directory / name, 2
    while place.exists():
        place, attempt = directory / f"{name}-attempt{attempt}", attempt + 1
    return place


def _reasons(error: ConfigError) -> dict[str, Any]:
    problems = [{"what": p.what, "where": p.where, "suggestion": p.suggestion, "kind": p.kind} for p in error.problems]
    return {"reason": "; ".join(problem.what for problem in error.problems), "problems": problems}


def _say(sweep: _Sweep, text: str) -> None:
    if not sweep.line.json:
        print(text, flush=True)


def _show_plans(rows: list[dict[str, Any]], as_json: bool) -> None:
    if not as_json:
        from rich.console import Console

        from parallelrun.report.layouts import sweep_table

        skipped = [row for row in rows if row["state"] == "skipped"]
        sweep_table([(row["point"], row["layouts"]) for row in rows if row.get("layouts")], Console())
        print(f"\n{len(rows) - len(skipped)} of {len(rows)} points are legal")
        return
    points = []
    for row in rows:
        plan = row.pop("plan", {})
        row.pop("schema", None)
        points.append({**plan, **row})
    json.dump(document({"points": points}), sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")
