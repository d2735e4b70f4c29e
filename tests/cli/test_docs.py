"""Every command printed in README, the docs and the help texts is legal with its defaults (design, section 5)."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from parallelrun.cli import help as texts
from parallelrun.cli.main import main
from parallelrun.cli.words import TOOLS, VERBS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"(?:^|&& |-m )(parallelrun(?: [^#\n`]*)?)", re.MULTILINE)


def printed_commands() -> list[str]:
    """Lines of code blocks that start parallelrun, comments cut off, and the help's examples."""
    found = [
        line.strip().split("  ")[0] for line in texts.SHORT.splitlines() if line.strip().startswith("parallelrun ")
    ]
    found += [command for command, _ in texts.EXAMPLES]
    for page in PAGES:
        for block in re.findall(r"```[a-z]*\n(.*?)```", page.read_text(), re.DOTALL):
            found += [match.strip() for match in COMMAND.findall(block)]
    return sorted({command for command in found if command != "parallelrun"})


def as_plan(command: str) -> list[str]:
    """The command's arguments with its verb replaced by `plan`."""
    words = shlex.split(command)[1:]
    return ["plan", *(words[1:] if words and words[0] in VERBS else words)]


def is_planned(command: str) -> bool:
    words = shlex.split(command)[1:]
    return words[0] not in TOOLS and not words[0].startswith("--") and "..." not in command


@pytest.mark.parametrize("command", [c for c in printed_commands() if is_planned(c)])
def test_a_printed_command_is_legal(command: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(as_plan(command)) == 0, capsys.readouterr().err


@pytest.mark.parametrize("command", [c for c in printed_commands() if not is_planned(c) and "tokenize" not in c])
def test_a_printed_tool_command_works(command: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)[1:]) == 0, capsys.readouterr().err


def test_the_readme_prints_the_commands_that_newcomers_need() -> None:
    text = (ROOT / "README.md").read_text()
    for command in ("model=gpt strategy=ptdp tp=2 pp=2", "verify", "bench", "plan", "torchrun", "doctor"):
        assert command in text
