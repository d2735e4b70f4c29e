"""Shared by all formats: a setting with its place, the rules that translate it, and the collected result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from parallelrun.base.errors import Problem


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
            return self.name if value is True else f"{self.name} {value}"
        return f"{self.name} = {str(value).lower() if isinstance(value, bool) else value}"


class NoCounterpart(Exception):
    """A value that parallelrun has nothing for; its text says why."""


@dataclass(frozen=True)
class Counterpart:
    """The key for a setting. convert: raises ValueError for a malformed value, NoCounterpart for one we cannot do."""

    key: str
    convert: Callable[[Any], Any]


@dataclass(frozen=True)
class Same:
    """A setting that changes nothing if it has this value, and has no counterpart otherwise: why."""

    value: Any
    why: str


Rule = Counterpart | Same | str  # a text says why there is no counterpart
Table = Mapping[str, Rule]


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
        """Set a key of the recipe because of a setting."""
        if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 and isinstance(setting.value, int):
            value = int(value)
        self.values[key] = value
        self.origin[key] = setting
        self.translated.append((setting, f"{key}={value}"))

    def choose(self, group: str, option: str, setting: Setting) -> None:
        self.groups[group] = option
        self.origin[group] = setting
        self.translated.append((setting, f"{group}={option}"))

    def leave_open(self, key: str, setting: Setting, why: str) -> None:
        """List a setting that leaves a key of ours to be given beside the file; key: empty if we have none for it."""
        self.left_open.append((key, setting, why))

    def track(self, tracker: str, setting: Setting) -> None:
        """Track the run by one more tracker."""
        self.put("tracker.use", [*self.values.get("tracker.use", []), tracker], setting)

    def drop(self, setting: Setting, why: str) -> None:
        """List a setting without a counterpart."""
        self.dropped.append((setting, why))

    def fault(self, setting: Setting, why: str) -> None:
        """List a setting that is wrong in itself."""
        self.problems.append(Problem(f"{setting.text}: {why}", setting.where or setting.name))


class Settings:
    """The settings of a file by name, of which each is taken once: what is left at the end is unknown to us.

    keys: by setting, the key that its value `auto` leaves open; such a setting has no default either.
    """

    def __init__(
        self,
        settings: Iterable[Setting],
        defaults: Mapping[str, Any],
        found: Translation,
        keys: Mapping[str, str] | None = None,
    ):
        self._left = {setting.name: setting for setting in settings}
        self.names = frozenset(self._left)
        self._defaults, self.found = dict(defaults), found
        for name in [name for name, setting in self._left.items() if keys is not None and setting.value == "auto"]:
            self._defaults.pop(name, None)
            found.leave_open((keys or {}).get(name, ""), self._left.pop(name), "set by the Trainer")
        self.autos = self.names - self._left.keys()

    def take(
        self, name: str, convert: Callable[[Any], Any], may_be_unknown: bool = False
    ) -> tuple[Setting, Any] | None:
        """(a setting or the runner's default of it, its value); None if there is neither, or it is listed as wrong.

        may_be_unknown: a variable of the shell that the file does not set is no fault (paths).
        """
        setting = self._left.pop(name, None)
        if setting is None and name in self._defaults:
            setting = Setting(name, self._defaults[name])
        if setting is None or setting.value is None:
            return None
        if "$" in str(setting.value):
            if may_be_unknown:
                self.found.drop(setting, "it is set outside the file")
            else:
                self.found.fault(setting, "the file does not say what this variable is")
            return None
        try:
            return setting, convert(setting.value)
        except NoCounterpart as error:
            self.found.drop(setting, str(error))
        except (ValueError, TypeError) as error:
            self.found.fault(setting, str(error) or "not a value of this setting")
        return None

    def pop(self, name: str) -> Setting | None:
        """A setting that was given, whatever its value."""
        return self._left.pop(name, None)

    def move(self, name: str, convert: Callable[[Any], Any], key: str) -> Any:
        """Translate a setting to a key, and return its value; None as for `take`."""
        taken = self.take(name, convert)
        if taken:
            self.found.put(key, taken[1], taken[0])
        return taken[1] if taken else None

    def track(self, name: str, tracker: str) -> None:
        """Track the run if the setting says so."""
        if (taken := self.take(name, flag)) and taken[1]:
            self.found.track(tracker, taken[0])

    def value(self, name: str, convert: Callable[[Any], Any]) -> Any:
        """The value alone, of a setting that is translated together with others; None as for `take`."""
        taken = self.take(name, convert)
        return taken[1] if taken else None

    def translate(self, table: Table) -> None:
        """Translate what is left by the table: rules first, then defaults, then what the table does not know."""
        for name, rule in table.items():
            if isinstance(rule, Counterpart):
                if taken := self.take(name, rule.convert):
                    self.found.put(rule.key, taken[1], taken[0])
            elif isinstance(rule, Same):
                self.take(name, only(rule.value, rule.why))
            elif name in self._left:
                self.found.drop(self._left.pop(name), rule)
        for setting in self._left.values():
            if setting.value is not None:
                outside = setting.name.startswith("$")
                self.found.drop(setting, "it is set outside the file" if outside else "not known here")


def whole(value: Any) -> int:
    """A whole number; `1_000` and `1e3` are too."""
    try:
        found = number(value)
    except ValueError:
        found = 0.5
    if not found.is_integer():
        raise ValueError("not a whole number")
    return int(found)


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
    found = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}.get(str(value).lower())
    if found is None:
        raise ValueError("not true or false")
    return found


def choice(options: Mapping[str, Any]) -> Callable[[Any], Any]:
    """One of several words, in either case."""

    def convert(value: Any) -> Any:
        lowered = {name.lower(): found for name, found in options.items()}
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
