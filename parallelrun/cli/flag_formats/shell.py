"""The commands of a plain launch script: assignments, arrays, quotes and continuations are read; nothing is run.

A variable that a branch, a loop, a command, arithmetic or an argument sets stays as it is written (`$NAME`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping

_MARKS = "\n;&|()"  # between commands, and around arrays
_COMMENT = re.compile(r"""('[^']*'|"(?:\\.|[^"\\])*")|(?:^|(?<=\s))#[^\n]*""", re.MULTILINE | re.DOTALL)
_COMPUTED = re.compile(r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|`[^`]*`")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(?P<plain>\w+)|\{(?P<braced>\w+)(?:\[[@*]\])?(?::?-(?P<default>[^}]*))?\})")
_OPENS, _CLOSES = {"if", "for", "while", "until", "case"}, {"fi", "done", "esac"}
_BEFORE_COMMANDS = {"export", "readonly", "local", "declare", "then", "do", "else"}


def commands(script: str) -> Iterator[list[str]]:
    """The words of every command that is no assignment, with variables replaced by their values.

    Raises ValueError if a quote is not closed.
    """
    script = _COMMENT.sub(lambda match: match[1] or "", script).replace("\\\n", " ")
    lexer = shlex.shlex(_COMPUTED.sub("$COMPUTED", script) + "\n", posix=True, punctuation_chars=_MARKS)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    variables: dict[str, str] = {}
    command: list[str] = []
    assigned, opened = "", ""  # the variable of the assignment before this token, and that of an open parenthesis
    depth = 0  # of branches and loops
    for token in lexer:
        is_mark = set(token) <= set(_MARKS)
        if opened:
            if not is_mark:
                _assign(variables, opened, True, _expanded(token, variables), depth)
            opened = "" if is_mark and ")" in token else opened
            continue
        opened, assigned = assigned if token[0] == "(" and ")" not in token else "", ""
        if is_mark:
            if command:
                yield command
            command = []
        elif not command and (match := _ASSIGNMENT.fullmatch(token)):
            assigned = match[1]
            _assign(variables, assigned, bool(match[2]), _expanded(match[3], variables), depth)
        elif command or token not in _BEFORE_COMMANDS:
            depth = max(0, depth + (not command and token in _OPENS) - (not command and token in _CLOSES))
            command += _expanded(token, variables).split() if "$" in token else [token]


def _assign(variables: dict[str, str], name: str, appends: bool, value: str, depth: int) -> None:
    """Set a variable. One that a branch or loop sets is not known, but keeps what is appended to it elsewhere."""
    if not depth:
        variables[name] = f"{variables.get(name, '')} {value}" if appends else value
    elif not appends:
        variables.pop(name, None)


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """A text of the script with the values of variables in the place of their names."""

    def value(match: re.Match[str]) -> str:
        name, default = match["plain"] or match["braced"], match["default"]
        if name in variables:
            return variables[name]
        return match[0] if default is None else _expanded(default, variables)

    return _VARIABLE.sub(value, text)
