"""`parallelrun recipes ls|cp|validate`: the recipes as a gallery."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallelrun.base.errors import EXIT_CONFIG, EXIT_OK, ConfigError, EnvironmentProblem, ParallelrunError, Problem
from parallelrun.cli import errors
from parallelrun.cli.json_output import print_json
from parallelrun.config.keys import nearest
from parallelrun.config.recipes import recipe_files
from parallelrun.config.recipes.recipe_files import RecipeFile

if TYPE_CHECKING:
    from parallelrun.config.compose import Composed
    from parallelrun.config.recipes.about import About
    from parallelrun.planner.contract.plan import Plan


@dataclass(frozen=True)
class Checked:
    """A recipe's checks. problems: every fault, with file and key. results: predicted, of those that it names."""

    file: RecipeFile
    problems: tuple[Problem, ...]
    results: dict[str, float]


def main(words: list[str]) -> int:
    """Carry out a command on recipes; without a word, list them. Raises ConfigError, EnvironmentProblem."""
    arguments = _parser().parse_args(words or ["ls"])
    code: int = arguments.carry_out(arguments)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("parallelrun recipes", description="List, copy and check recipes.")
    tools = parser.add_subparsers(required=True, metavar="ls|cp|validate")
    ls = tools.add_parser("ls", help="list recipes with what each is for, needs and gives")
    ls.set_defaults(carry_out=_ls)
    ls.add_argument("--json", action="store_true", help="one JSON document")
    cp = tools.add_parser("cp", help="copy a recipe, to change it")
    cp.set_defaults(carry_out=_cp)
    cp.add_argument("name", help="a recipe's name or file")
    cp.add_argument("to", nargs="?", default=".", help="a new file, or a folder (default: this one)")
    validate = tools.add_parser("validate", help="compose and plan recipes, and check what they say about themselves")
    validate.set_defaults(carry_out=_validate)
    validate.add_argument("recipe", nargs="*", help="names or files (default: every recipe that is found)")
    validate.add_argument("--trust", action="store_true", help="let the recipes name code and write anywhere")
    validate.add_argument("--json", action="store_true", help="one JSON document")
    return parser


def _file(name: str) -> RecipeFile:
    """The recipe of a name or path. Raises ConfigError."""
    if recipe_files.is_path(name):
        return recipe_files.at_path(name)
    files = recipe_files.find()
    if name not in files:
        suggestion = ", ".join(nearest(name, files))
        raise ConfigError(Problem(f"{name}: no such recipe", "command line", suggestion, "parallelrun recipes ls"))
    return files[name]


def rows() -> list[dict[str, Any]]:
    """Every recipe with what it says about itself. One that cannot be read has only its fault."""
    entries = []
    for file in recipe_files.find().values():
        row: dict[str, Any] = {"name": file.name, "source": file.source, "file": str(file.path), "error": None}
        try:
            about = recipe_files.load(file, trust=True).about
        except ParallelrunError as error:
            about, row["error"] = None, str(error)
        entries.append({**row, "description": file.description, "about": asdict(about) if about else None})
    return entries


def _ls(arguments: argparse.Namespace) -> int:
    recipes = rows()
    if arguments.json:
        print_json({"recipes": recipes})
        return EXIT_OK
    from parallelrun.report.screen import open_console, table

    drawn = table("name", "devices", "minutes", "expected", "purpose", rule=False, padding=(0, 2, 0, 0))
    for column in drawn.columns[:-1]:
        column.no_wrap = True
    for row in recipes:
        drawn.add_row(row["name"], *cells(row["about"] or {}), row["error"] or row["description"])
    open_console().print(drawn)
    return EXIT_OK


def cells(about: dict[str, Any]) -> tuple[str, str, str]:
    """Devices, minutes and expected results as short texts; empty where nothing is said."""
    devices = f"{about['devices']:,} x {about['device']}" if about.get("devices") and about.get("device") else ""
    results = {name: pair for name, pair in (about.get("expected") or {}).items() if pair}
    expected = "; ".join(f"{name} {_between(pair)}" for name, pair in results.items())
    return devices, _between(about["minutes"]) if about.get("minutes") else "", expected


def _between(pair: list[float]) -> str:
    return " to ".join(f"{bound:,.0f}" if bound >= 1000 else f"{bound:g}" for bound in pair)


def _cp(arguments: argparse.Namespace) -> int:
    file = _file(arguments.name)
    to = Path(arguments.to).expanduser()
    path = to / f"{file.path.stem}.yaml" if to.is_dir() or arguments.to.endswith("/") else to
    if path.suffix != ".yaml":
        raise ConfigError(Problem(f"{path}: a recipe's file ends with .yaml", "command line", f"{path}.yaml"))
    try:
        text = file.path.read_bytes()
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "xb") as copy:
            copy.write(text)
    except FileExistsError as error:
        raise ConfigError(
            Problem(f"{path} exists already, and is not overwritten", str(path), "another name")
        ) from error
    except OSError as error:
        cause = f"cannot copy {file.shown} to {path}: {error.strerror}"
        raise EnvironmentProblem(Problem(cause, str(error.filename or path))) from error
    shown = str(path) if "/" in str(path) else f"./{path}"
    print(f"copied to {path}; run it with:\nparallelrun recipe={shown}")
    return EXIT_OK


