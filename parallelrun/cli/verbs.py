"""run, plan, explain, verify, bench: compose once, resolve, and hand over."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallelrun.base.errors import EXIT_OK, ConfigError, Problem
from parallelrun.cli import argv as command_lines
from parallelrun.cli.argv import CommandLine
from parallelrun.cli.json_output import print_json, screen_on_stderr
from parallelrun.cli.tools import completion
from parallelrun.config import presets
from parallelrun.launch.host.environment import Attached, detect
from parallelrun.launch.over_ssh import hosts

if TYPE_CHECKING:
    from parallelrun.config.compose import Composed
    from parallelrun.config.schema.run_schema import Config
    from parallelrun.planner.contract.plan import Plan

_RESULTS = {"run": "summary", "verify": "verify", "bench": "bench"}  # verb -> the file with its result


def run(words: list[str]) -> int:
    """Carry out the command line of a verb (the first word may name it). Raises ParallelrunError and Hydra's errors."""
    command_lines.refuse_pickles(words)
    if completion.is_asked(words):
        return completion.respond(words)
    attached = detect(os.environ)
    if attached is not None and attached.rank != 0:  # it composes nothing
        if (words[:1] and words[0] in _SHOWN) or not command_lines.starts_ranks(words):
            return EXIT_OK
        from parallelrun.launch.entry.attach import follow

        return follow(words)
    try:
        return _lead(words, attached)
    except Exception as error:
        if attached is not None:  # the other ranks wait for a plan: let them exit with the code of this error
            from parallelrun.cli import errors
            from parallelrun.launch.entry import attach

            translated = errors.translate(error)
            attach.abandon(attached, translated.exit_code if translated else 1)
        raise


def _lead(words: list[str], attached: Attached | None) -> int:
    """Rank 0, or the only process: compose, resolve, hand over."""
    line = command_lines.read(words)
    if not line.multirun and presets.mentions(words, "MULTIRUN"):
        from parallelrun.cli.sweeps import sweep_settings

        line = sweep_settings.with_mode_of_files(line)
    if line.multirun:
        return _sweep(line, words, attached)
    composition = compose_line(line, attached)
    resolved = _resolved(composition[0], attached, line) if composition is not None else None
    if composition is None or resolved is None:
        return EXIT_OK
    run_root, (composed, plan) = composition[1], resolved
    if line.verb in _SHOWN:
        _SHOWN[line.verb](plan, composed.config, line.json)
        return EXIT_OK
    if hosts.has_others(line.host_ranks) and attached is None:
        from parallelrun.launch.over_ssh import ssh

        return ssh.run(line.host_ranks, words, line.ssh_config)
    from parallelrun.launch.entry.start import start

    if not line.json:
        return start(composed.config, plan, words, composed.overrides, run_root)
    created: list[Path] = []
    with screen_on_stderr():
        code = start(composed.config, plan, words, composed.overrides, run_root, created=created.append)
    print_json(_run_document(line.verb, code, created[0] if created else None))
    return code


def _sweep(line: CommandLine, words: list[str], attached: Attached | None) -> int:
    if attached is not None:
        cause = f"a sweep (-m) cannot run under {attached.source}, which has already started the ranks"
        raise ConfigError(Problem(cause, "command line", command="parallelrun -m ..., without a launcher"))
    if line.verb == "explain":
        cause = "explain shows one plan at a time, not a sweep (-m)"
        raise ConfigError(Problem(cause, "command line", command="parallelrun plan ..."))
    from parallelrun.cli.sweeps import sweep
    from parallelrun.config import compose

    prepared = compose.prepare(line.overrides, line.flags, line.verb, line.trust)
    if not line.json:
        return sweep.run(line, words, prepared)[0]
    with screen_on_stderr():
        code, points = sweep.run(line, words, prepared)
    print_json({"points": points} if line.verb == "plan" else {"verb": line.verb, "exit_code": code, "points": points})
    return code


def compose_line(line: CommandLine, attached: Attached | None) -> tuple[Composed, Path | None] | None:
    """The configuration of a command line, and the run directory that was asked for.

    None if Hydra has answered one of its own flags.
    """
    try:
        return _composed(line, attached)
    except Exception as error:
        from parallelrun.cli import remaining

        words = [*line.flags, *(override.text for override in line.overrides)]
        complete = remaining.with_all(error, line.overrides, words)
        if complete is error:
            raise
        raise complete from error


def _composed(line: CommandLine, attached: Attached | None) -> tuple[Composed, Path | None] | None:
    from parallelrun.config import compose

    prepared = compose.prepare(line.overrides, line.flags, line.verb, line.trust)
    if not line.flags and not any(override.key.startswith("hydra.callbacks") for override in line.overrides):
        composed, run_root = compose.compose_once(prepared)
    else:
        outcome = _through_hydra(prepared)
        if outcome is None:
            return None
        composed, run_root = outcome
    return with_surroundings(composed, attached), run_root


