"""A setting of another runner, and the functions that read a written value. A table names each of them (`read`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Setting:
    """One setting of the other runner. where: `file:line`; empty for a default of that runner."""

    name: str
    value: Any
    where: str = ""

    @property
    def text(self) -> str:
        """As it is written, for messages."""
        value = " ".join(map(str, self.value)) if isinstance(self.value, list) else self.value
        if self.name.startswith(("-", "$")):
            return self.name if value is True else f"{self.name} {'not given' if value is False else value}"
        return f"{self.name} = {str(value).lower() if isinstance(value, bool) else value}"

    @property
    def place(self) -> str:
        """The file's name and the line in parentheses; empty without a line."""
        return f" ({self.where.rpartition('/')[2]})" if ":" in self.where else ""


class NoCounterpart(Exception):
    """A value that parallelrun has nothing for; its text says why."""


class LeftOpen(Exception):
    """A setting that does not decide its key; its text says why."""


def number(value: Any) -> float:
    """A number; `1_000` is one, too."""
    try:
        return float("" if isinstance(value, bool) else str(value).replace("_", ""))
    except ValueError:
        raise ValueError("not a number") from None


def whole(value: Any) -> int:
    """A whole number; `1e3` is one, too."""
    try:
        count = number(value)
    except ValueError:
        count = 0.5
    if not count.is_integer():
        raise ValueError("not a whole number")
    return int(count)


def power_of_two(value: Any) -> float:
    return 2.0 ** whole(value)


def pair(value: Any) -> list[float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("not two numbers")
    return [number(part) for part in value]


def text(value: Any) -> str:
    if isinstance(value, (list, dict, bool)):
        raise ValueError("not one text")
    return str(value)


def anything(value: Any) -> Any:
    """The value as it is, which may also be set outside the file."""
    return value


def one_path(value: Any) -> str:
    if isinstance(value, list):
        raise NoCounterpart("a mixture of several files")
    if "$" in str(value):
        raise NoCounterpart("it is set outside the file")
    return text(value)


def flag(value: Any) -> bool:
    """A switch, which may be written as a word."""
    states = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if str(value).lower() not in states:
        raise ValueError("not true or false")
    return states[str(value).lower()]


def choice(options: Mapping[Any, Any]) -> Callable[[Any], Any]:
    """The reader of one of several words, in either case; or of a switch, if `options` are {on: ..., off: ...}."""
    if True in options:
        return lambda value: options.get(flag(value))
    lowered = {name.lower(): option for name, option in options.items()}

    def read(value: Any) -> Any:
        if str(value).lower() not in lowered:
            raise NoCounterpart(f"only {', '.join(options)} can be translated")
        return lowered[str(value).lower()]

    return read


def dense_layers(value: Any) -> int:
    """The number of layers before the first layer with experts; all later layers must have experts."""
    pattern = re.fullmatch(r"\(?(?:\[0\]\*(\d+)\+)?\[1\]\*\d+\)?", re.sub(r"[ '\"]", "", str(value)))
    if not pattern and str(value) != "1":
        raise NoCounterpart("after the first dense layers, all layers have experts")
    return int(pattern[1] or 0) if pattern else 0


def shares(value: Any) -> list[float]:
    """The shares of a dataset for training, validation and test."""
    parts = [number(part) for part in str(value).split(",")]
    if len(parts) != 3 or not 0 < parts[1] < sum(parts):
        raise NoCounterpart("a part for validation is needed")
    return [round(part / sum(parts), 9) for part in parts]
