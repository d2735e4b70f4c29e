"""How far a mistyped word is from a right one."""

from __future__ import annotations

from collections.abc import Iterable


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


def closest(word: str, names: Iterable[str]) -> list[str]:
    """Those of `names` that are nearest to `word`, all equally near; none if more letters differ than `tolerated`."""
    most, letters = tolerated(word), plain(word)
    by_distance: dict[int, list[str]] = {}
    for name in names:
        by_distance.setdefault(distance(letters, plain(name), most), []).append(name)
    nearest = min(by_distance, default=most + 1)
    return by_distance[nearest] if nearest <= most else []
