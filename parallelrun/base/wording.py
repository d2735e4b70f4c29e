"""Helpers for messages: the closest names, the nearest numbers, amounts with units."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterable
from typing import TextIO

from parallelrun.base import spelling
from parallelrun.base.errors import Problem

COLUMNS = int(os.environ.get("PARALLELRUN_COLUMNS") or 100)  # of a line of text where there is no terminal
DETAILS = ("ranks", "stages", "schedule", "traffic", "data_axis", "layouts")  # sections of the `plan` screen


def wrapped(text: str, file: TextIO | None = None, indent: str = "  ") -> str:
    """`text` in lines of COLUMNS, later ones indented; as it is if `file` is a terminal, which wraps by itself."""
    if file is not None and file.isatty():
        return text
    return textwrap.fill(text, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def print_note(text: str) -> None:
    """Print a note or a warning to stderr."""
    print(wrapped(text, sys.stderr), file=sys.stderr, flush=True)


def did_you_mean(name: str, names: Iterable[str], prefix: str = "") -> str:
    """The suggestion `schedule=1f1b or schedule=naive` with the closest three of `names`, or all if none is close."""
    return " or ".join(f"{prefix}{word}" for word in closest(name, names))


def closest(name: str, names: Iterable[str]) -> list[str]:
    """The closest three of `names`, or all of them if none is close."""
    names = list(names)
    return spelling.closest(str(name), names)[:3] or names


def one_of(key: str, value: str, names: Iterable[str], command: str = "") -> list[Problem]:
    """A violation unless `value` is one of `names`."""
    names = list(names)
    if value in names:
        return []
    message = f"{key}={value} is unknown; it is one of {', '.join(names)}"
    return [Problem(message, key, did_you_mean(value, names, f"{key}="), command)]


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def nearest(value: int, legal: Iterable[int], count: int = 2) -> list[int]:
    """The `count` values of `legal` nearest to `value`, ascending."""
    return sorted(sorted(legal, key=lambda candidate: (abs(candidate - value), candidate))[:count])


def gib(count: float) -> str:
    """Bytes of memory as text: `74.5 GiB`."""
    number = count / 2**30
    return f"{number:.1f} GiB" if number >= 1 else f"{number:.3g} GiB"


def counted(number: int, noun: str, ending: str = "s") -> str:
    """`1 server`, `2 servers`, `0 microbatches`."""
    return f"{number:,} {noun}{ending if number != 1 else ''}"


def rank_range(first: int, count: int) -> str:
    """`rank 3`, `ranks 4 to 7`."""
    return f"rank {first}" if count == 1 else f"ranks {first} to {first + count - 1}"


def either(key: str, values: Iterable[int]) -> str:
    """`tp=2 or tp=4`."""
    return " or ".join(f"{key}={value}" for value in values)
