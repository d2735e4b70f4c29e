"""Draws docs/run.svg: the README's picture, from a real run in a pseudo-terminal.

python docs/picture.py            # runs the main job and draws its screen
"""

from __future__ import annotations

import os
import pty
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

COMMAND = ["parallelrun", "model=gpt", "strategy=ptdp", "tp=2", "pp=2"]
WIDTH = 92


def screen_of(command: list[str]) -> str:
    """Everything the command writes to a terminal WIDTH columns wide, ANSI colours included."""
    chunks: list[bytes] = []

    def read(descriptor: int) -> bytes:
        data = os.read(descriptor, 4096)
        chunks.append(data)
        return b" "  # keep this terminal quiet; an empty answer would mean end of file

    os.environ.update(COLUMNS=str(WIDTH), TERM="xterm-256color")
    status = pty.spawn(command, read)
    if status:
        sys.exit(f"{command} ended with {status}")
    return b"".join(chunks).decode()


def settled(screen: str) -> list[str]:
    """Lines as they stand at the end: of a line that was redrawn, the last drawing."""
    lines = [line.rstrip("\r") for line in screen.replace("\r\n", "\n").split("\n")]
    return [next((part for part in reversed(line.split("\r")) if part.strip()), "") for line in lines]


def main() -> None:
    console = Console(width=WIDTH, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(f"[bold]$ {' '.join(COMMAND)}[/]")
    for line in settled(screen_of(COMMAND)):
        console.print(Text.from_ansi(line), soft_wrap=True)
    target = Path(__file__).with_name("run.svg")
    console.save_svg(str(target), title="parallelrun")
    print(f"\nwritten to {target}")


if __name__ == "__main__":
    main()
