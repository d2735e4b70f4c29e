"""`parallelrun top RUN`: watches a run: its ranks, steps, rate, memory and waiting, from its records."""

from __future__ import annotations

import sys
import time

from parallelrun.base.errors import EXIT_OK
from parallelrun.cli.json_output import print_json
from parallelrun.cli.tools.compare import RUNS_HELP, parser_of_runs
from parallelrun.report.records import find

EVERY_S = 1.0


def main(words: list[str]) -> int:
    """Draw the run until it has ended, or once. Raises ConfigError (exit 2), ParallelrunError (4) for broken files."""
    description = "Watch a live run: its ranks, steps, rate, memory and waiting time."
    text = f"{RUNS_HELP} (default: latest)"
    parser = parser_of_runs("top", description, nargs="?", default=find.LATEST, help=text)
    parser.add_argument("--once", action="store_true", help="print once, as without a terminal")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    arguments = parser.parse_args(words)
    directory = find.single_run(arguments.run, arguments.runs.expanduser())
    from parallelrun.report.records.live import read_live

    if arguments.json:
        print_json(read_live(directory).document())
        return EXIT_OK
    from rich.live import Live

    from parallelrun.report.runs import top as report
    from parallelrun.report.screen import open_console

    console = open_console()
    now = read_live(directory)
    if arguments.once or not console.is_terminal or not now.is_live:
        console.print(report.drawing(now, console.height))
        return EXIT_OK
    with Live(report.drawing(now, console.height), console=console, auto_refresh=False) as screen:
        while now.is_live:
            time.sleep(EVERY_S)
            now = read_live(directory)
            screen.update(report.drawing(now, console.height), refresh=True)
    sys.stdout.flush()
    return EXIT_OK
