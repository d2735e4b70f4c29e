"""Checks of foreign JSON: strict parsing, and each kind of value, told where it is wrong. All raise ValueError."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

Check = Callable[[Any, str], Any]
_MAX_NAME = 1000
_LARGEST = 2**53  # of any number: exact in every JSON reader


def parse(raw: bytes) -> Any:
    """Strict JSON: no NaN, no key twice, no nesting that exhausts the stack. Raises ValueError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            raise ValueError("a key stands twice in one object")
        return fields

    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is no number")

    try:
        return json.loads(raw, object_pairs_hook=unique, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def as_object(value: Any, where: str) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {value!r:.100}, not an object")
    return value


def same_keys(fields: dict[str, Any], wanted: Iterable[str], where: str) -> None:
    """All of the wanted keys, and no other."""
    if fields.keys() != set(wanted):
        missing, unknown = sorted(set(wanted) - fields.keys()), sorted(fields.keys() - set(wanted))
        what = f"has no {missing[0]}" if missing else f"has an unknown field {unknown[0]!r:.200}"
        raise ValueError(f"{where} {what}")


def integer(value: Any, where: str) -> int:
    """An integer, and no boolean."""
    if type(value) is not int:
        raise ValueError(f"{where} is {value!r:.100}, not an integer")
    return value


def count(value: Any, where: str) -> int:
    """An integer from 0."""
    if not 0 <= integer(value, where) <= _LARGEST:
        raise ValueError(f"{where} is {value!r:.100}, not between 0 and {_LARGEST}")
    return value


def positive(value: Any, where: str) -> int:
    """An integer from 1."""
    if count(value, where) == 0:
        raise ValueError(f"{where} is 0")
    return value


def printable_name(value: Any, where: str) -> str:
    """A text of one line that a terminal shows as it is."""
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_NAME or not value.isprintable():
        raise ValueError(f"{where} is {value!r:.100}, not a printable name")
    return value


def word(value: Any, where: str) -> str | int | None:
    """A name, a count, or nothing."""
    return value if value is None else printable_name(value, where) if isinstance(value, str) else count(value, where)


def optional(check: Check) -> Check:
    """A check that null passes, too."""
    return lambda value, where: None if value is None else check(value, where)


def list_of(check: Check, length: int | None = None, at_most: int | None = None) -> Check:
    """A check of a list, entry by entry."""

    def checked(value: Any, where: str) -> list[Any]:
        if not isinstance(value, list):
            raise ValueError(f"{where} is {value!r:.100}, not a list")
        if (length is not None and len(value) != length) or (at_most is not None and len(value) > at_most):
            raise ValueError(f"{where} has {len(value)} entries")
        return [check(item, where) for item in value]

    return checked