def with_surroundings(composed: Composed, attached: Attached | None) -> Composed:
    """`composed` with what the environment and the run to resume say."""
    if os.environ.get("TF_CONFIG"):
        from parallelrun.launch.host import tf_config

        composed = replace(composed, config=tf_config.apply(composed.config, os.environ))
    if composed.config.resume is not None:
        from parallelrun.cli.resume import with_saved_configuration

        composed = with_saved_configuration(composed, attached.world if attached else None)
    return composed


def _resolved(composed: Composed, attached: Attached | None, line: CommandLine) -> tuple[Composed, Plan] | None:
    """The plan of a configuration, which a search may have chosen; None if that search is all that was asked for."""
    from parallelrun.cli import planned
    from parallelrun.planner.search import open_keys

    world = attached.world if attached is not None else None
    if reattached := planned.restarted(composed, world):
        return reattached
    if line.verb == open_keys.PLAN and open_keys.is_open(composed.config, composed.given):
        from parallelrun.cli import search

        search.show(composed, world, line.json)
        return None
    return planned.planned(composed, line.verb, world)


def _through_hydra(prepared: Any) -> tuple[Composed, Path | None] | None:
    """Compose inside Hydra's task. The task only records, so that a run is never inside Hydra's stack frames."""
    from parallelrun.config import compose, hydra_task

    compositions: list[tuple[Composed, Path | None]] = []
    errors: list[Exception] = []

    def task(task_config: Any) -> None:
        try:
            if hydra_task.sweeping():
                raise ConfigError(Problem("ask for a sweep with -m", "hydra.mode", command="parallelrun -m ..."))
            compositions.append((compose.composed(task_config, prepared), hydra_task.run_directory()))
        except Exception as error:  # if the task raised it, Hydra would print a line of its own
            errors.append(error)

    compose.run_hydra(prepared, task)
    for error in errors:
        raise error
    return compositions[0] if compositions else None


def show_plan(plan: Plan, config: Config, as_json: bool, point: int | None = None, plan_facts: Any = None) -> None:
    """Print a plan, for people or as one JSON document; `plot=NAME` writes its picture (point: of a sweep).

    found: the plan's facts, if already computed.
    """
    from parallelrun.planner.facts.document import document as plan_document
    from parallelrun.planner.facts.plan_facts import facts
    from parallelrun.report.plans import plan as report

    plan_facts = plan_facts or facts(plan, config)
    written = write_plot(plan, config, point)
    ranked = None
    if point is None and plan_facts.time is not None:
        from parallelrun.cli import search

        ranked = search.ranked(plan, config, plan_facts)
    if as_json:
        print_json({**plan_document(plan, config, plan_facts), "search": ranked.document() if ranked else None})
        return
    from parallelrun.report.screen import open_console

    console = open_console()
    report.show(plan, config, console, plan_facts, ranked.rows() if ranked else ())
    if config.explain:
        from parallelrun.cli import search

        search.explain_plan(plan, config, plan_facts, ranked, console)
    for path in written:
        print(f"written: {path}")


def show_explanation(plan: Plan, config: Config, as_json: bool) -> None:
    """Print the pipeline's schedule and every message of the plan's strategies; `plot=NAME` draws the messages."""
    from parallelrun.planner.contract.messages import explain
    from parallelrun.planner.predict import simulate
    from parallelrun.report.plans import explain as report
    from parallelrun.report.plans import plan_details
    from parallelrun.report.screen import open_console, show_section

    explanation = explain(plan)
    written = report.write(explanation, config.plot) if config.plot is not None else []
    if as_json:
        print_json(report.document(explanation))
        return
    if plan.mesh.size("pp") > 1:
        console = open_console()
        drawn = plan_details.schedule(plan, simulate.of_plan(plan), plan_details.width(console))
        show_section("schedule", drawn, console)
    print(report.text(explanation))
    for path in written:
        print(f"written: {path}")


_SHOWN = {"plan": show_plan, "explain": show_explanation}  # the verbs that start nothing


def write_plot(plan: Plan, config: Config, point: int | None = None) -> list[Path]:
    """Write the files that `plot=NAME` asks for, separate for each point of a sweep.

    Raises ConfigError, EnvironmentProblem.
    """
    if config.plot is None:
        return []
    from parallelrun.base.packages import require
    from parallelrun.planner.facts import alternatives
    from parallelrun.report.plans import alternatives as report

    require("matplotlib", f"plot={config.plot}", "plot", extra="plots")
    compared = alternatives.data_axis(plan, config)
    if compared is None:
        cause = f"plot={config.plot} draws the cost of combining gradients, and one rank has none to combine"
        raise ConfigError(Problem(cause, "plot", "leave plot out or strategy=ddp"))
    return report.write(compared, report.title(plan, config), config.plot, point)


def _run_document(verb: str, exit_code: int, directory: Path | None) -> dict[str, Any]:
    """The JSON document of a run: exit code, directory, `status.json` and the verb's result (null if missing)."""
    from parallelrun.report.sweeps.sweep_rows import read_json

    names = ("status", _RESULTS[verb])
    documents = {name: read_json(directory / f"{name}.json") or None if directory else None for name in names}
    return {"verb": verb, "exit_code": exit_code, "directory": str(directory) if directory else None, **documents}
