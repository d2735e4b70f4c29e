"""run, plan, verify, bench: compose once, resolve, and hand over. No torch here."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallelrun.cli import argv as command_lines
from parallelrun.cli import completion
from parallelrun.cli.argv import CommandLine
from parallelrun.cli.gpus import visible_gpus
from parallelrun.errors import EXIT_OK, ConfigError, ParallelrunError, Problem
from parallelrun.launch.environment import Attached, detect


@dataclass
class _Caught:
    """What Hydra's task left for us: the task only catches, so that a run never lies inside Hydra's frames."""

    composed: Any = None
    run_root: Path | None = None
    error: Exception | None = None


def run(words: list[str]) -> int:
    """One command line of a verb (the first word may name it). Raises ParallelrunError and what Hydra raises."""
    if completion.is_query(words):
        return _complete(words)
    attached = detect(os.environ)
    if attached is not None and attached.rank != 0:
        return _follow(words)
    if attached is None:
        return _lead(words, None)
    try:
        return _lead(words, attached)
    except Exception as error:
        _tell_followers(attached, error)
        raise


def _lead(words: list[str], attached: Attached | None) -> int:
    line = command_lines.read(words)
    if line.multirun and attached is not None:
        what = f"a sweep (-m) cannot run inside {attached.source}: its ranks are there already"
        raise ConfigError(Problem(what, "command line", command="parallelrun -m ..., without a launcher"))
    from parallelrun.config import compose

    prepared = compose.prepare(line.overrides, line.flags, line.verb, line.trust)
    if line.multirun:
        from parallelrun.cli import sweep

        return sweep.run(line, words, prepared)
    caught = _Caught()

    def task(task_config: Any) -> None:
        try:
            if compose.sweeping():
                raise ConfigError(Problem("a sweep is asked for with -m", "hydra.mode", command="parallelrun -m ..."))
            caught.composed = compose.composed(task_config, prepared)
        except Exception as error:  # raised inside the task, Hydra would print a line of its own
            caught.error = error
        directory = compose.run_directory()
        caught.run_root = Path(directory) if directory is not None else None

    compose.run_hydra(prepared, task)
    if caught.error is not None:
        raise caught.error
    if caught.composed is None:
        return EXIT_OK  # Hydra has answered one of its own flags
    return _dispatch(line, words, caught, attached)


def _dispatch(line: CommandLine, words: list[str], caught: _Caught, attached: Attached | None) -> int:
    from parallelrun.plan.resolve import resolve

    composed = caught.composed
    world = attached.world if attached is not None else None
    plan = resolve(composed.config, given=composed.given, world=world, gpus=visible_gpus())
    if line.verb == "plan":
        show_plan(plan, composed.config, line.json)
        return EXIT_OK
    from parallelrun.launch.start import start

    return start(composed.config, plan, words, composed.overrides, caught.run_root)


def show_plan(plan: Any, config: Any, as_json: bool) -> None:
    """Print a plan, for people or as one JSON document."""
    from parallelrun.report import plan as report

    if as_json:
        print_json(report.document(plan, config))
        return
    from rich.console import Console

    report.show(plan, config, Console())


def print_json(fields: dict[str, Any]) -> None:
    """One JSON document on stdout, with `schema` and without NaN."""
    from parallelrun.records import document

    json.dump(document(fields), sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")


def _follow(words: list[str]) -> int:
    """A rank other than 0 of somebody else's launcher: it composes nothing."""
    if "plan" in words[:1] or not command_lines.starts_ranks(words):
        return EXIT_OK
    from parallelrun.launch.attach import follow

    return follow(words)


def _tell_followers(attached: Attached, error: Exception) -> None:
    """Rank 0 has failed before a plan was made: the others exit with its code."""
    from parallelrun.cli import errors
    from parallelrun.launch import attach

    known = errors.translate(error)
    code = known.exit_code if isinstance(known, ParallelrunError) else 1
    attach.abandon(attached, code)


def _complete(words: list[str]) -> int:
    """Answer the shell's TAB: our words, and Hydra's keys and options."""
    candidates, ask_hydra = completion.answer(os.environ)
    for candidate in candidates:
        print(candidate)
    if ask_hydra:
        from parallelrun.config import compose

        flags = [word for word in words if "=" not in word or word.startswith(("query=", "-"))]
        compose.run_hydra(compose.prepare_completion(flags), lambda config: None)
    return EXIT_OK
