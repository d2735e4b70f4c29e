"""A plain shell script, as far as one command needs it: variables, arrays, quotes, continuations, whole-number sums.

Nothing is run. A variable that a branch, a loop, a command or an argument sets stays as it is written (`$NAME`).
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_EXPANSION = re.compile(
    r"\$\(\((?P<sum>[^()]*(?:\([^()]*\)[^()]*)*)\)\)|\$\{(?P<braced>[^}]*)\}|\$(?P<plain>[A-Za-z_]\w*)"
)
_BRACED = re.compile(r"(?P<name>[A-Za-z_]\w*)(?:\[[@*]\])?(?::?-(?P<default>.*))?$", re.DOTALL)
_OPENS, _CLOSES = {"if", "for", "while", "until", "case"}, {"fi", "done", "esac"}
_DOLLAR = "\0"  # in single quotes
_SUMS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv}


@dataclass(frozen=True)
class ShellWord:
    """A word and its line. quoted: it is not split where spaces are in it. opens: the array that begins with it."""

    text: str
    line: int
    quoted: bool = False


def commands(script: str) -> list[list[ShellWord]]:
    """Every command of a script that is no assignment, with variables in the place of their names."""
    variables: dict[str, list[ShellWord]] = {}
    found, depth = [], 0
    for statement in _statements(script):
        first = statement[0].text
        depth = max(0, depth + (first in _OPENS) - (first in _CLOSES))
        words = (
            statement[1:] if first in ("export", "readonly", "local", "declare", "then", "do", "else") else statement
        )
        while words and (match := _ASSIGNMENT.match(words[0].text)):
            name, plus, value = match.groups()
            if value == "(":
                end = next(
                    (index for index, word in enumerate(words) if word.text == ")" and not word.quoted), len(words)
                )
                assigned, words = words[1:end], words[end + 1 :]
            else:
                assigned, words = [replace(words[0], text=value)], words[1:]
            values = [one for word in assigned for one in _expanded(word, variables)]
            if depth:
                if not plus:
                    variables.pop(name, None)
            else:
                variables[name] = [*(variables.get(name, []) if plus else []), *values]
        if words:
            found.append([one for word in words for one in _expanded(word, variables)])
    return [[replace(word, text=word.text.replace(_DOLLAR, "$")) for word in command] for command in found if command]


def _expanded(word: ShellWord, variables: Mapping[str, list[ShellWord]]) -> list[ShellWord]:
    whole = _EXPANSION.fullmatch(word.text)
    name = _name(whole) if whole else ""
    if name in variables and (not word.quoted or "[" in word.text):
        return [part for value in variables[name] for part in ([value] if "[" in word.text and value.quoted
                                                               else _split(value))]  # fmt: skip
    expanded = replace(word, text=_EXPANSION.sub(lambda match: _value(match, variables), word.text))
    return [expanded] if word.quoted or expanded.text == word.text else _split(expanded)


def _name(match: re.Match[str]) -> str:
    braced = _BRACED.match(match["braced"]) if match["braced"] else None
    return match["plain"] or (braced["name"] if braced else "")


def _value(match: re.Match[str], variables: Mapping[str, list[ShellWord]]) -> str:
    if match["sum"] is not None:
        return _sum(match["sum"], variables) or match[0]
    name = _name(match)
    if name in variables:
        return " ".join(word.text for word in variables[name])
    braced = _BRACED.match(match["braced"]) if match["braced"] else None
    if braced and braced["default"] is not None:
        return _EXPANSION.sub(lambda inner: _value(inner, variables), braced["default"])
    return match[0]


def _sum(expression: str, variables: Mapping[str, list[ShellWord]]) -> str:
    """The value of a sum or product of whole numbers; empty if it is more than that."""
    plain = _EXPANSION.sub(lambda match: _value(match, variables), expression)
    plain = re.sub(r"[A-Za-z_]\w*", lambda match: " ".join(w.text for w in variables.get(match[0], [])) or "?", plain)
    try:
        return str(_computed(ast.parse(plain.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return ""


def _computed(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _SUMS:
        return int(_SUMS[type(node.op)](_computed(node.left), _computed(node.right)))
    raise ValueError("not a sum of whole numbers")


def _split(word: ShellWord) -> list[ShellWord]:
    """The words of a text, each with its own line."""
    return [
        ShellWord(match[0], word.line + word.text[: match.start()].count("\n"))
        for match in re.finditer(r"\S+", word.text)
    ]


def _statements(script: str) -> Iterator[list[ShellWord]]:
    """The words of each statement. An array is `NAME=(`, its words and `)`."""
    statement: list[ShellWord] = []
    in_array = False
    for text, line, quoted in _tokens(script):
        if text == "\n" and not quoted:
            if statement and not in_array:
                yield statement
                statement = []
            continue
        in_array = (in_array or text.endswith("=(")) and not (text == ")" and not quoted)
        statement.append(ShellWord(text, line, quoted))
    if statement:
        yield statement


def _tokens(script: str) -> Iterator[tuple[str, int, bool]]:
    """(word, line, whether it has quotes); `\\n` ends a statement."""
    index, line, size = 0, 1, len(script)
    while index < size:
        char = script[index]
        if char == "#":
            index = script.find("\n", index) if "\n" in script[index:] else size
        elif script.startswith("\\\n", index):
            index, line = index + 2, line + 1
        elif char in "\n;&|":
            yield "\n", line, False
            index, line = index + 1, line + (char == "\n")
        elif char.isspace():
            index += 1
        elif char == ")":
            yield ")", line, False
            index += 1
        else:
            text, quoted, end = _word(script, index)
            yield text, line, quoted
            line += script.count("\n", index, end)
            index = end


def _word(script: str, index: int) -> tuple[str, bool, int]:
    """(the word at `index`, whether it has quotes, where it ends)."""
    text, quoted, size = "", False, len(script)
    while index < size:
        char = script[index]
        if char == "'":
            end = script.find("'", index + 1) % (size + 1)
            text, quoted, index = text + script[index + 1 : end].replace("$", _DOLLAR), True, end + 1
        elif char == '"':
            end = index + 1
            while end < size and script[end] != '"':
                end += 2 if script[end] == "\\" else 1
            inside = script[index + 1 : end].replace("\\\n", " \n").replace('\\"', '"').replace("\\$", _DOLLAR)
            text, quoted, index = text + inside, True, end + 1
        elif script.startswith(("${", "$("), index):
            end = _closing(script, index + 1)
            text, index = text + script[index:end], end
        elif char == "(" and text.endswith("="):
            return f"{text}(", quoted, index + 1
        elif script.startswith("\\\n", index) or char.isspace() or char in ";&|)":
            break
        else:
            index += char == "\\"
            text, index = text + script[index : index + 1], index + 1
    return text, quoted, index


def _closing(script: str, index: int) -> int:
    """Behind the bracket that closes the one at `index`."""
    opening = script[index]
    depth, closing = 0, {"{": "}", "(": ")"}[opening]
    for end in range(index, len(script)):
        depth += (script[end] == opening) - (script[end] == closing)
        if depth == 0:
            return end + 1
    return len(script)
