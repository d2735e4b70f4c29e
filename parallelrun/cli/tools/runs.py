"""`parallelrun runs ls|show`, `compare A B [C...]`, `report RUN|SWEEP...` and `plot SWEEP --x KEY --y RESULT`.

Imports no torch.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parallelrun.base import errors
from parallelrun.base.errors import ConfigError, EnvironmentProblem, ParallelrunError, Problem
from parallelrun.base.packages import require
from parallelrun.base.records import write_bytes
from parallelrun.base.wording import counted, print_note
from parallelrun.cli.json_output import print_json
from parallelrun.report.records import fail_conditions, find, run_differences
from parallelrun.report.records.read import read
from parallelrun.report.records.rows import EMPTY, STATES, RunRow, read_row
from parallelrun.report.records.series import series

_RUNS = "runs"
SHOWN = 20  # runs of the table without --limit
PAGE = "report.html"
RUNS_HELP = "a run directory, latest, a name below --runs, the random end of a directory's name, or a sweep's directory"


def runs(words: list[str]) -> int:
    """Carry out `runs ls` or `runs show`. Raises ConfigError (exit 2), ParallelrunError (exit 4) for broken files."""
    arguments = _parser_of_runs().parse_args(words)
    carry_out: Callable[[argparse.Namespace, Path], int] = arguments.carry_out
    return carry_out(arguments, Path(arguments.runs).expanduser())


def _parser_of_runs() -> argparse.ArgumentParser:
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


def _ls(arguments: argparse.Namespace, folder: Path) -> int:
    """Print the table of runs. Reads only the runs that it shows, unless a state is asked for."""
    from parallelrun.report.runs import run_list
    from parallelrun.report.screen import open_console

    if not folder.is_dir() and str(folder) != _RUNS:  # in the default folder there are no runs yet
        raise ConfigError(Problem(f"{folder}: no such folder", "--runs"))
    directories = [path for path in find.all_runs(folder) if fnmatch.fnmatch(path.parent.name, arguments.name)]
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
        print_json({"runs": [run_list.document(row) for row in rows], "num_runs": len(directories)})
    elif rows:
        run_list.show_table(rows, len(directories) - num_read, open_console())
    else:
        print(f"no such runs in {folder}")
    return errors.EXIT_OK


def _show(arguments: argparse.Namespace, folder: Path) -> int:
    from parallelrun.report.runs import final_panel, run_list
    from parallelrun.report.screen import open_console

    directory = find.single_run(arguments.run, folder)
    run, row = read(directory), read_row(directory)
    if arguments.json:
        print_json({**run_list.document(row), "manifest": run.manifest, "config": run.config, "results": run.results})
        return errors.EXIT_OK
    console = open_console()
    run_list.facts(run, row, console)
    if (directory / "summary.json").exists() and (directory / "comm.json").exists() and run.rows:
        console.print()
        final_panel.show(directory, console)
    return errors.EXIT_OK


def compare(words: list[str]) -> int:
    """Print what differs between runs, and what came out.

    Raises ConfigError (exit 2); ParallelrunError (exit 4) for a broken file or a failed condition.
    """
    arguments = _parser_of_compare().parse_args(words)
    wanted = [fail_conditions.parse(text) for text in arguments.fail_on]
    directories = _directories_of(arguments)
    if len(directories) < 2:
        cause = f"compare needs two runs at least, got {len(directories)}"
        raise ConfigError(Problem(cause, "command line", command="parallelrun runs ls"))
    comparison = run_differences.compare([read(directory) for directory in directories])
    failed = fail_conditions.failures(comparison, wanted)
    from parallelrun.report.runs import run_comparison

    if arguments.json:
        print_json(run_comparison.document(comparison, failed))
    elif arguments.md:
        sys.stdout.write(run_comparison.markdown(comparison, failed))
    else:
        from parallelrun.report.screen import open_console

        run_comparison.show(comparison, failed, open_console())
    if failed:
        sys.stdout.flush()
        raise ParallelrunError(*(Problem(text, "--fail-on") for text in failed), exit_code=errors.EXIT_MISMATCH)
    return errors.EXIT_OK


def _parser_of_compare() -> argparse.ArgumentParser:
    description = "Compare the configuration, plan, versions and results of runs."
    parser = _parser_of_tool("compare", description, help=f"{RUNS_HELP}; the first run is the baseline")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON document")
    form.add_argument("--md", action="store_true", help="Markdown")
    parser.add_argument("--fail-on", action="append", default=[], metavar="CONDITION",
                        help="exit 4 if it holds: 'val_loss>+1%%', 'tokens_per_s<-5%%', 'loss>4.2' or "
                        "'loss_difference>0'; can be repeated")  # fmt: skip
    return parser


def report(words: list[str]) -> int:
    """Write the page and print its path. Raises ConfigError (2), EnvironmentProblem (3), ParallelrunError (4)."""
    parser = _parser_of_tool("report", "Write one HTML page about runs, readable without a network.")
    text = f"the file to write (default: {PAGE} in the run or sweep; in this folder for several)"
    parser.add_argument("--to", metavar="FILE", help=text)
    arguments = parser.parse_args(words)
    directories = _directories_of(arguments)
    target = Path(arguments.to).expanduser() if arguments.to else _default_page(directories, len(arguments.run))
    if target.is_dir():
        raise ConfigError(Problem(f"--to {target} is a folder", "--to", f"{target / PAGE}"))
    title = _title_of_page(directories) if len(arguments.run) == 1 else f"{len(directories)} runs"
    from parallelrun.report.page.document import page

    _save(target, page([read(directory) for directory in directories], title).encode())
    print(os.path.relpath(target))
    return errors.EXIT_OK


def _save(target: Path, content: bytes) -> None:
    """Write a file in full or not at all. Raises EnvironmentProblem (exit 3)."""
    try:
        write_bytes(target, content)
    except OSError as error:
        cause = f"{target} cannot be written: {error.strerror or error}"
        raise EnvironmentProblem(Problem(cause, "--to", "a file in a writable folder")) from error


def _default_page(directories: list[Path], num_words: int) -> Path:
    if num_words > 1:
        return Path(PAGE)
    return (directories[0] if len(directories) == 1 else directories[0].parent) / PAGE


def _title_of_page(directories: list[Path]) -> str:
    head = directories[0]
    return head.parent.name if len(directories) > 1 else f"{head.parent.name} {head.name}"


def plot(words: list[str]) -> int:
    """Write the figure and print its path. Raises ConfigError (2), EnvironmentProblem (3), ParallelrunError (4)."""
    from parallelrun.report.sweeps import plot as figure

    arguments = _parser_of_plot().parse_args(words)
    target = Path(arguments.to or f"{arguments.y}-over-{arguments.x}.svg").expanduser()
    form = target.suffix.lower().removeprefix(".")
    if form not in figure.FORMS:
        legal = " or ".join(str(target.with_suffix(f".{suffix}")) for suffix in figure.FORMS)
        raise ConfigError(Problem(f"--to {target}: a figure is one of {', '.join(figure.FORMS)}", "--to", legal))
    if form != "csv":
        require("matplotlib", f"--to {target}", "plot", extra="plots")
    by = [key for text in arguments.by for key in text.split(",") if key]
    compared = [read(directory) for directory in _directories_of(arguments)]
    lines, num_left_out = series(compared, arguments.x, arguments.y, by)
    notes = []
    if any(point.y.count > 1 for line in lines for point in line.points):
        notes.append("mean and standard deviation over seeds")
    if any((run.number("ranks_per_core") or 0) > 1 for run in compared):
        notes.append("ranks shared cores: no scaling measurement")
    if num_left_out:
        print_note(f"note: {counted(num_left_out, 'run')} without {arguments.y}")
    _save(target, figure.draw(lines, arguments.x, arguments.y, form, arguments.width, arguments.log, notes))
    print(os.path.relpath(target))
    return errors.EXIT_OK


def _parser_of_plot() -> argparse.ArgumentParser:
    parser = _parser_of_tool("plot", "Draw one result of runs over a key, as a figure for a paper.")
    parser.add_argument("--x", required=True, help="a key of the configuration, or a result: world, optimizer.lr")
    parser.add_argument("--y", required=True, help="a result: tokens_per_s, val_loss, peak_memory_bytes")
    parser.add_argument(
        "--by", action="append", default=[], metavar="KEY[,KEY]", help="a line for each value: strategy"
    )
    parser.add_argument("--to", metavar="FILE", help="the file: .svg, .pdf, .png or .csv (default: Y-over-X.svg)")
    parser.add_argument("--width", choices=("column", "page"), default="column", help="3.5 or 7 inches")
    parser.add_argument("--log", choices=("x", "y", "xy"), default="", help="axes whose steps are factors")
    return parser


def _parser_of_tool(tool: str, description: str, **run: Any) -> argparse.ArgumentParser:
    """The parser of a tool that takes runs. run: changes of the argument `run`."""
    parser = argparse.ArgumentParser(f"parallelrun {tool}", description=description, allow_abbrev=False)
    parser.add_argument("run", **{"nargs": "+", "help": RUNS_HELP, **run})
    parser.add_argument("--runs", type=Path, default="runs", help="the folder of run directories (default: runs)")
    return parser


def _directories_of(arguments: argparse.Namespace) -> list[Path]:
    """The directories of the runs that are named, each once. Raises ConfigError."""
    return list(dict.fromkeys(find.resolve(arguments.run, arguments.runs.expanduser())))
