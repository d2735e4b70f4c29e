"""`parallelrun reshape RUN KEY=VALUE ...`: a live run goes on under another plan of as many ranks."""

from __future__ import annotations

import secrets
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from parallelrun.base.errors import EXIT_OK, ConfigError, EnvironmentProblem, Problem
from parallelrun.base.wording import counted
from parallelrun.checkpoint.resume import OF_A_TRAINING, trains_alike
from parallelrun.cli import help
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.contract.plan import Plan
from parallelrun.report.figures import bytes_text, degrees_text, seconds_text
from parallelrun.report.records import attempts, find, reshapes
from parallelrun.report.sweeps.sweep_rows import read_json

USAGE = "parallelrun reshape runs/<run> dp=2 tp=2"
POLL_S = 0.1


def main(words: list[str]) -> int:
    """Ask a live run to change its plan, and wait until it has. Raises ConfigError (exit 2) with all problems."""
    text = f"usage: {USAGE}\n\nChange the plan of a live run after its next step. The new plan needs as many ranks."
    if (code := help.answered(words, text)) is not None:
        return code
    directory = _live(words[0])
    saved = _present(directory)
    config, plan = _wanted(directory, saved, words[1:])
    from parallelrun.planner.resolve.freeze import freeze

    name = secrets.token_hex(8)
    reshapes.ask(directory, name, freeze(config, plan))
    answer = _answer(directory, name, saved.timeout_s)
    if "error" in answer:
        raise ConfigError(Problem(f"the run goes on under its plan: {answer['error']}", str(directory)))
    degrees = [degrees_text({axis: answer[side].get(axis, 1) for axis in ("dp", "cp", "tp", "pp", "ep")})
               for side in ("before", "after")]  # fmt: skip
    print(
        f"after step {answer['step']}: {degrees[0]} -> {degrees[1]}; {bytes_text(answer['moved_bytes'])} moved between "
        f"{counted(plan.world, 'rank')} in {seconds_text(answer['seconds'])}"
    )
    return EXIT_OK


def _live(word: str) -> Path:
    """Return the directory of a run that trains now. Raises ConfigError."""
    if "=" in word:
        raise ConfigError(Problem(f"{word} is no run: its directory comes first", "reshape", command=USAGE))
    run = find.single_run(word, Path("runs"))
    status = read_json(run / find.STATUS)
    if status.get("state") != "running":
        cause = f"{run} is not live: its state is {status.get('state') or 'unknown'}"
        resume = shlex.quote(f"resume={run}")
        again = f"parallelrun {resume} dp=... starts it again from its checkpoint, under any plan"
        raise ConfigError(Problem(cause, "reshape", command=again))
    return run


def _present(directory: Path) -> Config:
    """Return the configuration of the run's present plan."""
    from parallelrun.planner.resolve.freeze import load_frozen

    file = reshapes.config_file(directory)
    if file is None:
        history = attempts.read(directory)
        file = attempts.config_file(directory, history[-1].number if history else 1)
    try:
        return load_frozen(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(Problem(f"{file} cannot be read: {error}", "reshape")) from error


def _wanted(directory: Path, saved: Config, overrides: list[str]) -> tuple[Config, Plan]:
    """Return the configuration and plan that the overrides make of the run's. Raises ConfigError."""
    from parallelrun.cli import argv, verbs
    from parallelrun.config.continued import continued, differences
    from parallelrun.planner.resolve.freeze import filled
    from parallelrun.planner.resolve.resolve_config import resolve

    composition = verbs.compose_line(argv.read(["run", *overrides]), None)
    if composition is None or not overrides:
        raise ConfigError(Problem("no key says how the plan changes", "reshape", command=USAGE))
    composed, before = composition[0], resolve(saved)
    new, user_keys = composed.config, composed.given
    if "world" not in user_keys:  # as many ranks as now: degrees that are not given are not those of the present plan
        new, user_keys = replace(new, world=before.world), user_keys | {"world"}
    config = continued(new, user_keys, saved)
    config = replace(config, verb="run", device=saved.device, runs=saved.runs, resume=saved.resume)
    config = replace(config, path=None, tokenizer=None, profile=[], sweep=saved.sweep)
    plan = resolve(config, given=user_keys)
    problems = []
    if plan.world != before.world:
        cause = f"this plan has {counted(plan.world, 'rank')}, and the live run has {before.world}"
        other = f"stop the run, then parallelrun {shlex.join([f'resume={directory}', *overrides])}"
        problems.append(Problem(cause, "world", "degrees whose product is the same", other, kind="arithmetic"))
    if plan.servers or before.servers:
        cause = "parameter servers have loops of their own, which cannot change their plan"
        problems.append(Problem(cause, "strategy.data.kind", kind="undefined"))
    config = filled(config, plan)
    if not trains_alike(config, saved):
        keys = differences(config, saved, composed.given)
        changed = ", ".join(key for key in keys if key.partition(".")[0] in OF_A_TRAINING) or "the request"
        cause = f"{changed} would make it another training: only the plan of a live run changes"
        problems.append(Problem(cause, "reshape", command=USAGE, kind="contradiction"))
    if problems:
        raise ConfigError(*problems)
    return config, plan


def _answer(directory: Path, name: str, timeout_s: float) -> dict[str, Any]:
    """Wait for the run's answer to a request. Raises EnvironmentProblem if the run ends or does not answer."""
    print("waiting for the end of the step", file=sys.stderr)
    deadline = time.monotonic() + 2 * timeout_s
    try:
        while time.monotonic() < deadline:
            for answer in reshapes.answers(directory):
                if answer.get("name") == name:
                    return answer
            if read_json(directory / find.STATUS).get("state") != "running":
                raise EnvironmentProblem(Problem(f"{directory} has ended before it could change its plan", "reshape"))
            time.sleep(POLL_S)
    finally:
        reshapes.withdraw(directory, name)
    raise EnvironmentProblem(Problem(f"{directory} has not answered for {2 * timeout_s:g} s", "reshape"))
