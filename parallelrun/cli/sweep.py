"""Sweeps (`-m`): Hydra composes every point; here each is resolved, run or skipped, and its row written down.

A sweep directory holds the points' run directories, `results.jsonl` (a row a point, appended when the point ends) and
the same as `results.csv`. A point is known by `plan.freeze.identity`, so that `sweep.resume=<directory>` runs only
what has not been done, and a point that repeats an earlier one of the same sweep is listed (`same_as`), not run again.
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
from parallelrun.cli.objective import objective
from parallelrun.config import compose
from parallelrun.config.compose import Composed, Prepared
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
from parallelrun.plan.freeze import identity
from parallelrun.records import append_jsonl, document
from parallelrun.report import comparison, scaling
from parallelrun.report import sweep as report

_BASIC = "basic"  # Hydra's sweeper that takes every point and ignores what points answer
_COUNT_FAILURES = ("optuna", "nevergrad")  # end at the first failed trial unless max_failure_rate says otherwise
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
    invocation: int  # 1, or one more than the last one that wrote into the directory


def run(line: CommandLine, words: Sequence[str], prepared: Prepared, points: list[dict[str, Any]] | None = None) -> int:
    """Run every point of the sweep. 0: all done; 1: a point failed; 2: no point was legal. points: gets their rows."""
    with tempfile.TemporaryDirectory(prefix="parallelrun-sweep-") as scratch:
        planned = line.verb == "plan"
        directory = Path(scratch) if planned else _directory(line)
        invocation = 1 + max((row.get("invocation", 0) for row in report.read(directory)), default=0)
        sweep = _Sweep(line, tuple(words), prepared, directory, invocation)
        hydra_argv = (*prepared.argv, *_hydra_directories(line, directory, scratch), *_pruning(line))
        stopped, failure = EXIT_OK, None
        try:
            compose.run_hydra(replace(prepared, argv=hydra_argv), lambda c: _point(c, sweep))
        except (KeyboardInterrupt, _Stopped) as error:
            stopped = error.exit_code if isinstance(error, _Stopped) else EXIT_INTERRUPTED
        except Exception as error:
            failure = error
        rows = report.read(directory)
        if failure is not None and not any(row.get("invocation") == invocation for row in rows):
            raise failure
        if points is not None:
            points += rows
        if planned:
            _show_plans(rows, line.json)
        elif rows:
            report.write_csv(directory)
            report.show(directory)
            for path in (*comparison.write(directory), *scaling.write(directory)):
                print(f"{path.stem}: {path}", flush=True)
    if stopped:
        print(f"parallelrun: stopped; go on with sweep.resume={directory}", file=sys.stderr)
        return stopped
    states = {row["state"] for row in rows if "same_as" not in row}
    if failure is not None and states & set(
        report.FINISHED
    ):  # else the sweeper complains that no point gave it a number
        raise failure
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


def _sweeper(line: CommandLine) -> str:
    return _given(line, "hydra/sweeper") or _BASIC


def _pruning(line: CommandLine) -> list[str]:
    """Illegal and failed points must not end an optimizing sweeper, unless the user says how many may fail."""
    if _sweeper(line) not in _COUNT_FAILURES or _given(line, "hydra.sweeper.max_failure_rate") is not None:
        return []
    return ["hydra.sweeper.max_failure_rate=1.0"]


def _hydra_directories(line: CommandLine, directory: Path, scratch: str) -> list[str]:
    """Hydra writes a multirun.yaml: into a scratch folder, or, when a plug-in keeps files, beside ours."""
    if any(override.key == "hydra.sweep.dir" for override in line.overrides):
        return []
    plugin = any(override.key in ("hydra/launcher", "hydra/sweeper") for override in line.overrides)
    return [f"hydra.sweep.dir='{directory / 'hydra' if plugin else scratch}'"]


def _point(task_config: Any, sweep: _Sweep) -> float | None:
    """One point: skipped with its reason, planned, or run; its row appended.

    Returns the objective for an optimizing sweeper, which alone gets a Pruned for a point that has none.
    """
    number = compose.point_number()
    overrides = compose.point_overrides(sweep.prepared)
    row: dict[str, Any] = {"point": number, "invocation": sweep.invocation, "overrides": overrides}
    key = None
    try:
        composed = compose.composed(task_config, sweep.prepared)
        key = composed.config.sweep.objective
        row["config_sha256"] = identity(composed.config)
        row |= _resolve_and_run(composed, row, sweep)
    except ConfigError as error:
        row |= {"state": "skipped", "exit_code": error.exit_code, **_reasons(error)}
        _say(sweep, f"point {number}: skipped: {error.problems[0].what}")
    except Exception as error:
        known = errors.translate(error) or error
        code = errors.report(known, sweep.line.verbose)
        row |= {"state": "failed", "exit_code": code, "reason": str(known) or type(known).__name__}
    sweep.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    append_jsonl(sweep.directory / report.RESULTS, row)
    if row.get("exit_code") in _STOPPING:
        raise _Stopped(row["exit_code"])
    return None if _sweeper(sweep.line) == _BASIC else _objective(row, key, sweep)


def _objective(row: dict[str, Any], key: str | None, sweep: _Sweep) -> float:
    """The point's objective; of a repeated point that of the first. A key that no summary has stops the sweep."""
    rows = report.read(sweep.directory)
    row = next((old for old in rows if old["point"] == row.get("same_as") and old["state"] != "skipped"), row)
    try:
        return objective(row, key, sweep.line.verb)
    except ConfigError as error:
        raise _Stopped(errors.report(error, sweep.line.verbose)) from error