def _validate(arguments: argparse.Namespace) -> int:
    files = [_file(name) for name in arguments.recipe] or list(recipe_files.find().values())
    checked = []
    for file in files:
        checked.append(check(file, arguments.trust))
        if not arguments.json:
            _tell(checked[-1])
    wrong = [problem for result in checked for problem in result.problems]
    if arguments.json:
        print_json({"valid": not wrong, "recipes": [_document(result) for result in checked]})
    elif wrong:
        print(errors.render(wrong, False), file=sys.stderr)
    return EXIT_CONFIG if wrong else EXIT_OK


def _tell(checked: Checked) -> None:
    count = len(checked.problems)
    results = ", ".join(f"{name} {value:,.4g}" for name, value in checked.results.items())
    said = f"{count} fault{'s' if count > 1 else ''}" if count else "valid"
    print("; ".join(part for part in (f"{checked.file.shown}: {said}", results) if part), flush=True)


def _document(checked: Checked) -> dict[str, Any]:
    return {**asdict(checked), "file": checked.file.shown}


def check(file: RecipeFile, trust: bool = False) -> Checked:
    """Read, compose and plan a recipe, and compare what it says about itself with the plan."""
    try:
        about = recipe_files.load(file, trust).about
        composed, plan = _planned(file, trust)
    except Exception as error:
        translated = errors.translate(error)
        if translated is None:
            raise
        return Checked(file, tuple(_in_file(file, problem) for problem in translated.problems), {})
    return _compared(file, about, composed, plan)


def _planned(file: RecipeFile, trust: bool) -> tuple[Composed, Plan]:
    from parallelrun.cli.argv import read
    from parallelrun.config import compose
    from parallelrun.planner.resolve.resolve_config import resolve

    line = read([f"recipe={file.path}"])
    composed, _ = compose.compose_once(compose.prepare(line.overrides, (), line.verb, file.is_trusted(trust)))
    return composed, resolve(composed.config, given=composed.given, gpus=0)


def _in_file(file: RecipeFile, problem: Problem) -> Problem:
    """`problem` with the file, if it only names a key."""
    where = problem.where
    return problem if file.path.name in where else Problem(
        problem.what, f"{file.shown}: {where}" if where else file.shown, problem.suggestion, problem.command
    )  # fmt: skip


def _compared(file: RecipeFile, about: About | None, composed: Composed, plan: Plan) -> Checked:
    """Compare a recipe's own statements with its plan: devices, memory fit and, where predicted, the rate."""
    from parallelrun.config.recipes.about import KEY
    from parallelrun.planner.facts.plan_facts import facts, figures
    from parallelrun.planner.model import definitions

    if about is None:
        cause = f"{KEY}: is missing; it says purpose, devices, minutes, expected results and source"
        return Checked(file, (Problem(cause, file.shown, command="parallelrun recipes cp quickstart"),), {})
    planned = figures(plan, composed.config.cluster, facts(plan, composed.config))
    trains = not definitions.model(composed.config).is_lesson
    faults = [(key, f"{key}: is missing") for key in about.missing(trains)]
    if about.devices is not None and about.devices != plan.world:
        faults.append((f"{KEY}.devices", f"{KEY}.devices: {about.devices}, but the plan has {plan.world} ranks"))
    if planned["fits"] == "no":
        faults.append(("cluster.memory_gb", "the plan does not fit into the memory of its devices"))
    results = {} if planned["step_time_is_bound"] else _predicted(planned, composed.config.steps)
    limits = {f"{KEY}.expected.{name}": pair for name, pair in about.results().items()}
    limits |= {f"{KEY}.minutes": about.minutes} if about.minutes is not None else {}
    faults += [
        (key, f"{key}: {_between(limits[key])}, but {value:,.4g} is predicted")
        for key, value in results.items()
        if key in limits and not limits[key][0] <= value <= limits[key][1]
    ]
    problems = tuple(Problem(cause, f"{file.shown}: {key}") for key, cause in faults)
    return Checked(file, problems, {name.rpartition(".")[2]: value for name, value in results.items()})


def _predicted(planned: dict[str, Any], steps: int) -> dict[str, float]:
    step, rate = planned["step_time_predicted_s"], planned["tokens_per_s"]
    results = {"about.minutes": steps * step / 60} if step else {}
    return results | ({"about.expected.tokens_per_s": rate} if rate else {})
