"""Commands on screen: they can be copied."""

from __future__ import annotations

import io
import shlex

import pytest
from rich.console import Console

from parallelrun.report.screen import print_command

COMMAND = shlex.join(
    ["parallelrun", "model=gpt", "strategy.data.kind=fsdp", "model.roles={a b: 'c  d'}", *["tp=2"] * 40]
)


@pytest.mark.parametrize("width", [20, 40, 80, 4000])
@pytest.mark.parametrize("terminal", [False, True])
def test_a_copied_command_is_the_command(width: int, terminal: bool) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, no_color=True, color_system=None)
    print_command(COMMAND, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    lines = text.splitlines()
    assert shlex.split(text.replace("\\\n", "")) == shlex.split(COMMAND)
    assert all(line.endswith(" \\") for line in lines[:-1]) and (len(lines) > 1) == (terminal and width < 4000)
    longest = max(len(shlex.quote(word)) for word in shlex.split(COMMAND))
    assert not terminal or all(len(line) <= max(width, longest + len("   \\")) for line in lines)
