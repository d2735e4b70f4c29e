"""The progress line of a run: redrawn in place on a terminal, elsewhere a plain line every few seconds."""

from __future__ import annotations

import sys
import time
from typing import Any

from parallelrun.report.screen import open_console

PLAIN_LINE_EVERY_S = 5.0
BAR = 20  # columns


class ProgressLine:
    """Shows step, losses, gradient norm and rate. Prints nothing unless it is enabled, which it is on rank 0 only."""

    def __init__(self, steps: int, enabled: bool):
        self._steps = steps
        self._enabled = enabled
        self._console = open_console(file=sys.stdout)
        self._last_plain = float("-inf")
        self._evaluated: dict[str, Any] = {}  # the last row with a val_loss

    def update(self, row: dict[str, Any]) -> None:
        """Show a row of metrics.jsonl."""
        if not self._enabled:
            return
        if "val_loss" in row:
            self._evaluated = row
        if self._console.is_terminal:
            line = self.line(row, self._console.width - 1)
            self._console.print(line, end="\r", overflow="crop", no_wrap=True)
        elif "val_loss" in row or time.monotonic() - self._last_plain > PLAIN_LINE_EVERY_S:
            self._last_plain = time.monotonic()
            self._console.print("  ".join(text for text, _ in self._parts(row, row)), soft_wrap=True)

    def line(self, row: dict[str, Any], width: int) -> str:
        """Return a bar with text beside it, in rich's markup, at most `width` columns wide.

        Parts of the text are left out, the least important one first, until both fit.
        """
        parts = self._parts(row, self._evaluated or row)
        while True:
            text = "  ".join(part for part, _ in parts)
            bar = min(BAR, width - len(text) - 1)
            if bar >= BAR // 2 or len(parts) == 2:
                break
            parts.remove(max(parts, key=lambda part: part[1]))
        done = int(max(bar, 0) * row["step"] / self._steps)
        return f"[green]{'━' * done}[/][dim]{'━' * (bar - done)}[/] {text}"

    def _parts(self, row: dict[str, Any], evaluated: dict[str, Any]) -> list[tuple[str, int]]:
        """Return the parts of the text in order, each with its priority; 0 is the most important.

        evaluated: the row of the last evaluation, whose step is given if it is an earlier one.
        """
        unit = "samples" if row.get("tokens") == row.get("samples", -1) else "tokens"
        age = f" (step {evaluated['step']})" if evaluated.get("step", row["step"]) != row["step"] else ""
        parts = [
            (f"step {row['step']:>{len(str(self._steps))}}/{self._steps}", 0),
            (_number(row, "loss", ".4f"), 1),
            (_number(evaluated, "val_loss", ".4f", age), 4 if age else 2),
            (_number(evaluated, "val_top1", ".1%", age), 5),
            (_number(row, "max_vio", ".2f"), 5),
            (_number(row, "staleness", "d"), 5),
            (_number(row, "grad_norm", ".3f"), 6),
            (_number(row, "lr", ".2e"), 7),
            (f"{row['tokens_per_s']:,.0f} {unit}/s", 3),
        ]
        return [part for part in parts if part[0]]

    def close(self) -> None:
        """Leave the last line on the screen."""
        if self._enabled and self._console.is_terminal:
            self._console.print()


def _number(row: dict[str, Any], name: str, form: str, suffix: str = "") -> str:
    """Return a named number of the row, or "" if the row has none."""
    return f"{name} {row[name]:{form}}{suffix}" if row.get(name) is not None else ""
