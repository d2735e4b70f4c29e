"""`parallelrun report RUN|SWEEP...`: one self-contained HTML page about runs, readable without a network."""

from __future__ import annotations

import os
from pathlib import Path

from parallelrun.base.errors import EXIT_OK, ConfigError, EnvironmentProblem, Problem
from parallelrun.base.records import write_bytes
from parallelrun.cli.tools.compare import directories_of, parser_of_runs
from parallelrun.report.records.read import read

PAGE = "report.html"


def main(words: list[str]) -> int:
    """Write the page and print its path. Raises ConfigError (2), EnvironmentProblem (3), ParallelrunError (4)."""
    parser = parser_of_runs("report", "Write one HTML page about runs, readable without a network.")
    text = f"the file to write (default: {PAGE} in the run or sweep; in this folder for several)"
    parser.add_argument("--to", metavar="FILE", help=text)
    arguments = parser.parse_args(words)
    directories = directories_of(arguments)
    target = Path(arguments.to).expanduser() if arguments.to else _default(directories, len(arguments.run))
    if target.is_dir():
        raise ConfigError(Problem(f"--to {target} is a folder", "--to", f"{target / PAGE}"))
    title = _title(directories) if len(arguments.run) == 1 else f"{len(directories)} runs"
    from parallelrun.report.page.document import page

    save(target, page([read(directory) for directory in directories], title).encode(), "--to")
    print(os.path.relpath(target))
    return EXIT_OK


def save(target: Path, content: bytes, flag: str) -> None:
    """Write a file in full or not at all. Raises EnvironmentProblem (exit 3)."""
    try:
        write_bytes(target, content)
    except OSError as error:
        cause = f"{target} cannot be written: {error.strerror or error}"
        raise EnvironmentProblem(Problem(cause, flag, "a file in a writable folder")) from error


def _default(directories: list[Path], num_words: int) -> Path:
    if num_words > 1:
        return Path(PAGE)
    return (directories[0] if len(directories) == 1 else directories[0].parent) / PAGE


def _title(directories: list[Path]) -> str:
    head = directories[0]
    return head.parent.name if len(directories) > 1 else f"{head.parent.name} {head.name}"
