"""What YAML or Hydra would silently make of a value: traps such as `tp=010` (read as 8). No Hydra, no torch."""

from __future__ import annotations

import re

from parallelrun.config.keys import Key
from parallelrun.errors import Problem

_INTEGER = re.compile(r"[+-]?(0|[1-9][0-9]*)$")
_LARGEST = 2**63 - 1
_LONGEST = 40  # characters of any number that can be meant
_BOOLEANS = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False}
_NULLS = {"null", "~"}


def trap(key: Key, text: str, where: str) -> Problem | None:
    """The problem with writing `text` (unquoted, as the user typed it) for `key`, or None. `where`: for the message."""
    if text.lower() in _NULLS:
        return None if key.optional else Problem(f"{key.name} cannot be null", where)
    check = {"int": _integer, "float": _float, "bool": _boolean}.get(key.kind)
    if check is None:
        return None
    if text.lower() in ("none", "auto", "") and key.optional:
        return Problem(
            f"{key.name}={text}: a value left open is written null, or not at all",
            where,
            f"{key.name}=null",
        )
    return check(key, text, where)


def string_trap(key: Key, text: str, where: str) -> Problem | None:
    """For a text key whose plain YAML scalar is read as a number or a truth value: `name: 010` would become "8"."""
    ambiguous = _ambiguous_number(text)
    parsed: object = text
    if ambiguous is not None:
        parsed = ambiguous[0]
    elif text.lower() in _BOOLEANS:
        parsed = _BOOLEANS[text.lower()]
    elif not _INTEGER.match(text):
        try:
            parsed = float(text)
        except ValueError:
            return None
    if str(parsed) == text:
        return None
    return Problem(f"{key.name}: parsed as {parsed} from {text}; quote it", where, f'{key.name}: "{text}"')


def _integer(key: Key, text: str, where: str) -> Problem | None:
    if len(text) > _LONGEST:
        return Problem(f"{key.name}={text[:_LONGEST]}...: out of range, at most {_LARGEST}", where)
    if _INTEGER.match(text):
        if abs(int(text)) <= _LARGEST:
            return None
        return Problem(f"{key.name}={text}: out of range, at most {_LARGEST}", where)
    shape = f"{key.name}={text}"
    ambiguous = _ambiguous_number(text)
    if ambiguous is not None:
        parsed, choices = ambiguous
        return Problem(
            f"{shape}: parsed as {parsed} from {text}; write {' or '.join(choices)}", where, f"{key.name}={choices[0]}"
        )
    if text.lower() in _BOOLEANS:
        return Problem(f"{shape}: a truth value, but {key.name} is a whole number", where)
    try:
        number = float(text)
    except ValueError:
        return Problem(f"{shape}: not a whole number", where)
    if number != number or abs(number) > _LARGEST:
        return Problem(f"{shape}: out of range for a whole number", where)
    whole = str(int(number))
    if number == int(number):
        return Problem(f"{shape}: must be a whole number; write {whole}", where, f"{key.name}={whole}")
    return Problem(f"{shape}: must be a whole number", where)


def _float(key: Key, text: str, where: str) -> Problem | None:
    shape = f"{key.name}={text}"
    ambiguous = _ambiguous_number(text)
    if ambiguous is not None:
        parsed, choices = ambiguous
        return Problem(
            f"{shape}: parsed as {parsed} from {text}; write {' or '.join(choices)}", where, f"{key.name}={choices[0]}"
        )
    if text.lower() in _BOOLEANS:
        return Problem(f"{shape}: a truth value, but {key.name} is a number", where)
    try:
        float(text[1:] if text.startswith(".") and text[1:].lower() in ("inf", "nan") else text)
    except ValueError:
        return Problem(f"{shape}: not a number", where)
    return None


def _boolean(key: Key, text: str, where: str) -> Problem | None:
    if text.lower() in _BOOLEANS:
        return None
    read_as = f"parsed as true from {text}; " if re.match(r"[+-]?[0-9]+$", text) and int(text) != 0 else ""
    return Problem(f"{key.name}={text}: {read_as}write true or false", where)


def _ambiguous(key: Key, text: str, where: str) -> Problem | None:
    found = _ambiguous_number(text)
    if found is None:
        return None
    parsed, choices = found
    what = f"{key.name}={text}: parsed as {parsed} from {text}; write {' or '.join(choices)}"
    return Problem(what, where, " or ".join(f"{key.name}={choice}" for choice in choices))


def _ambiguous_number(text: str) -> tuple[int, list[str]] | None:
    """(what YAML reads, what to write instead) of a number that does not mean what it looks like, else None."""
    if len(text) > _LONGEST:
        return None
    sign = -1 if text.startswith("-") else 1
    digits = text.lstrip("+-")
    if re.match(r"0[0-7]+$", digits):
        octal, decimal = sign * int(digits, 8), sign * int(digits)
        return octal, list(dict.fromkeys([str(octal), str(decimal)]))
    if re.match(r"0[0-9]+$", digits):
        return sign * int(digits), [str(sign * int(digits))]
    if re.match(r"0[xX][0-9a-fA-F]+$|0[bB][01]+$|0[oO][0-7]+$", digits):
        return sign * int(digits, 0), [str(sign * int(digits, 0))]
    if re.match(r"[0-9]+(:[0-5]?[0-9])+$", digits):
        value = 0
        for part in digits.split(":"):
            value = value * 60 + int(part)
        return sign * value, [str(sign * value)]
    if re.match(r"[0-9][0-9_]*_[0-9_]*$", digits):
        value = int(digits.replace("_", ""))
        return sign * value, [str(sign * value)]
    return None
