"""The progress line of a run: redrawn on a terminal, now and then a plain line elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console

PLAIN_LINE_EVERY_S = 5.0


class Progress:
    """Shows step, loss, gradient norm and rate; silent when not enabled (all ranks but rank 0)."""

    def __init__(self, steps: int, enabled: bool):
        self._steps = steps
        self._enabled = enabled
        self._console = Console(file=sys.stdout, highlight=False)
        self._last_plain = float("-inf")
        self._val_loss: float | None = None
        self._val_top1: float | None = None

    def update(self, row: dict[str, Any]) -> None:
        """Show the row of metrics.jsonl just written."""
        if not self._enabled:
            return
        if "val_loss" in row:
            self._val_loss, self._val_top1 = row["val_loss"], row.get("val_top1")
        unit = "samples" if row.get("tokens") == row.get("samples", -1) else "tokens"
        text = (
            f"step {row['step']:>{len(str(self._steps))}}/{self._steps}  loss {row['loss']:.4f}"
            + (f"  val_loss {self._val_loss:.4f}" if self._val_loss is not None else "")
            + (f"  val_top1 {self._val_top1:.1%}" if self._val_top1 is not None else "")
            + (f"  max_vio {row['max_vio']:.2f}" if "max_vio" in row else "")
            + f"  grad_norm {row['grad_norm']:.3f}  lr {row['lr']:.2e}  {row['tokens_per_s']:,.0f} {unit}/s"
        )
        if self._console.is_terminal:
            done = int(20 * row["step"] / self._steps)
            self._console.print(
                f"[green]{'━' * done}[/][dim]{'━' * (20 - done)}[/] {text}", end="\r", overflow="crop", no_wrap=True
            )
        elif "val_loss" in row or time.monotonic() - self._last_plain > PLAIN_LINE_EVERY_S:
            self._last_plain = time.monotonic()
            self._console.print(text, soft_wrap=True)

    def close(self) -> None:
        """Leave the last line on the screen."""
        if self._enabled and self._console.is_terminal:
            self._console.print()
