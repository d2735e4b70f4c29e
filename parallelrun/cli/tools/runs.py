"""`parallelrun runs ls|show`: the run directories of a folder. Imports no torch."""

from __future__ import annotations

import argparse
import fnmatch
from collections.abc import Callable
from pathlib import Path

from parallelrun.base.errors import EXIT_OK, ConfigError, Problem
from parallelrun.cli.json_output import print_json
from parallelrun.cli.tools.compare import RUNS_HELP
from parallelrun.report.records import find
from parallelrun.report.records.read import read
from parallelrun.report.records.rows import EMPTY, STATES, RunRow, read_row

_RUNS = "runs"
SHOWN = 20  # runs of the table without --limit


def main(words: list[str]) -> int:
    """Carry out a command on runs. Raises ConfigError (exit 2), ParallelrunError (exit 4) for broken files."""
    arguments = _parser().parse_args(words)
    carry_out: Callable[[argparse.Namespace, Path], int] = arguments.carry_out
    return carry_out(arguments, Path(arguments.runs).expanduser())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("parallelrun runs", description="List and show runs.", allow_abbrev=False)
    tools = parser.add_subparsers(required=True, metavar="ls|show")

    def tool(name: str, carry_out: Callable[[argparse.Namespace, Path], int], text: str) -> argparse.ArgumentParser:
        added = tools.add_parser(name, help=text, description=text, allow_abbrev=False)
        added.set_defaults(carry_out=carry_out)
        added.add_argument("--runs", default=_RUNS, help="the folder of run directories (default: runs)")
        added.add_argument("--json", action="store_true", help="one JSON document")
        return added

    ls = tool("ls", _ls, "list runs, the newest first")
    ls.add_argument("name", nargs="?", default="*", help="only runs with this name; * and ? stand for other letters")
    ls.add_argument("--state", choices=STATES, help="only runs in this state")
    ls.add_argument("--limit", type=_count, default=SHOWN, help=f"the number of runs (default: {SHOWN})")
    ls.add_argument("--all", action="store_true", help="all runs")
    show = tool("show", _show, "show one run: command, versions, state, results")
    show.add_argument("run", help=RUNS_HELP)
    return parser


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: a number from 1 is needed")
    return int(text)


def _ls(arguments: argparse.Namespace, runs: Path) -> int:
    """Print the table of runs. Reads only the runs that it shows, unless a state is asked for."""
    from parallelrun.report.runs import run_list as report
    from parallelrun.report.screen import open_console

    if not runs.is_dir() and str(runs) != _RUNS:  # in the default folder there are no runs yet
        raise ConfigError(Problem(f"{runs}: no such folder", "--runs"))
    directories = [path for path in find.all_runs(runs) if fnmatch.fnmatch(path.parent.name, arguments.name)]
    limit = len(directories) if arguments.all else arguments.limit
    rows: list[RunRow] = []
    num_read = 0
    for directory in directories:
        if len(rows) == limit:
            break
        num_read += 1
        row = read_row(directory)
        if row.state != EMPTY and arguments.state in (None, row.state):
            rows.append(row)
    if arguments.json:
        print_json({"runs": [report.document(row) for row in rows], "num_runs": len(directories)})
    elif rows:
        report.show_table(rows, len(directories) - num_read, open_console())
    else:
        print(f"no such runs in {runs}")
    return EXIT_OK


def _show(arguments: argparse.Namespace, runs: Path) -> int:
    from parallelrun.report.runs import final_panel as run_report
    from parallelrun.report.runs import run_list as report
    from parallelrun.report.screen import open_console

    directory = find.single_run(arguments.run, runs)
    run, row = read(directory), read_row(directory)
    if arguments.json:
        print_json({**report.document(row), "manifest": run.manifest, "config": run.config, "results": run.results})
        return EXIT_OK
    console = open_console()
    report.facts(run, row, console)
    if (directory / "summary.json").exists() and (directory / "comm.json").exists() and run.rows:
        console.print()
        run_report.show(directory, console)
    return EXIT_OK
