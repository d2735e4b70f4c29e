"""The console that every report prints to, and the tables and panels that they share. Without a terminal, no line is
wrapped: a pipe or a file has no width, and a wrapped line cannot be searched."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterable
from typing import IO, Any

from rich import box
from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

NO_LIMIT = 10_000  # columns, where there is no terminal
WIDEST = 120  # columns of a panel
FRAME = 4  # columns of a panel's frame
LABEL = 10  # columns of the labels in `labelled`


def open_console(**options: Any) -> Console:
    """Return a console for rank 0's stdout; options are those of rich's Console."""
    options = {"highlight": False, "emoji": False, **options}  # emoji: it searches for :names:, and loads their table
    console = Console(**options)
    if console.is_terminal:
        return console
    return Console(**{**options, "file": _Unpadded(options.get("file"))}, width=NO_LIMIT)


class _Unpadded(io.TextIOBase):
    """Writes to `file` (default: stdout at that time), without the spaces that fill the cells at the end of a line."""

    def __init__(self, file: IO[str] | None):
        self._file = file

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._file or sys.stdout, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        return (self._file or sys.stdout).write(re.sub(r" +\n", "\n", text))

    def flush(self) -> None:
        (self._file or sys.stdout).flush()


def table(*columns: str, rule: bool = True, **options: Any) -> Table:
    """Return a table without frames. A column whose name begins with `>` is right-aligned and never wrapped.

    rule: draw a line below the names of the columns.
    """
    style: dict[str, Any] = {"box": box.SIMPLE_HEAD} if rule else {"box": None, "header_style": "dim"}
    found = Table(**{**style, "padding": (0, 1, 0, 0), "pad_edge": False, "show_edge": False, **options})
    for column in columns:
        number = column.startswith(">")
        name = column.lstrip(">")
        found.add_column(name, justify="right" if number else "left", no_wrap=number, overflow="fold")
    return found


def labelled(rows: Iterable[tuple[str, RenderableType]]) -> Table:
    """Return a grid of texts beside their labels; a text of several lines stays in its column."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(style="bold", no_wrap=True, min_width=LABEL - 1)
    grid.add_column(overflow="fold")
    for row in rows:
        grid.add_row(*row)
    return grid


def framed(title: str, part: RenderableType, console: Console) -> Panel:
    """Return a panel as wide as the terminal, up to WIDEST columns."""
    return Panel(part, title=title, title_align="left", border_style="dim", width=min(console.width, WIDEST))


def show_section(title: str, part: RenderableType, console: Console) -> None:
    """Print a panel on a terminal, and elsewhere the title above plain lines."""
    if console.is_terminal:
        console.print(framed(title, part, console))
    else:
        console.print(Text(f"{title}:", "bold"), part, "", sep="\n")
