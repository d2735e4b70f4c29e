"""The commands of a plain launch script: assignments, arrays, quotes and continuations are read; nothing is run.

A variable that a branch, a loop, a command, arithmetic or an argument sets stays as it is written (`$NAME`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping

_QUOTED = r"""'[^']*'|"(?:\\.|[^"\\])*\""""
_ARRAY = rf"\((?:{_QUOTED}|[^)'\"])*\)"
_COMMENT = re.compile(rf"({_QUOTED})|(?:^|(?<=\s))#[^\n]*", re.MULTILINE | re.DOTALL)
_PIECE = re.compile(rf"={_ARRAY}|{_QUOTED}|\$\([^)]*\)+|(?P<end>[\n;&|])|[^\n;&|='\"$]+|.", re.DOTALL)
_ASSIGNMENT = re.compile(
    r"\s*(?:(?:export|readonly|local|declare|then|do|else)\s+)?([A-Za-z_]\w*)(\+?)="
    rf"(?:\((?P<array>(?:{_QUOTED}|[^)'\"])*)\)|\"(?P<quoted>(?:\\.|[^\"\\])*)\"(?!\S)|'(?P<literal>[^']*)'(?!\S)"
    rf"|(?P<plain>(?:{_QUOTED}|[^\s'\"])*))",
    re.DOTALL,
)
_VARIABLE = re.compile(
    r"('[^']*')|\"?\$\{(?P<array>\w+)\[[@*]\]\}\"?"
    r"|(?<!\\)\$(?:(?P<plain>[A-Za-z_]\w*)|\{(?P<braced>\w+)(?::?-(?P<default>[^}]*))?\})"
)
_OPENS, _CLOSES = {"if", "for", "while", "until", "case"}, {"fi", "done", "esac"}


def without_comments(script: str) -> str:
    """The script with its lines and without its comments."""
    return _COMMENT.sub(lambda match: match[1] or "", script)


def commands(script: str) -> Iterator[list[str]]:
    """The words of every command that is no assignment, with variables replaced by their values."""
    variables: dict[str, str] = {}
    depth = 0
    for statement in _statements(without_comments(script).replace("\\\n", " ")):
        first = statement.split()[0]
        depth = max(0, depth + (first in _OPENS) - (first in _CLOSES))
        while match := _ASSIGNMENT.match(statement):
            statement = statement[match.end() :]
            name, is_appended = match[1], bool(match[2])
            value = match["literal"]
            if value is None:
                raw = next(match[kind] for kind in ("array", "quoted", "plain") if match[kind] is not None)
                value = _expanded(raw, variables)
            if not depth:
                variables[name] = f"{variables.get(name, '')} {value}" if is_appended else value
            elif not is_appended:
                variables.pop(name, None)
        text = _expanded(statement, variables)
        try:
            words = shlex.split(text)
        except ValueError:  # a quote is open
            words = text.split()
        if words:
            yield words


def _statements(script: str) -> Iterator[str]:
    statement = ""
    for match in _PIECE.finditer(f"{script}\n"):
        if match["end"] is None:
            statement += match[0]
        else:
            if statement.strip():
                yield statement
            statement = ""


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """A text of the script with the values of variables in the place of their names."""

    def value(match: re.Match[str]) -> str:
        name, default = match["array"] or match["plain"] or match["braced"], match["default"]
        if name in variables:
            return variables[name]
        return match[0] if default is None else _expanded(default, variables)

    return _VARIABLE.sub(value, text)
