"""Strict JSON from other programs: parsed, and compared with the form that it must have.

A form is a `Leaf`, `[form]` (a list of such values), or a dict of forms by key. A key that ends in `?` may be absent.
`*` stands for any other key, which must be a printable name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Union

_MAX_NAME = 1000
_MAX_NUMBER = 2**53  # exact in every JSON reader
_MAX_DIMS = 8


@dataclass(frozen=True)
class Leaf:
    """A plain value. kind: a noun phrase for the message about a value that does not hold."""

    kind: str
    holds: Callable[[Any], bool]


Form = Union[Leaf, "list[Form]", "dict[str, Form]"]

anything = Leaf("", lambda value: True)
string = Leaf("a text", lambda value: isinstance(value, str))
printable = Leaf(  # so that it cannot control a terminal
    "a printable name", lambda value: isinstance(value, str) and 0 < len(value) <= _MAX_NAME and value.isprintable()
)
integer = Leaf("an integer", lambda value: type(value) is int)  # a boolean is none
count = Leaf(f"an integer from 0 to {_MAX_NUMBER}", lambda value: type(value) is int and 0 <= value <= _MAX_NUMBER)
positive = Leaf(f"an integer from 1 to {_MAX_NUMBER}", lambda value: count.holds(value) and value > 0)
dims = Leaf(
    f"at most {_MAX_DIMS} integers from 0 on",
    lambda value: isinstance(value, list) and len(value) <= _MAX_DIMS and all(map(count.holds, value)),
)


def optional(leaf: Leaf) -> Leaf:
    """Return the form of such a value or null."""
    return Leaf(f"{leaf.kind} or null", lambda value: value is None or leaf.holds(value))


def parse(raw: bytes) -> Any:
    """Parse strict JSON: without NaN, repeated keys, or nesting that exhausts the stack. Raises ValueError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            raise ValueError("an object has the same key twice")
        return fields

    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is not a number")

    try:
        return json.loads(raw, object_pairs_hook=unique, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def check(value: Any, form: Form, where: str) -> None:
    """Raise ValueError with the place of the first difference unless the value has the form."""
    if isinstance(form, Leaf):
        if not form.holds(value):
            raise ValueError(f"{where} is {value!r:.100}, not {form.kind}")
    elif isinstance(form, list):
        if not isinstance(value, list):
            raise ValueError(f"{where} is {value!r:.100}, not a list")
        for item in value:
            check(item, form[0], where)
    else:
        if not isinstance(value, dict):
            raise ValueError(f"{where} is {value!r:.100}, not an object")
        for key in form:
            if not key.endswith(("?", "*")) and key not in value:
                raise ValueError(f"{where} has no {key}")
        for key, item in value.items():
            expected = form.get(key) or form.get(f"{key}?")
            if expected is None:
                if "*" not in form:
                    raise ValueError(f"{where} has an unknown field {key!r:.200}")
                check(key, printable, f"a key of {where}")
                expected = form["*"]
            if not (isinstance(expected, Leaf) and expected.holds(item)):  # or the place of each would be put together
                check(item, expected, f"{where}.{key}")
