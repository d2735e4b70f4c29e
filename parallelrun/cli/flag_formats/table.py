"""The one reader of the four tables: `megatron.yaml`, `torchtitan.yaml`, `deepspeed.yaml`, `accelerate.yaml`.

A row is [setting of the other runner, our key or group (~: none), how to read it, options]. Rows of one setting share
the first one's reading: a function of `settings` or `derived`, {on: ..., off: ...} for a switch, or a mapping of words.
Options:
- when: the condition under which the row counts; needs: the same, and a setting that does not meet it is listed, with
  the reason (why)
- value: the key's value; call: the function of `derived` that computes it; by default the setting's own value
- drop, open, fault: there is no counterpart, the key stays open, or the setting is wrong, with the reason
- absent: why the key stays open if no setting decides it
A condition is terms `name`, `name=value`, `name!=value` or `name>number`, all of which hold; `!` before a term negates.
Besides rows, a table has: defaults (condition -> the runner's own values, where ours differ), stand_ins (condition ->
options of groups that no setting decides), sections (prefix of names -> condition under which the runner reads them),
auto (who sets a value `auto`), spellings (other name -> name), marks (names that a file of this format has) and
no_counterpart (reason -> names, separated by spaces).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from parallelrun.base.errors import Problem
from parallelrun.cli.flag_formats import derived, settings
from parallelrun.cli.flag_formats.settings import (
    LeftOpen,
    Needed,
    NoCounterpart,
    Setting,
    Translation,
    Unused,
    anything,
    choice,
    one_path,
    switch,
)

FORMATS = ("megatron", "torchtitan", "deepspeed", "accelerate")
Table = Mapping[str, Any]
_TERM = re.compile(r"(!?)([^\s=<>!]+)(?:(!?=|>)(\S+))?")


@cache
def table_of(name: str) -> Table:
    """The table of one of FORMATS."""
    import yaml

    content: Table = yaml.safe_load(Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8"))
    return content


class Values:
    """The value of every setting by its name; None if the setting is absent, off or wrong. Each is read once.

    autos: settings that are written as `auto`. keys_so_far: the values of our keys by the rows so far. unread: the
    settings that no row has read.
    """

    def __init__(self, table: Table, written: Sequence[Setting], result: Translation):
        spellings, self._table, self._result = table.get("spellings", {}), table, result
        self.keys_so_far = result.values
        self._reads: dict[str, Any] = {}
        for name, _, read, *_ in table["rows"]:
            self._reads.setdefault(name, read)
        self.unread = {spellings.get(one.name, one.name): one for one in written}
        self.autos = {name: one for name, one in self.unread.items() if "auto" in table and one.value == "auto"}
        self.unread = {name: one for name, one in self.unread.items() if name not in self.autos}
        self._read: dict[str, Any] = {}
        self.settings: dict[str, Setting] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._read:
            self._read[name] = None  # for a default that depends on its own setting
            self._read[name] = self._converted(name)
        return self._read[name]

    def holds(self, condition: str) -> bool:
        """Return whether all terms of a condition hold."""
        for negated, name, operator, operand in _TERM.findall(condition):
            value = "auto" if operator and name in self.autos else self[name]
            if operator == ">":
                holds = isinstance(value, (int, float)) and value > float(operand)
            elif operator:
                holds = (str(value).lower() == operand) == (operator == "=")
            else:
                holds = bool(value)
            if holds == bool(negated):
                return False
        return True

    def entries(self, conditional: Mapping[str, Mapping[str, Any]], name: str | None = None) -> dict[str, Any]:
        """The entries (that of one name) whose conditions hold."""
        return {key: value for condition, entries in conditional.items()
                if (name is None or name in entries) and self.holds(condition)
                for key, value in entries.items()}  # fmt: skip

    def _converted(self, name: str) -> Any:
        if name not in self._reads or not self.holds(self._table.get("sections", {}).get(name.partition(".")[0], "")):
            return None
        setting = self.unread.pop(name, None)
        if setting is None and name not in self.autos:
            default = self.entries(self._table["defaults"], name).get(name)
            setting = None if default is None else Setting(name, default)
        if setting is None or setting.value is None:
            return None
        self.settings[name] = setting
        read = _reader(self._reads[name])
        if "$" in str(setting.value) and read not in (anything, one_path):
            self._result.fault(setting, "the file does not say what this variable is")
            return None
        return attempt(lambda: read(setting.value), setting, "", self._result)


def translate(name: str, written: Sequence[Setting]) -> Translation:
    """The recipe for these settings of one of FORMATS."""
    table, result = table_of(name), Translation()
    values = Values(table, written, result)
    for setting in values.autos.values():
        key = next((key for name, key, *_ in table["rows"] if name == setting.name and key), "")
        result.left_open.append((key, setting, table["auto"]))
    for name, key, _, *options in table["rows"]:
        _apply(name, key or "", options[0] if options else {}, values, result)
    for group, option in values.entries(table.get("stand_ins", {})).items():
        result.groups.setdefault(group, option)
    decided = result.origin.keys() | {key for key, _, _ in result.left_open}
    for name, key, _, *options in table["rows"]:
        if options and "absent" in options[0] and key not in decided and name not in values.settings:
            result.left_open.append((key, Setting(name, "not given"), options[0]["absent"]))
    reasons = {name: reason for reason, names in table["no_counterpart"].items() for name in names.split()}
    for name, setting in values.unread.items():
        outside = "it is set outside the file" if name.startswith("$") else "not known here"
        if setting.value is not None and not (name in reasons and setting.value == []):
            result.drop(setting, reasons.get(name, outside))
    return result


def _apply(name: str, key: str, options: Mapping[str, Any], values: Values, result: Translation) -> None:
    """Put the value of a row's key, or list why there is none."""
    own = values[name]
    if own is None or not values.holds(options.get("when", "")):
        return
    setting = values.settings[name]

    def value() -> Any:
        if not values.holds(options.get("needs", "")):
            raise Unused(options.get("why", f"it means nothing without {options['needs']}"))
        for kind, error in (("drop", NoCounterpart), ("open", LeftOpen), ("fault", ValueError)):
            if kind in options:
                raise error(options[kind])
        return getattr(derived, options["call"])(own, values) if "call" in options else options.get("value", own)

    outcome = attempt(value, setting, key, result)
    if key and outcome is not None:
        result.put(key, outcome, setting)


def attempt(convert: Callable[[], Any], setting: Setting, key: str, result: Translation) -> Any:
    """The converted value; None if there is none, which is listed with its reason."""
    try:
        return convert()
    except NoCounterpart as error:
        if setting.where or not isinstance(error, Unused):
            result.drop(setting, str(error))
    except LeftOpen as error:
        result.left_open.append((key, setting, str(error)))
    except Needed as error:
        result.needed[key] = Problem(f"{setting.text}: {error.args[0]}", setting.where, *error.args[1:])
    except (ValueError, TypeError) as error:
        result.fault(setting, str(error) or "not a value of this setting")
    return None


def _reader(read: str | Mapping[Any, Any]) -> Callable[[Any], Any]:
    if isinstance(read, str):
        function: Callable[[Any], Any] = getattr(derived, read, None) or getattr(settings, read)
        return function
    return switch(read[True], read.get(False)) if True in read else choice(read)
