"""The progress line of a run: redrawn on a terminal, now and then a plain line elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

from parallelrun.report.screen import open_console

PLAIN_LINE_EVERY_S = 5.0
BAR = 20  # columns


class ProgressLine:
    """Shows step, loss, gradient norm and rate; silent when not enabled (all ranks but rank 0)."""

    def __init__(self, steps: int, enabled: bool):
        self._steps = steps
        self._enabled = enabled
        self._console = open_console(file=sys.stdout)
        self._last_plain = float("-inf")
        self._evaluated: dict[str, Any] = {}  # the last row with a val_loss

    def update(self, row: dict[str, Any]) -> None:
        """Show the row of metrics.jsonl just written."""
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
        """The bar and the text beside it, in rich's markup: what matters least is left out until both fit."""
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
        """(text, how soon a narrow line leaves it out), in their order. An older evaluation is given with its step."""
        unit = "samples" if row.get("tokens") == row.get("samples", -1) else "tokens"
        age = f" (step {evaluated['step']})" if evaluated.get("step", row["step"]) != row["step"] else ""
        parts = [(f"step {row['step']:>{len(str(self._steps))}}/{self._steps}", 0), (f"loss {row['loss']:.4f}", 1)]
        parts += [
            (f"{name} {known[name]:{form}}{suffix}", unimportance)
            for known, name, form, suffix, unimportance in (
                (evaluated, "val_loss", ".4f", age, 4 if age else 2),
                (evaluated, "val_top1", ".1%", age, 5),
                (row, "max_vio", ".2f", "", 5),
                (row, "staleness", "d", "", 5),
            )
            if known.get(name) is not None
        ]
        return [
            *parts,
            (f"grad_norm {row['grad_norm']:.3f}", 6),
            (f"lr {row['lr']:.2e}", 7),
            (f"{row['tokens_per_s']:,.0f} {unit}/s", 3),
        ]

    def close(self) -> None:
        """Leave the last line on the screen."""
        if self._enabled and self._console.is_terminal:
            self._console.print()
