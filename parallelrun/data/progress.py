"""The progress of reading files, on stderr: a bar on a terminal, elsewhere a line every few seconds."""

from __future__ import annotations

import time

from rich.console import Console

PLAIN_LINE_EVERY_S = 5.0
BAR = 30  # columns


class ReadingProgress:
    """Shows bytes read, tokens and rate; callable as a `token_writer.Progress`. verb: the first word of plain lines."""

    def __init__(self, verb: str, console: Console | None = None):
        self._verb = verb
        self._console = console or Console(stderr=True, highlight=False)
        self._began = self._printed = time.monotonic()

    def __call__(self, read: int, total: int, tokens: int) -> None:
        now = time.monotonic()
        rate = read / max(now - self._began, 1e-9)
        text = f"{read / 1e6:,.1f} of {total / 1e6:,.1f} MB, {tokens:,} tokens, {rate / 1e6:,.1f} MB/s"
        if self._console.is_terminal:
            width = max(0, min(BAR, self._console.width - len(text) - 2))
            done = width * read // max(total, 1)
            bar = f"[green]{'━' * done}[/][dim]{'━' * (width - done)}[/]"
            self._console.print(f"{bar} {text}", end="\r", overflow="crop", no_wrap=True)
        elif now - self._printed > PLAIN_LINE_EVERY_S:
            self._printed = now
            self._console.print(f"{self._verb}: {text}", soft_wrap=True)

    def close(self) -> None:
        """Leave the bar on the screen."""
        if self._console.is_terminal:
            self._console.print()
