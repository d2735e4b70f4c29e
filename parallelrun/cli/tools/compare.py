"""`parallelrun compare A B [C...]`: what differs between runs, and what came out."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from parallelrun.base.errors import EXIT_MISMATCH, EXIT_OK, ConfigError, ParallelrunError, Problem
from parallelrun.report.records import fail_conditions as conditions
from parallelrun.report.records import find
from parallelrun.report.records.read import read
from parallelrun.report.records.run_differences import compare

RUNS_HELP = "a run directory, latest, a name below --runs, the random end of a directory's name, or a sweep's directory"


def parser_of_runs(tool: str, description: str, **run: Any) -> argparse.ArgumentParser:
    """The parser of a tool that takes runs. run: changes of the argument `run`."""
    parser = argparse.ArgumentParser(f"parallelrun {tool}", description=description, allow_abbrev=False)
    parser.add_argument("run", **{"nargs": "+", "help": RUNS_HELP, **run})
    parser.add_argument("--runs", type=Path, default="runs", help="the folder of run directories (default: runs)")
    return parser


def directories_of(arguments: argparse.Namespace) -> list[Path]:
    """The directories of the runs that are named, each once. Raises ConfigError."""
    return list(dict.fromkeys(find.resolve(arguments.run, arguments.runs.expanduser())))


def main(words: list[str]) -> int:
    """Print the comparison. Raises ConfigError (exit 2); ParallelrunError (exit 4) for a broken file or a failed
    condition."""
    arguments = _parser().parse_args(words)
    wanted = [conditions.parse(text) for text in arguments.fail_on]
    directories = directories_of(arguments)
    if len(directories) < 2:
        cause = f"compare needs two runs at least, got {len(directories)}"
        raise ConfigError(Problem(cause, "command line", command="parallelrun runs ls"))
    comparison = compare([read(directory) for directory in directories])
    failed = conditions.failures(comparison, wanted)
    from parallelrun.report.runs import run_comparison as report

    if arguments.json:
        from parallelrun.cli.json_output import print_json

        print_json(report.document(comparison, failed))
    elif arguments.md:
        sys.stdout.write(report.markdown(comparison, failed))
    else:
        from parallelrun.report.screen import open_console

        report.show(comparison, failed, open_console())
    if failed:
        sys.stdout.flush()
        raise ParallelrunError(*(Problem(text, "--fail-on") for text in failed), exit_code=EXIT_MISMATCH)
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    description = "Compare the configuration, plan, versions and results of runs."
    parser = parser_of_runs("compare", description, help=f"{RUNS_HELP}; the first run is the baseline")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON document")
    form.add_argument("--md", action="store_true", help="Markdown")
    parser.add_argument("--fail-on", action="append", default=[], metavar="CONDITION",
                        help="exit 4 if it holds: 'val_loss>+1%%', 'tokens_per_s<-5%%', 'loss>4.2' or "
                        "'loss_difference>0'; can be repeated")  # fmt: skip
    return parser
