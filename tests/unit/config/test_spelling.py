"""Suggestions for mistyped keys and values: close in letters, right in meaning, and accepted when typed; or none."""

from __future__ import annotations

import string
from random import Random

import pytest

from parallelrun.base import spelling
from parallelrun.base.wording import closest
from parallelrun.config import presets
from parallelrun.config.keys import _ELSEWHERE, GROUPS, example, known_keys, nearest_keys
from parallelrun.config.overrides import read, suggest_pairs
from tests.matrix import examples

KEYS = {key.name: key for key in known_keys().values() if not key.is_of_presets}
LETTERS = string.ascii_lowercase + "_"


def mistyped(random: Random, word: str) -> str:
    """`word` with one letter deleted, doubled, replaced, or swapped with the next one."""
    place = random.randrange(len(word))
    before, letter, after = word[:place], word[place], word[place + 1 :]
    swapped = before + after[:1] + letter + after[1:]
    return random.choice(
        (before + after, before + 2 * letter + after, before + random.choice(LETTERS) + after, swapped)
    )


def letters_between(left: str, right: str) -> int:
    return spelling.distance(spelling.plain(left), spelling.plain(right), 9)


def test_typos_of_keys():
    random, wrong, hits, silent, count = Random(33), [], 0, 0, 0
    for _ in range(examples(800)):
        key = random.choice(list(KEYS.values()))
        name = key.name if random.random() < 0.5 else key.name.rpartition(".")[2]
        typo = mistyped(random, name)
        if typo in KEYS or not typo.strip("._-") or read([f"{typo}=1"], False, "")[0][0].is_hydra:
            continue
        count += 1
        value = example(key).partition(" or ")[0].partition("=")[2]
        suggested = nearest_keys(typo)
        hits += key.name in suggested
        silent += not suggested
        for other in suggested:
            last = other.rpartition(".")[2]
            near = min(letters_between(typo, other), letters_between(typo.rpartition(".")[2], last))
            if near > max(1, letters_between(typo, name)) and other not in _ELSEWHERE.values():
                wrong.append((typo, name, other))
        for pair in suggest_pairs(typo, value).split(" or "):
            if pair and not pair.endswith("=...") and (problems := read([pair], False, "")[1]):
                wrong.append((typo, pair, problems[0].what))
    assert not wrong, wrong[:20]
    assert hits > 0.9 * count and silent < 0.01 * count, (hits, silent)


def test_typos_of_the_values_of_choices():
    random, wrong, hits, drawn = Random(34), [], 0, 0
    choices = {name: key.choices for name, key in KEYS.items() if key.choices}
    choices |= {group: tuple(presets.options(group)) for group in GROUPS if group != "recipe"}
    for _ in range(500):
        name = random.choice(list(choices))
        value = random.choice(choices[name])
        typo = mistyped(random, value)
        if typo in choices[name] or len(value) < 3:
            continue
        drawn += 1
        suggested = closest(typo, choices[name])
        hits += value in suggested
        wrong += [(typo, one) for one in suggested if one not in choices[name]]
        best = min(letters_between(typo, one) for one in suggested)
        wrong += [(typo, value, suggested)] if best > letters_between(typo, value) else []
    assert not wrong and hits > 0.95 * drawn, (hits, drawn, wrong[:9])


def test_names_of_other_tools_are_names_of_keys_of_ours():
    assert not [name for name, key in _ELSEWHERE.items() if key not in {**KEYS, **dict.fromkeys(GROUPS)}]
    assert not [name for name in _ELSEWHERE if name in KEYS]


@pytest.mark.parametrize(
    ("left", "right", "most", "expected"),
    [("", "", 1, 0), ("ab", "ba", 3, 1), ("abc", "abd", 3, 1), ("abc", "ab", 3, 1), ("ab", "abc", 3, 1),
     ("kitten", "sitting", 3, 3), ("kitten", "sitting", 2, 3), ("a", "abcde", 2, 3), ("ca", "abc", 3, 3)],
)  # fmt: skip
def test_distances(left, right, most, expected):
    assert spelling.distance(left, right, most) == expected == spelling.distance(right, left, most)
