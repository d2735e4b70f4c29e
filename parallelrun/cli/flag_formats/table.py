"""The one reader of the four tables: `megatron.yaml`, `torchtitan.yaml`, `deepspeed.yaml`, `accelerate.yaml`.

A row is [setting of the other runner, our key or group (~: none), how to read it, options]. Rows of one setting share
the first one's reading: a function of `settings`, {on: ..., off: ...} for a switch, or a mapping of words. Options:
- when: the condition under which the row counts; needs: the same, and a setting that does not meet it is listed, with
  the reason (why)
- value: the key's value; call: the function of `settings` that computes it; times: names of settings and numbers by
  which the setting's own value is multiplied; by default the setting's own value
- drop, open, fault: there is no counterpart, the key stays open, or the setting is wrong, with the reason
- absent: why the key stays open if no setting decides it
A condition is terms `name`, `name=value`, `name!=value` or `name>number`, all of which hold; `!` before a term negates.
A name is a setting or one of our keys; a value may be the name of another setting.
Besides rows, a table has: defaults (condition -> the runner's own values, where ours differ), stand_ins (condition ->
options of groups that no setting decides), sections (prefix of names -> condition under which the runner reads them),
auto (who sets a value `auto`), spellings (other name -> name) and no_counterpart (reason -> names, separated by
spaces).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from parallelrun.base.errors import Problem
from parallelrun.cli.flag_formats import settings
from parallelrun.cli.flag_formats.settings import LeftOpen, NoCounterpart, Setting, anything, choice, one_path
from parallelrun.config.keys import GROUPS
from parallelrun.report.records.read import read_yaml

WORLD = ("world", "dp")
# What every run is described by: of each of these, one key is from the file, or listed as left open.
_DESCRIPTION = (WORLD, ("model",), ("dataset",), ("precision",), ("steps",), ("global_batch", "local_batch"),
                ("optimizer.lr",), ("optimizer.schedule",))  # fmt: skip
_EXCLUSIVE = (*_DESCRIPTION, ("micro_batch", "microbatches"))
_TERM = re.compile(r"(!?)([^\s=<>!]+)(?:(!?=|>)(\S+))?")


@cache
def table_of(name: str) -> Mapping[str, Any]:
    """The table of a format."""
    return read_yaml(Path(__file__).with_name(f"{name}.yaml"))


class Translation:
    """The recipe for the settings of a format, and what became of every setting.

    values: the recipe's values by dotted key; groups: options of groups (`model: llama3_8b`); origin: the setting that
    each of them comes from; dropped: (a setting without counterpart, why); left_open: (a key, the setting that does not
    decide it, why); problems: of settings that are wrong. knows_any: whether the runner has any of the settings.
    """

    def __init__(self, name: str, written: Sequence[Setting], overrides: Mapping[str, Any] | None = None):
        self._table = table_of(name)
        self.runner = str(self._table["runner"])
        self.values: dict[str, Any] = {}
        self.groups: dict[str, str] = {}
        self.origin: dict[str, Setting] = {}
        self.dropped: list[tuple[Setting, str]] = []
        self.left_open: list[tuple[str, Setting, str]] = []
        self.problems: list[Problem] = []
        for key, value in (overrides or {}).items():
            self._put(key, value, Setting(key, value, "command line"))
        typed = frozenset(overrides or ())  # these win over the file
        self._decided = typed.union(*(keys for keys in _EXCLUSIVE if typed & set(keys)))
        self._rows = [(*row[:3], row[3] if len(row) > 3 else {}) for row in self._table["rows"]]
        self._readers: dict[str, Any] = {}
        for setting, _, read, _ in self._rows:
            self._readers.setdefault(setting, read)
        spellings = self._table.get("spellings", {})
        self._unread = {spellings.get(setting.name, setting.name): setting for setting in written}
        self._reasons = {name: why for why, names in self._table["no_counterpart"].items() for name in names.split()}
        self.knows_any = not self._unread.keys().isdisjoint(self._readers.keys() | self._reasons.keys())
        autos = [name for name, setting in self._unread.items() if "auto" in self._table and setting.value == "auto"]
        self._autos = {name: self._unread.pop(name) for name in autos}
        self._read: dict[str, Any] = {}
        self._settings: dict[str, Setting] = {}
        self._translate()

    def lists(self) -> list[tuple[str, list[str]]]:
        """(title, lines) of the other runner's defaults, of what has no counterpart, and of what stays open."""
        values, decided = {**self.values, **self.groups}, self.origin.keys() | (self.groups.keys() - {"dataset"})
        defaults = [f"{setting.text}: {key}={values[key]}" for key, setting in self.origin.items() if not setting.where]
        left_open = [f"{setting.text}: {why}{f': give {key}=' if key else ''}" for key, setting, why in self.left_open]
        decided |= {key for key, _, _ in self.left_open}
        left_open += [f"{part[0]}: the file does not say: give {'= or '.join(part)}="
                      for part in _DESCRIPTION if not decided & set(part)]  # fmt: skip
        return [
            ("left at its default, which is written here", defaults),
            ("no counterpart", [f"{setting.text}: {why}" for setting, why in self.dropped]),
            ("left open, so that parallelrun's own default applies until you give it", left_open),
        ]

    def _translate(self) -> None:
        for setting in self._autos.values():
            key = next((key for name, key, _, _ in self._rows if name == setting.name and key), "")
            self._leave_open(key, setting, self._table["auto"])
        for name, key, _, options in self._rows:
            self._apply(name, key or "", options)
        for group, option in self._entries(self._table.get("stand_ins", {})).items():
            self.groups.setdefault(group, option)
        decided = self.origin.keys() | {key for key, _, _ in self.left_open}
        for name, key, _, options in self._rows:
            if "absent" in options and key not in decided and name not in self._settings:
                self._leave_open(key, Setting(name, "not given"), options["absent"])
        for name, setting in self._unread.items():
            outside = "it is set outside the file" if name.startswith("$") else "not known here"
            if setting.value is not None and not (name in self._reasons and setting.value == []):
                self.dropped.append((setting, self._reasons.get(name, outside)))

    def __getitem__(self, name: str) -> Any:
        """The value of a setting, which is read once; None if the setting is absent, off or wrong."""
        if name not in self._read:
            self._read[name] = None  # for a default that depends on its own setting
            self._read[name] = self._value_of(name)
        return self._read[name]

    def _value_of(self, name: str) -> Any:
        condition = self._table.get("sections", {}).get(name.partition(".")[0], "")
        if name not in self._readers or not self._holds(condition):
            return None
        setting = self._unread.pop(name, None)
        if setting is None and name not in self._autos:
            setting = Setting(name, self._entries(self._table["defaults"], name).get(name))
        if setting is None or setting.value is None:
            return None
        self._settings[name] = setting
        read = self._readers[name]
        read = getattr(settings, read) if isinstance(read, str) else choice(read)
        if "$" in str(setting.value) and read not in (anything, one_path):
            self._fault(setting, "the file does not say what this variable is")
            return None
        return self._attempt(lambda: read(setting.value), setting, "")

    def _holds(self, condition: str) -> bool:
        """Return whether all terms of a condition hold."""
        for negated, name, operator, operand in _TERM.findall(condition):
            value = "auto" if operator and name in self._autos else self[name]
            if name not in self._readers:
                value = self.values.get(name, self.groups.get(name))
            if operator == ">":
                holds = isinstance(value, (int, float)) and value > float(operand)
            elif operator:
                wanted = self[operand] if operand in self._readers else operand
                holds = (str(value).lower() == str(wanted).lower()) == (operator == "=")
            else:
                holds = bool(value)
            if holds == bool(negated):
                return False
        return True

    def _entries(self, conditional: Mapping[str, Mapping[str, Any]], name: str | None = None) -> dict[str, Any]:
        """The entries (only that of `name`, if it is not None) whose conditions hold."""
        return {key: value for condition, entries in conditional.items()
                if (name is None or name in entries) and self._holds(condition)
                for key, value in entries.items()}  # fmt: skip

    def _apply(self, name: str, key: str, options: Mapping[str, Any]) -> None:
        """Put the value of a row's key, or list why there is none."""
        own = self[name]
        if own is None or key in self._decided or not self._holds(options.get("when", "")):
            return
        setting = self._settings[name]
        if not self._holds(options.get("needs", "")):
            if setting.where:  # a default of this kind is not listed
                self.dropped.append((setting, options.get("why", f"it means nothing without {options['needs']}")))
        elif "drop" in options:
            self.dropped.append((setting, options["drop"]))
        elif "open" in options:
            self._leave_open(key, setting, options["open"])
        elif "fault" in options:
            self._fault(setting, options["fault"])
        else:
            value = self._attempt(lambda: self._computed(own, options), setting, key)
            if key and value is not None:
                self._put(key, value, setting)

    def _computed(self, own: Any, options: Mapping[str, Any]) -> Any:
        if "call" in options:
            return getattr(settings, options["call"])(own, self)
        for factor in options.get("times", ()):
            own *= (self[factor] or 1) if isinstance(factor, str) else factor
        return options.get("value", own)

    def _put(self, key: str, value: Any, setting: Setting) -> None:
        """Set a key of the recipe or choose the option of a group."""
        if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 and isinstance(setting.value, int):
            value = int(value)
        if key == "tracker.use" and setting.name != key:  # several settings may each add a tracker
            value = [*self.values.get(key, []), value]
        (self.groups if key in GROUPS else self.values)[key] = value
        self.origin[key] = setting

    def _leave_open(self, key: str, setting: Setting, why: str) -> None:
        if key not in self._decided:
            self.left_open.append((key, setting, why))

    def _fault(self, setting: Setting, why: str) -> None:
        self.problems.append(Problem(f"{setting.text}: {why}", setting.where or setting.name))

    def _attempt(self, convert: Callable[[], Any], setting: Setting, key: str) -> Any:
        """The converted value; None if there is none, which is listed with its reason."""
        try:
            return convert()
        except NoCounterpart as error:
            self.dropped.append((setting, str(error)))
        except LeftOpen as error:
            self._leave_open(key, setting, str(error))
        except (ValueError, TypeError) as error:
            self._fault(setting, str(error) or "not a value of this setting")
        return None