def _resolve_and_run(composed: Composed, row: dict[str, Any], sweep: _Sweep) -> dict[str, Any]:
    from parallelrun.plan.resolve import resolve

    rows = report.read(sweep.directory)
    now = [old for old in rows if old.get("invocation") == sweep.invocation]
    found = _known(row, "config_sha256", rows, sweep)
    if found is not None:
        return found
    if composed.config.sweep.fail_fast and any(old["state"] == "failed" for old in now):
        return {"state": "skipped", "exit_code": EXIT_OK, "reason": "an earlier point failed (sweep.fail_fast)"}
    plan = resolve(composed.config, given=composed.given, gpus=visible_gpus(), sweep=True)
    row["run_sha256"] = identity(composed.config, plan)
    row |= {"world": plan.world, **plan.degrees, "servers": plan.servers}
    found = _known(row, "run_sha256", rows, sweep, plan.warnings)
    if found is not None:
        return found
    if sweep.line.verb == "plan":
        return _plan(composed, plan, row, sweep)
    return _run(composed, plan, row, sweep)


def _known(
    row: dict[str, Any], key: str, rows: list[dict[str, Any]], sweep: _Sweep, warnings: Sequence[str] = ()
) -> dict[str, Any] | None:
    """The row of a point that need not run: it repeats a point of this invocation, or was done by an earlier one."""
    alike = [old for old in rows if old.get(key) == row[key]]
    first = next((old for old in alike if old["invocation"] == sweep.invocation), None)
    if first is not None:
        same = first.get("same_as", first["point"])
        reason = "; ".join((f"the same run as point {same}", *warnings))
        _say(sweep, f"point {row['point']}: skipped: {reason}")
        shape = {name: first[name] for name in report.DEGREES if name in first}
        return {**shape, "state": "skipped", "exit_code": EXIT_OK, "same_as": same, "reason": reason}
    done = next((old for old in alike if old["state"] == "done"), None)
    if done is None:
        return None
    _say(sweep, f"point {row['point']}: done before")
    return {**done, **row}


def _plan(composed: Composed, plan: Any, row: dict[str, Any], sweep: _Sweep) -> dict[str, Any]:
    from parallelrun.cli.compute import show_plan, write_plot
    from parallelrun.plan.figures import figures
    from parallelrun.report import layouts
    from parallelrun.report import plan as plan_report

    found = plan_report.facts(plan, composed.config)
    planned = {"state": "planned", **figures(plan, composed.config.cluster, found)}
    if sweep.line.json:
        write_plot(plan, composed.config, found, row["point"])
        return {**planned, "plan": plan_report.document(plan, composed.config, found)}
    _say(sweep, f"\npoint {row['point']}: {' '.join(row['overrides'])}")
    show_plan(plan, composed.config, as_json=False, point=row["point"], found=found)
    return {**planned, "layouts": layouts.sweep_row(found.layouts)}


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
        from parallelrun.report.layouts import sweep_table
        from parallelrun.report.screen import open_console

        console = open_console()
        sweep_table([(row["point"], row["layouts"]) for row in rows if row.get("layouts")], console)
        print()
        report.show_table(rows, console)
        illegal = sum(row["state"] == "skipped" and "same_as" not in row for row in rows)
        print(f"{len(rows) - illegal} of {len(rows)} points are legal")
        return
    points = []
    for row in rows:
        plan = row.pop("plan", {})
        kept = {key: value for key, value in row.items() if key not in ("schema", "invocation")}
        points.append({**kept, **plan})
    json.dump(document({"points": points}), sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")
