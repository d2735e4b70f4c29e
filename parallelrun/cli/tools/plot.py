"""`parallelrun plot SWEEP --x world --y tokens_per_s --by strategy`: a figure for a paper."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from parallelrun.base.errors import EXIT_OK, ConfigError, Problem
from parallelrun.base.packages import require
from parallelrun.base.wording import counted, print_note
from parallelrun.cli.tools.compare import directories_of, parser_of_runs
from parallelrun.cli.tools.report import save
from parallelrun.report.records.read import read
from parallelrun.report.records.series import series


def main(words: list[str]) -> int:
    """Write the figure and print its path. Raises ConfigError (2), EnvironmentProblem (3), ParallelrunError (4)."""
    from parallelrun.report.sweeps import plot

    arguments = _parser().parse_args(words)
    target = Path(arguments.to or f"{arguments.y}-over-{arguments.x}.svg").expanduser()
    form = target.suffix.lower().removeprefix(".")
    if form not in plot.FORMS:
        legal = " or ".join(str(target.with_suffix(f".{suffix}")) for suffix in plot.FORMS)
        raise ConfigError(Problem(f"--to {target}: a figure is one of {', '.join(plot.FORMS)}", "--to", legal))
    if form != "csv":
        require("matplotlib", f"--to {target}", "plot", extra="plots")
    by = [key for text in arguments.by for key in text.split(",") if key]
    runs = [read(directory) for directory in directories_of(arguments)]
    lines, num_left_out = series(runs, arguments.x, arguments.y, by)
    notes = []
    if any(point.y.count > 1 for line in lines for point in line.points):
        notes.append("mean and standard deviation over seeds")
    if any((run.number("ranks_per_core") or 0) > 1 for run in runs):
        notes.append("ranks shared cores: no scaling measurement")
    if num_left_out:
        print_note(f"note: {counted(num_left_out, 'run')} without {arguments.y}")
    save(target, plot.draw(lines, arguments.x, arguments.y, form, arguments.width, arguments.log, notes), "--to")
    print(os.path.relpath(target))
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = parser_of_runs("plot", "Draw one result of runs over a key, as a figure for a paper.")
    parser.add_argument("--x", required=True, help="a key of the configuration, or a result: world, optimizer.lr")
    parser.add_argument("--y", required=True, help="a result: tokens_per_s, val_loss, peak_memory_bytes")
    parser.add_argument(
        "--by", action="append", default=[], metavar="KEY[,KEY]", help="a line for each value: strategy"
    )
    parser.add_argument("--to", metavar="FILE", help="the file: .svg, .pdf, .png or .csv (default: Y-over-X.svg)")
    parser.add_argument("--width", choices=("column", "page"), default="column", help="3.5 or 7 inches")
    parser.add_argument("--log", choices=("x", "y", "xy"), default="", help="axes whose steps are factors")
    return parser
