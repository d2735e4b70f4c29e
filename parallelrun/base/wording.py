"""Helpers for messages: the closest names, the nearest numbers, amounts with units."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterable
from typing import TextIO

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
    return spelled_alike(str(name), names)[:3] or names


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


def plain(word: str) -> str:
    """`word` without what people write differently: `top_k`, `topk` and `top-K` are one."""
    return word.lower().translate({ord(mark): None for mark in "_.-"})


def distance(left: str, right: str, most: int) -> int:
    """The number of letters to insert, delete, replace or swap with their neighbour; most + 1 if there are more."""
    if abs(len(left) - len(right)) > most:
        return most + 1
    before: list[int] = []
    row = list(range(len(right) + 1))
    for i, letter in enumerate(left, 1):
        last, before, row = before, row, [i]
        for j, other in enumerate(right, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == right[j - 2] and left[i - 2] == other:
                cost = min(cost, last[j - 2] + 1)
            row.append(cost)
        if min(row) > most:
            return most + 1
    return min(row[-1], most + 1)


def tolerated(word: str) -> int:
    """How many wrong letters a word of this length may have: one in three, at least one and at most three."""
    return max(1, min(3, (len(plain(word)) + 1) // 3))


def spelled_alike(word: str, names: Iterable[str]) -> list[str]:
    """Those of `names` that are nearest to `word`, all equally near; none if more letters differ than `tolerated`."""
    most, letters = tolerated(word), plain(word)
    by_distance: dict[int, list[str]] = {}
    for name in names:
        by_distance.setdefault(distance(letters, plain(name), most), []).append(name)
    nearest = min(by_distance, default=most + 1)
    return by_distance[nearest] if nearest <= most else []
