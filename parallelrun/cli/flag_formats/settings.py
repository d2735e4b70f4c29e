"""Shared by all tables: a setting with its place, the collected result, and what converts a written value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from parallelrun.base.errors import Problem
from parallelrun.config.keys import GROUPS


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


class NoCounterpart(Exception):
    """A value that parallelrun has nothing for; its text says why."""


class Unused(NoCounterpart):
    """A value that the other settings make meaningless; a default of this kind is not listed."""


class LeftOpen(Exception):
    """A setting that does not decide its key; its text says why."""


class Needed(Exception):
    """A setting that needs an option from the user. Arguments: the cause, the fix, a command that helps."""


@dataclass
class Translation:
    """The recipe's values by dotted key, and what became of every setting.

    groups: options of groups (`model: llama3_8b`). origin: the setting that each value comes from. given: keys that the
    user has set beside the file. needed: what to say of a group if the user has not chosen its option. left_open:
    (a key, the setting that does not decide it, why).
    """

    values: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, str] = field(default_factory=dict)
    origin: dict[str, Setting] = field(default_factory=dict)
    translated: list[tuple[Setting, str]] = field(default_factory=list)
    dropped: list[tuple[Setting, str]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    given: set[str] = field(default_factory=set)
    needed: dict[str, Problem] = field(default_factory=dict)
    left_open: list[tuple[str, Setting, str]] = field(default_factory=list)

    def put(self, key: str, value: Any, setting: Setting) -> None:
        """Set a key of the recipe or choose the option of a group, because of a setting."""
        if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 and isinstance(setting.value, int):
            value = int(value)
        if key == "tracker.use":
            value = [*self.values.get(key, []), value]
        (self.groups if key in GROUPS else self.values)[key] = value
        self.origin[key] = setting
        self.translated.append((setting, f"{key}={value}"))

    def drop(self, setting: Setting, why: str) -> None:
        """List a setting without a counterpart."""
        self.dropped.append((setting, why))

    def fault(self, setting: Setting, why: str) -> None:
        """List a setting that is wrong in itself."""
        self.problems.append(Problem(f"{setting.text}: {why}", setting.where or setting.name))


def whole(value: Any) -> int:
    """A whole number; `1_000` and `1e3` are too."""
    try:
        as_float = number(value)
    except ValueError:
        as_float = 0.5
    if not as_float.is_integer():
        raise ValueError("not a whole number")
    return int(as_float)


def number(value: Any) -> float:
    """A number, as it is written."""
    if isinstance(value, bool):
        raise ValueError("not a number")
    try:
        return float(str(value).replace("_", ""))
    except ValueError:
        raise ValueError("not a number") from None


def text(value: Any) -> str:
    if isinstance(value, (list, dict, bool)):
        raise ValueError("not one text")
    return str(value)


def flag(value: Any) -> bool:
    """A switch, also one written as a word."""
    if isinstance(value, bool):
        return value
    state = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}.get(str(value).lower())
    if state is None:
        raise ValueError("not true or false")
    return state


def anything(value: Any) -> bool:
    """Only that there is a value, which may also be set outside the file."""
    return True


def one_path(value: Any) -> str:
    if isinstance(value, list):
        raise NoCounterpart("a mixture of several files")
    if "$" in str(value):
        raise NoCounterpart("it is set outside the file")
    return text(value)


def switch(on: Any, off: Any = None) -> Callable[[Any], Any]:
    """What follows from a switch that is on or off."""
    return lambda value: on if flag(value) else off


def choice(options: Mapping[str, Any]) -> Callable[[Any], Any]:
    """One of several words, in either case."""

    def convert(value: Any) -> Any:
        lowered = {name.lower(): option for name, option in options.items()}
        if str(value).lower() not in lowered:
            raise NoCounterpart(f"only {', '.join(options)} can be translated")
        return lowered[str(value).lower()]

    return convert


def only(wanted: Any, why: str) -> Callable[[Any], Any]:
    """A value that changes nothing if it is `wanted`, and has no counterpart otherwise."""

    def convert(value: Any) -> Any:
        if str(value).lower() != str(wanted).lower() and not _same_number(value, wanted):
            raise NoCounterpart(why)
        return value

    return convert


def _same_number(value: Any, wanted: Any) -> bool:
    try:
        return float(value) == float(wanted)
    except (TypeError, ValueError):
        return False
