"""Refuse values that YAML or Hydra would read as something else, such as `tp=010` (read as 8)."""

from __future__ import annotations

import re
from contextlib import suppress
from functools import reduce
from math import ceil, floor
from operator import attrgetter
from typing import Any

from parallelrun.base.errors import Problem
from parallelrun.config.keys import Key, example, known_keys

_INTEGER = re.compile(r"[+-]?(0|[1-9][0-9]*)$")
_LARGEST = 2**63 - 1
_LONGEST = 40  # characters of a number, and of a value in a message
_ITEMS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,)}
_KINDS: dict[str, Any] = {"list": (list, tuple), "dict": dict}
_NAMES = {"int": "whole numbers", "float": "numbers", "str": "texts"}
BOOLEANS = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False}


def trap(key: Key, text: str, where: str) -> Problem | None:
    """The problem with `text` (as typed, without quotes) as a value of `key`, or None. where: for the message."""
    if text.lower() in ("null", "~"):
        fix = "" if key.kind == "list" else example(key)  # `tracker.use` has a short name
        return None if key.optional else Problem(f"{key.name} cannot be null", where, fix)
    if key.kind not in ("int", "float", "bool"):
        return None
    if text.lower() in ("none", "auto", "") and key.optional:
        cause = f"{key.name}={text}: to leave {key.name} open, write null or nothing at all"
        return Problem(cause, where, f"{key.name}=null")
    return _boolean(key, text, where) if key.kind == "bool" else _number(key, text, where)


def of_interpolations(config: object) -> list[Problem]:
    """The problems with lists and mappings that `${...}` has replaced by something else, which OmegaConf lets pass."""
    problems = []
    for key in known_keys().values():
        kinds = _KINDS.get(key.kind)
        value: Any = attrgetter(key.name)(config) if kinds else None
        if kinds is None or value is None:
            continue
        if not isinstance(value, kinds):
            problems.append(Problem(f"{_takes(key)}, and the value is {_shown(value)}", key.name, example(key)))
        elif wrong := [item for item in value if not isinstance(item, _ITEMS.get(key.item, (object,)))]:
            cause = f"{_takes(key)} of {_NAMES[key.item]}, and {_shown(wrong[0])} is none"
            problems.append(Problem(cause, key.name, example(key)))
    return problems


def _takes(key: Key) -> str:
    return f"{key.name} takes a {'list' if key.kind == 'list' else 'mapping'}"


def _shown(value: object) -> str:
    """A value of a message's middle; a configuration group is long."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def string_trap(key: Key, text: str, where: str) -> Problem | None:
    """The problem with an unquoted text in a recipe that YAML reads as a number or boolean: `name: 010` becomes "8"."""
    parsed: object = _ambiguous_number(text)
    if parsed is None and text.lower() in BOOLEANS:
        parsed = BOOLEANS[text.lower()]
    elif parsed is None and not _INTEGER.match(text):
        try:
            parsed = float(text)
        except ValueError:
            return None
    if parsed is None or str(parsed) == text:
        return None
    return Problem(f"{key.name}: parsed as {parsed} from {text}; quote it", where, f'{key.name}: "{text}"')


def _number(key: Key, text: str, where: str) -> Problem | None:
    shape, kind = f"{key.name}={text}", "a whole number" if key.kind == "int" else "a number"
    if key.kind == "int" and len(text) > _LONGEST:
        return Problem(f"{key.name}={text[:_LONGEST]}...: out of range, at most {_LARGEST}", where, example(key))
    if key.kind == "int" and _INTEGER.match(text):
        return (
            Problem(f"{shape}: out of range, at most {_LARGEST}", where, example(key))
            if abs(int(text)) > _LARGEST
            else None
        )
    parsed = _ambiguous_number(text)
    if parsed is not None:
        digits = text.lstrip("+-")
        decimal = [str(int(text))] if digits.isdigit() and int(text) != parsed else []  # 010 is 8 or 10
        fixes = [str(parsed), *decimal]
        cause = f"{shape}: parsed as {parsed} from {text}; write {' or '.join(fixes)}"
        return Problem(cause, where, f"{key.name}={fixes[0]}")
    if text.lower() in BOOLEANS:
        return Problem(f"{shape}: a boolean, but {key.name} is {kind}", where, example(key))
    try:
        number = float(text[1:] if text.lower() in (".inf", ".nan") else text)
    except ValueError:
        return Problem(f"{shape}: not {kind}", where, example(key))
    if key.kind == "float":
        return None
    if not abs(number) <= _LARGEST:
        return Problem(f"{shape}: out of range for a whole number", where, example(key))
    if number != int(number):
        around = [f"{key.name}={near}" for near in (floor(number), ceil(number)) if within(key, str(near))]
        return Problem(f"{shape}: must be a whole number", where, " or ".join(around) or example(key))
    return Problem(f"{shape}: must be a whole number; write {int(number)}", where, f"{key.name}={int(number)}")


def within(key: Key, text: str) -> bool:
    """Whether `text` is a number within the bounds of `key`."""
    try:
        number = float(text)
    except ValueError:
        return False
    low = (key.least is None or number >= key.least) and (key.above is None or number > key.above)
    return low and (key.most is None or number <= key.most) and (key.below is None or number < key.below)


def _boolean(key: Key, text: str, where: str) -> Problem | None:
    if text.lower() in BOOLEANS:
        return None
    read_as = f"parsed as true from {text}; " if re.match(r"[+-]?[0-9]+$", text) and int(text) != 0 else ""
    return Problem(f"{key.name}={text}: {read_as}write true or false", where, example(key))


def _ambiguous_number(text: str) -> int | None:
    """The number that YAML reads, if it is not the one that a person would read; else None."""
    digits = text.lstrip("+-")
    if len(text) > _LONGEST or _INTEGER.match(text) or not digits[:1].isdigit():
        return None
    sign = -1 if text.startswith("-") else 1
    if re.fullmatch(r"[0-9]+(:[0-5]?[0-9])+", digits):  # base 60
        return sign * reduce(lambda value, part: value * 60 + int(part), digits.split(":"), 0)
    for base in (0, 8, 10):  # 0 reads 0x1f and 1_000, 8 reads 010, and 10 reads 09
        with suppress(ValueError):
            return sign * int(digits, base)
    return None
