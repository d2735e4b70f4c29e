"""Sweeps (`-m`): Hydra composes every point; here each is resolved, run or skipped, and recorded.

A sweep directory holds the points' run directories, `results.jsonl` (one row per point, appended when it ends) and
the same as `results.csv`. `plan.freeze.identity` identifies a point: `sweep.resume=<directory>` runs only the points
that are not done, and a point that repeats an earlier one of the same sweep is listed (`same_as`), not run again.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from parallelrun.base import errors
from parallelrun.base.errors import ConfigError, Problem
from parallelrun.cli.argv import CommandLine
from parallelrun.cli.errors import report, translate
from parallelrun.cli.sweeps import points, sweep_settings
from parallelrun.cli.sweeps.objective import objective
from parallelrun.config import compose, hydra_task
from parallelrun.config.compose import Composed, Prepared
from parallelrun.launch.entry import attach
from parallelrun.launch.host.environment import Attached, detect
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.resolve.freeze import identity
from parallelrun.report import chart
from parallelrun.report.sweeps import sweep_picture as comparison
from parallelrun.report.sweeps import sweep_rows, sweep_table

_STOPPING = (errors.EXIT_INTERRUPTED, errors.EXIT_TERMINATED, errors.EXIT_PREEMPTED)


class _Stopped(BaseException):
    """A point was interrupted, so the sweep ends. Not an Exception, so that Hydra does not catch it."""

    def __init__(self, exit_code: int):
        self.exit_code = exit_code


def run(line: CommandLine, words: Sequence[str], prepared: Prepared) -> tuple[int, list[dict[str, Any]]]:
    """Run every point; (0 if all are done, 1 if one failed, 2 if none was legal; the points' rows)."""
    with tempfile.TemporaryDirectory(prefix="parallelrun-sweep-") as scratch:
        planned = line.verb == "plan"
        settings = sweep_settings.of(line, prepared)
        directory = Path(scratch) if planned else sweep_settings.directory(line, settings)
        invocation = 1 + max((row.get("invocation", 0) for row in sweep_rows.read(directory)), default=0)
        sweep = _Sweep(line, tuple(words), prepared, directory, invocation, os.getpid(), points.threads_given())
        hydra_argv = (*prepared.argv, *sweep_settings.overrides(line, settings, directory, scratch))
        stopped, failure = errors.EXIT_OK, None
        try:
            compose.run_hydra(replace(prepared, argv=hydra_argv), sweep.point)
        except (KeyboardInterrupt, _Stopped) as error:
            stopped = error.exit_code if isinstance(error, _Stopped) else errors.EXIT_INTERRUPTED
        except Exception as error:
            failure = error
        lost = points.close(directory, invocation, stopped)
        rows = sweep_rows.read(directory)
        if failure is not None and not any(row.get("invocation") == invocation for row in rows):
            raise failure
        if not (rows or stopped):
            raise ConfigError(
                Problem("the sweep has no points: one of its keys has no values", "command line", "tp=1,2")
            )
        if planned:
            rows = _show_plans(rows, line.json)
        elif rows:
            sweep_table.write_csv(directory)
            sweep_table.show(directory)
            for path in comparison.write(directory):
                print(f"{path.stem}: {path}", flush=True)
            if not chart.available():
                print("note: pictures need matplotlib: pip install 'parallelrun[plots]'", flush=True)
    if lost and not stopped:
        cause = f"{failure or 'a process of the launcher has ended'}".partition("\n")[0]
        print(f"parallelrun: {cause}: continue with {shlex.quote(f'sweep.resume={directory}')}", file=sys.stderr)
        return errors.EXIT_RUN_FAILED, rows
    if stopped:
        print(f"parallelrun: stopped; continue with {shlex.quote(f'sweep.resume={directory}')}", file=sys.stderr)
        return stopped, rows
    states = {row["state"] for row in rows if "same_as" not in row}
    if failure is not None and states & set(
        sweep_rows.FINISHED
    ):  # otherwise the sweeper only got no number from any point
        raise failure
    if "failed" in states:
        return errors.EXIT_RUN_FAILED, rows
    return errors.EXIT_OK if states - {"skipped"} else errors.EXIT_CONFIG, rows


@dataclass(frozen=True)
class _Sweep:
    """The settings that all points share; plain data, because Hydra's launchers may send it to other processes."""

    line: CommandLine
    words: tuple[str, ...]
    prepared: Prepared
    directory: Path
    invocation: int  # number of the command that runs in this directory, from 1
    process: int  # the sweep's own; launchers may run points in others
    threads_given: frozenset[str]

    def point(self, task_config: Any) -> float | None:
        """Skip, plan or run one point, and append its row.

        Returns the objective, or raises Pruned if there is none, if the sweeper optimizes; otherwise returns None.
        """
        attached = detect(os.environ) if os.getpid() != self.process else None
        if attached is not None and attached.rank:  # of a point whose ranks a scheduler starts
            attach.follow(self.words)
            return None
        if os.getpid() != self.process:
            parallel = 1 if points.has_own_host() else hydra_task.num_parallel_points(self.prepared.num_points)
            points.share_host(self.directory, parallel, self.threads_given)
        with ExitStack() as locks:
            row, key = self._ended(task_config, attached, locks)
            points.record(self.directory, row)
        if attached is not None and not (self.directory / row.get("directory", "") / "status.json").exists():
            attach.abandon(attached, row["exit_code"])  # there is no run that the other ranks could join
        if row.get("exit_code") in _STOPPING:
            raise _Stopped(row["exit_code"])
        return self._objective(row, key) if hydra_task.searches() else None

    def _ended(
        self, task_config: Any, attached: Attached | None, locks: ExitStack
    ) -> tuple[dict[str, Any], str | None]:
        """(the point's row, its `sweep.objective`). locks: prevent others from running it until it is recorded."""
        number = hydra_task.point_number()
        row: dict[str, Any] = {"point": number, "invocation": self.invocation}
        row["overrides"] = hydra_task.point_overrides(self.prepared.shown)
        key = None
        try:
            composed = compose.composed(task_config, self.prepared)
            key = composed.config.sweep.objective
            row["config_sha256"] = identity(composed.config)
            row |= self._resolve_and_run(composed, row, attached, locks)
        except Exception as error:
            translated = translate(error) or error
            if isinstance(translated, ConfigError):
                return row | self._skipped(number, translated), key
            code = report(translated, self.line.verbose)
            row |= {"state": "failed", "exit_code": code, "reason": str(translated) or type(translated).__name__}
        return row, key

    def _skipped(self, number: int, error: ConfigError) -> dict[str, Any]:
        names = ("what", "where", "suggestion", "kind")
        problems = [{name: getattr(problem, name) for name in names} for problem in error.problems]
        if self.line.verb != "plan":  # whose table comes at once, with the reasons below it
            self._say(f"point {number}: skipped: {error.problems[0].what}")
        return {"state": "skipped", "exit_code": error.exit_code, "reason": str(error), "problems": problems}

    def _objective(self, row: dict[str, Any], key: str | None) -> float:
        """The objective of the point, or of the point that it repeats. An unknown sweep.objective stops the sweep."""
        rows = sweep_rows.read(self.directory)
        row = next((old for old in rows if old["point"] == row.get("same_as") and old["state"] != "skipped"), row)
        try:
            return objective(row, key, self.line.verb)
        except ConfigError as error:
            raise _Stopped(report(error, self.line.verbose)) from error

    def _resolve_and_run(
        self, composed: Composed, row: dict[str, Any], attached: Attached | None, locks: ExitStack
    ) -> dict[str, Any]:
        from parallelrun.cli.planned import planned

        world = attached.world if attached else None
        rows = sweep_rows.read(self.directory)
        now = [old for old in rows if old.get("invocation") == self.invocation]
        if (earlier := self._known(row, "config_sha256", rows)) is not None:
            return earlier
        if composed.config.sweep.fail_fast and any(old["state"] == "failed" for old in now):
            reason = "an earlier point failed, and sweep.fail_fast is set"
            return {"state": "skipped", "exit_code": errors.EXIT_OK, "reason": reason}
        composed, plan = planned(composed, self.line.verb, world, quiet=True, sweep=True)
        row["run_sha256"] = identity(composed.config, plan)
        row |= {"world": plan.world, **plan.degrees, "servers": plan.servers}
        if os.getpid() != self.process:
            if not points.note(self.directory, row):
                raise _Stopped(errors.EXIT_INTERRUPTED)
            locks.enter_context(points.exclusive(self.directory, row["run_sha256"]))
            rows = sweep_rows.read(self.directory)
        if (earlier := self._known(row, "run_sha256", rows, plan.warnings)) is not None:
            return earlier
        return self._plan(composed, plan, row) if self.line.verb == "plan" else self._run(composed, plan, row)

    def _known(
        self, row: dict[str, Any], key: str, rows: list[dict[str, Any]], warnings: Sequence[str] = ()
    ) -> dict[str, Any] | None:
        """The row of a point that need not run: it repeats a point of this command, or an earlier command ran it."""
        alike = [old for old in rows if old.get(key) == row[key]]
        first = next((old for old in alike if old["invocation"] == self.invocation), None)
        if first is not None:
            same = first.get("same_as", first["point"])
            reason = "; ".join((f"the same run as point {same}", *warnings))
            self._say(f"point {row['point']}: skipped: {reason}")
            shape = {name: first[name] for name in sweep_rows.DEGREES if name in first}
            return {**shape, "state": "skipped", "exit_code": errors.EXIT_OK, "same_as": same, "reason": reason}
        done = next((old for old in alike if old["state"] == "done"), None)
        if done is None:
            return None
        self._say(f"point {row['point']}: already done")
        return {**done, **row}

    def _plan(self, composed: Composed, plan: Plan, row: dict[str, Any]) -> dict[str, Any]:
        from parallelrun.cli.verbs import show_plan, write_plot
        from parallelrun.planner.facts.document import document
        from parallelrun.planner.facts.plan_facts import facts, figures

        plan_facts = facts(plan, composed.config)
        planned = {"state": sweep_rows.PLANNED, **figures(plan, composed.config.cluster, plan_facts)}
        if self.line.json:
            write_plot(plan, composed.config, row["point"])
            return {**planned, "plan": document(plan, composed.config, plan_facts)}
        if composed.config.detail is not None:  # every plan in full
            self._say(f"\npoint {row['point']}: {' '.join(row['overrides'])}")
            show_plan(plan, composed.config, as_json=False, point=row["point"], plan_facts=plan_facts)
        else:
            for path in write_plot(plan, composed.config, row["point"]):
                self._say(f"written: {path}")
        return {**planned, "notes": list(plan.warnings)}

    def _run(self, composed: Composed, plan: Plan, row: dict[str, Any]) -> dict[str, Any]:
        from parallelrun.launch.entry.start import start

        self._say(f"\npoint {row['point']}: {' '.join(row['overrides'])}")
        degrees = "".join(f"{axis}{size}" for axis, size in plan.degrees.items() if size > 1)
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        (self.directory / sweep_rows.RESULTS).touch(mode=0o600)  # a sweep killed in its first point can be resumed
        named = hydra_task.subdirectory()
        name = named or f"{row['point']:03d}-{plan.preset}-{degrees or 'one'}"
        directory = _fresh(self.directory, name, may_be_empty=named is not None)
        config = composed.config
        if config.checkpoint.last is None:  # points are not resumed, and their checkpoints fill the disk
            config = replace(config, checkpoint=replace(config.checkpoint, last=False))
        group = config.tracker.group or self.directory.name
        config = replace(config, tracker=replace(config.tracker, group=group))
        try:
            code = start(config, plan, list(self.words), composed.overrides, directory)
        except KeyboardInterrupt:
            code = errors.EXIT_INTERRUPTED
        state = "done" if code == errors.EXIT_OK else "stopped" if code in _STOPPING else "failed"
        outcome: dict[str, Any] = {
            "state": state,
            "exit_code": code,
            "directory": str(directory.relative_to(self.directory)),
        }
        if state == "failed":
            outcome["reason"] = sweep_rows.read_json(directory / "status.json").get("error") or f"exit code {code}"
        if plan.warnings:
            outcome["notes"] = list(plan.warnings)
        return {**sweep_rows.summary(directory, self.line.verb), **outcome}

    def _say(self, text: str) -> None:
        if not self.line.json:
            print(text, flush=True)


def _fresh(directory: Path, name: str, may_be_empty: bool) -> Path:
    """A directory that no earlier attempt at this point has used. Raises ConfigError for one outside the sweep's.

    may_be_empty: Hydra makes the directory that the user has named.
    """
    path, attempt = directory / name, 2
    if not Path(os.path.normpath(path)).is_relative_to(directory):
        raise ConfigError(Problem(f"hydra.sweep.subdir={name} is outside the sweep's directory", "hydra.sweep.subdir"))
    while any(path.iterdir()) if may_be_empty and path.is_dir() else path.exists():
        path, attempt = directory / f"{name}-attempt{attempt}", attempt + 1
    return path


def _show_plans(rows: list[dict[str, Any]], as_json: bool) -> list[dict[str, Any]]:
    """Print the tables of a sweep of plans, unless the caller prints their documents. Returns the rows for it."""
    if as_json:
        hidden = ("schema", "invocation", "plan")
        return [{**{k: v for k, v in row.items() if k not in hidden}, **row.get("plan", {})} for row in rows]
    sweep_table.show_plans(rows)
    return rows
