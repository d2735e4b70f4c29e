"""run, plan, verify, bench: compose once, resolve, and hand over. No torch here."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from parallelrun.cli import argv as command_lines
from parallelrun.cli import completion, hosts, run_document
from parallelrun.cli.argv import CommandLine
from parallelrun.cli.gpus import visible_gpus
from parallelrun.errors import EXIT_OK, ConfigError, ParallelrunError, Problem
from parallelrun.launch.environment import Attached, detect

_INDENTED = 2**16  # characters; Python indents JSON at a tenth of the speed, and nobody reads the ranks of a cluster


@dataclass
class _Caught:
    """What Hydra's task leaves behind: it only catches, so that a run never lies inside Hydra's frames."""

    composed: Any = None
    run_root: Path | None = None
    error: Exception | None = None


@dataclass(frozen=True)
class _Made:
    """The composed configuration (`config.compose.Composed`), its Plan, and the run directory that was asked for."""

    composed: Any
    plan: Any
    run_root: Path | None


def run(words: list[str]) -> int:
    """One command line of a verb (the first word may name it). Raises ParallelrunError and what Hydra raises."""
    command_lines.refuse_pickles(words)
    if completion.is_asked(words):
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
    """Rank 0, or the only process: compose, resolve, hand over."""
    line = command_lines.read(words)
    if line.multirun and attached is not None:
        what = f"a sweep (-m) cannot run inside {attached.source}: its ranks are there already"
        raise ConfigError(Problem(what, "command line", command="parallelrun -m ..., without a launcher"))
    if line.multirun and line.verb == "explain":
        what = "explain shows one plan at a time"
        raise ConfigError(Problem(what, "command line", command="parallelrun plan ..."))
    if line.multirun:
        from parallelrun.cli import sweep
        from parallelrun.config import compose

        prepared = compose.prepare(line.overrides, line.flags, line.verb, line.trust)
        if not line.json or line.verb == "plan":
            return sweep.run(line, words, prepared)
        points: list[dict[str, Any]] = []
        with run_document.screen_on_stderr():
            code = sweep.run(line, words, prepared, points)
        print_json({"verb": line.verb, "exit_code": code, "points": points})
        return code
    with _collector_paused():
        made = _composed_and_resolved(line, attached)
        if made is not None and line.verb in _SHOWN:
            _SHOWN[line.verb](made.plan, made.composed.config, line.json)
    if made is None or line.verb in _SHOWN:
        return EXIT_OK
    if hosts.has_others(line.placed) and attached is None:
        from parallelrun.cli import remote

        return remote.run(line.placed, words, line.ssh)
    return _start(made, line, words)


def _start(made: _Made, line: CommandLine, words: list[str]) -> int:
    """Run the plan; with --json, print what came out as one document."""
    from parallelrun.launch.start import start

    config, overrides = made.composed.config, made.composed.overrides
    if not line.json:
        return start(config, made.plan, words, overrides, made.run_root)
    places: list[Path] = []
    with run_document.screen_on_stderr():
        code = start(config, made.plan, words, overrides, made.run_root, created=places.append)
    print_json(run_document.document(line.verb, code, places[0] if places else None))
    return code


@contextmanager
def _collector_paused() -> Iterator[None]:
    """No search for dead cycles: little of what Hydra and `resolve` make dies, and searching is a tenth of a plan."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _composed_and_resolved(line: CommandLine, attached: Attached | None) -> _Made | None:
    """What one command line asks for; None where Hydra has answered one of its own flags."""
    from parallelrun.config import compose

    prepared = compose.prepare(line.overrides, line.flags, line.verb, line.trust)
    if not line.flags and not any(override.key.startswith("hydra.callbacks") for override in line.overrides):
        composed, run_root = compose.compose_plainly(prepared)
    else:
        caught = _through_hydra(prepared)
        if caught.composed is None:
            return None
        composed, run_root = caught.composed, caught.run_root
    if os.environ.get("TF_CONFIG"):
        from parallelrun.launch import tf_config

        composed = replace(composed, config=tf_config.apply(composed.config, os.environ))
    from parallelrun.plan.resolve import resolve

    world = attached.world if attached is not None else None
    if composed.config.resume is not None:
        from parallelrun.cli.resume import with_saved_configuration

        composed = with_saved_configuration(composed, world)
    return _Made(composed, resolve(composed.config, given=composed.given, world=world, gpus=visible_gpus()), run_root)


