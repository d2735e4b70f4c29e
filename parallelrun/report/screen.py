"""The console that every report prints to: as wide as the terminal, and without one as wide as its longest line."""

from __future__ import annotations

from typing import Any

from rich.console import Console

NO_LIMIT = 10_000  # columns: a pipe or a file has no width, and a wrapped line cannot be searched
WIDEST = 120  # columns of what is drawn to fill the screen


def open_console(**options: Any) -> Console:
    """A console for rank 0's stdout (options: of rich's Console). Only a terminal wraps lines."""
    console = Console(highlight=False, **options)
    return console if console.is_terminal else Console(highlight=False, width=NO_LIMIT, **options)
