"""The settings of a tool, typed as `key=value`, that are no keys of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from parallelrun.base.errors import Problem
from parallelrun.config.keys import Key, nearest
from parallelrun.config.values import within


def keys_of(*keys: Key) -> dict[str, Key]:
    """Keys by name."""
    return {key.name: key for key in keys}


def read_settings(
    words: Iterable[str], keys: Mapping[str, Key], defaults: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Problem]]:
    """(the value of every setting that is typed or has a default, every mistake)."""
    values, typed, problems = dict(defaults), set(), []
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or name not in keys or name in typed:
            wrong = "is given twice" if name in typed else f"is none of {', '.join(f'{key}=' for key in keys)}"
            fixes = [] if name in typed or not equals else [f"{key}={text}" for key in nearest(name, list(keys))]
            hint = "" if equals else "; a text is one argument: quote it"
            problems.append(Problem(f"{word} {wrong}{hint}", "command line", " or ".join(fixes)))
        else:
            typed.add(name)
            try:
                values[name] = _value(keys[name], text)
            except ValueError as error:
                legal = defaults.get(name) or (1 if keys[name].kind in ("int", "float") else "")
                problems.append(Problem(f"{word}: {error}", name, f"{name}={legal}" if legal else ""))
    return values, problems


def _value(key: Key, text: str) -> Any:
    """The value of a text. Raises ValueError, which says what is wrong."""
    if text == "null" and key.optional:
        return None
    if key.kind == "list":
        return _numbers(text.strip("[]").split(","))
    if key.choices and text not in key.choices:
        raise ValueError(f"must be one of {', '.join(key.choices)}")
    if key.kind == "str":
        if not text:
            raise ValueError("a value is missing")
        return text
    try:
        number = {"int": int, "float": float}[key.kind](text)
    except ValueError:
        number = None
    if number is None or not within(key, text):
        raise ValueError(f"not a {'whole ' if key.kind == 'int' else ''}number in its range")
    return number


def _numbers(parts: Sequence[str]) -> list[int]:
    try:
        return [int(part) for part in parts]
    except ValueError:
        raise ValueError("not a list of whole numbers such as [1,2,3]") from None