def _through_hydra(prepared: Any) -> _Caught:
    from parallelrun.config import compose

    caught = _Caught()

    def task(task_config: Any) -> None:
        try:
            if compose.sweeping():
                raise ConfigError(Problem("a sweep is asked for with -m", "hydra.mode", command="parallelrun -m ..."))
            caught.composed = compose.composed(task_config, prepared)
        except Exception as error:  # raised inside the task, Hydra would print a line of its own
            caught.error = error
        caught.run_root = compose.run_directory()

    compose.run_hydra(prepared, task)
    if caught.error is not None:
        raise caught.error
    return caught


def show_plan(plan: Any, config: Any, as_json: bool, point: int | None = None, found: Any = None) -> None:
    """Print a plan, for people or as one JSON document; `plot=NAME` writes its picture (point: of a sweep).

    found: the plan's facts, if already computed.
    """
    from parallelrun.report import plan as report

    found = found or report.facts(plan, config)
    written = write_plot(plan, config, found, point)
    if as_json:
        print_json(report.document(plan, config, found))
        return
    from parallelrun.report.screen import open_console

    # emoji: rich would look for :names: and load their table
    report.show(plan, config, open_console(emoji=False), found)
    for path in written:
        print(f"written: {path}")


def show_explanation(plan: Any, config: Any, as_json: bool) -> None:
    """Print every message of the plan's strategies; `plot=NAME` draws them."""
    from parallelrun.plan.explain import explain
    from parallelrun.report import explain as report

    found = explain(plan)
    written = report.write(found, config.plot) if config.plot is not None else []
    if as_json:
        print_json(report.document(found))
        return
    print(report.text(found))
    for path in written:
        print(f"written: {path}")


_SHOWN = {"plan": show_plan, "explain": show_explanation}  # the verbs that start nothing


def write_plot(plan: Any, config: Any, found: Any, point: int | None = None) -> list[Path]:
    """The files that `plot=NAME` asks for, each point of a sweep its own. Raises ConfigError, EnvironmentProblem."""
    if config.plot is None:
        return []
    if found.data_axis is None:
        what = f"plot={config.plot} draws what combining gradients costs, and one rank has none to combine"
        raise ConfigError(Problem(what, "plot", "leave plot out or strategy=ddp"))
    from parallelrun.report import data_axis

    return data_axis.write(found.data_axis, data_axis.title(plan, config), config.plot, point)


def print_json(fields: dict[str, Any]) -> None:
    """One JSON document on stdout, with `schema` and without NaN."""
    from parallelrun.records import document

    plain = document(fields)
    text = json.dumps(plain, allow_nan=False)
    if len(text) < _INDENTED:
        text = json.dumps(plain, allow_nan=False, indent=2)
    sys.stdout.write(text + "\n")


def _follow(words: list[str]) -> int:
    """A rank other than 0 of somebody else's launcher: it composes nothing."""
    if (words[:1] and words[0] in _SHOWN) or not command_lines.starts_ranks(words):
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
    asked = any(word.startswith("query=") for word in words)
    if asked and "COMP_LINE" not in os.environ:  # only a shell asks so
        raise ConfigError(Problem(f"{' '.join(words)}: completion is asked for by a shell", "COMP_LINE",
                                  command="parallelrun -sc install=bash"))  # fmt: skip
    for candidate in completion.answer(os.environ) if asked else []:
        print(candidate)
    if not asked:
        from parallelrun.config import compose

        compose.run_hydra(compose.prepare_completion(words), lambda config: None)
    return EXIT_OK
