"""The console that every report prints to, and the tables and panels that they share. Without a terminal, text is
wrapped at `wording.COLUMNS`; tables, paths and commands are not."""

from __future__ import annotations

import io
import re
import shlex
import sys
from collections.abc import Iterable
from typing import IO, Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.panel import Panel
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from parallelrun.base.wording import COLUMNS

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
    return _Piped(**{**options, "file": _Unpadded(options.get("file"))}, width=NO_LIMIT)


class _Piped(Console):
    """A console without a terminal: as wide as any table, and text of at most COLUMNS."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        options = options or self.options
        if isinstance(renderable, Text):
            options = options.update(max_width=min(options.max_width, _columns(renderable, COLUMNS)))
        return super().render(renderable, options)


def _columns(text: Text, width: int) -> int:
    """Return the columns in which a text is wrapped, so that no path is cut."""
    return max([width, *map(len, text.plain.split())])


class _Beside:
    """A text beside its label: without a terminal it is wrapped at `width`."""

    def __init__(self, text: Text, width: int):
        self._text, self._width = text, width

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width if console.is_terminal else min(options.max_width, _columns(self._text, self._width))
        yield from console.render(self._text, options.update(max_width=width))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._text)


def print_command(command: str, console: Console) -> None:
    """Print a command that can be copied: in no frame, on a terminal broken between words only, after backslashes."""
    lines = [""]
    for word in map(shlex.quote, shlex.split(command)):
        is_full = console.is_terminal and len(lines[-1]) + len(word) + len("  \\") > console.width
        lines += [" "] if is_full and lines[-1] else []
        lines[-1] += f" {word}" if lines[-1] else word
    console.print(Text(" \\\n".join(lines), "bold"), soft_wrap=True)


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
    drawn = Table(**{**style, "padding": (0, 1, 0, 0), "pad_edge": False, "show_edge": False, **options})
    for column in columns:
        number = column.startswith(">")
        name = column.lstrip(">")
        drawn.add_column(name, justify="right" if number else "left", no_wrap=number, overflow="fold")
    return drawn


def labelled(rows: Iterable[tuple[str, RenderableType]]) -> Table:
    """Return a grid of texts beside their labels; a text of several lines stays in its column."""
    rows = list(rows)
    width = COLUMNS - max([LABEL, *(len(label) + 1 for label, _ in rows)])
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(style="bold", no_wrap=True, min_width=LABEL - 1)
    grid.add_column(overflow="fold")
    for label, part in rows:
        part = Text.from_markup(part) if isinstance(part, str) else part
        grid.add_row(label, _Beside(part, width) if isinstance(part, Text) else part)
    return grid


def under_one_label(label: str, texts: Iterable[str], style: str = "") -> list[tuple[str, Text]]:
    """Return rows for `labelled`: a line for each of the texts, of which the first has the label."""
    return [("" if index else label, Text(text, style)) for index, text in enumerate(texts)]


def framed(title: str, part: RenderableType, console: Console) -> Panel:
    """Return a panel as wide as the terminal, up to WIDEST columns."""
    return Panel(part, title=title, title_align="left", border_style="dim", width=min(console.width, WIDEST))


def show_section(title: str, part: RenderableType, console: Console) -> None:
    """Print a panel on a terminal, and elsewhere the title above plain lines."""
    if console.is_terminal:
        console.print(framed(title, part, console))
    else:
        console.print(Text(f"{title}:", "bold"), part, "", sep="\n")
