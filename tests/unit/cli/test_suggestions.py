"""Every suggestion that the program prints can be typed: it is accepted, or ends with an error about something else.

The catalogue holds what users mistype. Each line is answered in this process, and no rank is started. Then what
`did you mean` and `try` print is typed: the answer must neither repeat the error nor refuse what was suggested.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from parallelrun.cli.help import TOOLS, VERBS
from parallelrun.cli.main import main
from parallelrun.config.keys import GROUPS, known_keys
from parallelrun.config.overrides import split
from parallelrun.config.schema.run_schema import Config
from parallelrun.config.schema.strategy_keys import completed
from tests.matrix import FULL
from tests.unit.bad_commands import CATALOGUE, FILES, OWN_MODULES, PROSE, SAID

_PAIR = re.compile(r"(?:~|\+\+|\+|)([A-Za-z_][\w./]*)=(.*)", re.DOTALL)
_LABELS = {"where": "where", "did you mean": "suggestion", "try": "command"}


@dataclass(frozen=True)
class Said:
    """One error of the screen."""

    what: str
    where: str = ""
    suggestion: str = ""
    command: str = ""


def blocks_of(stderr: str) -> list[Said]:
    blocks: list[dict[str, str]] = []
    for line in stderr.splitlines():
        label, _, text = line.strip().partition(": ")
        if label == "error":
            blocks.append({"what": text})
        elif label in _LABELS and blocks:
            blocks[-1][_LABELS[label]] = text
    return [Said(**block) for block in blocks]


class Shell:
    """Answers command lines in this process; the same line is answered once for all tests."""

    _answers: ClassVar[dict[tuple[str, ...], tuple[int, list[Said]]]] = {}
    screens: ClassVar[dict[tuple[str, ...], tuple[str, str]]] = {}  # stdout and stderr

    def __init__(self, capsys: Any):
        self._capsys = capsys

    def __call__(self, words: list[str]) -> tuple[int, list[Said]]:
        key = tuple(words)
        if key not in self._answers:
            try:
                code = main(_planned(words))
            except SystemExit as ended:  # argparse, of `ls`
                code = int(ended.code or 0)
            self.screens[key] = self._capsys.readouterr()
            self._answers[key] = code, blocks_of(self.screens[key][1])
        return self._answers[key]


def _planned(words: list[str]) -> list[str]:
    """The line, with a sweep's runs planned instead of run."""
    is_sweep = "-m" in words or "--multirun" in words
    if is_sweep and "plan" not in words and not set(words[:1]) & TOOLS.keys():
        return ["plan", *(words[1:] if words[0] in VERBS else words)]
    return words


@pytest.fixture
def shell(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("parallelrun.launch.entry.start.start", lambda *arguments, **more: 0)
    monkeypatch.setattr("parallelrun.launch.over_ssh.ssh.run", lambda *arguments: 0)
    monkeypatch.setattr("parallelrun.cli.tools.doctor.main", lambda words: 0)
    return Shell(capsys)


def alternatives(suggestion: str) -> list[str]:
    """`tp=2 or tp=4, or leave depth out` -> each of them."""
    parts = [part for piece in re.split(r",? or (?=\S+=|leave |-)", suggestion) for part in split(piece)]
    return [part.strip() for part in parts if part.strip()]


def default_of(key: str) -> str:
    """What the schema has for `key`, as text."""
    if key not in known_keys():  # one of Hydra's
        return "1"
    node: Any = completed(Config())
    for part in key.split("."):
        node = getattr(node, part)
    if isinstance(node, (list, dict)):
        return "[]"
    return {"None": "1", "True": "true", "False": "false"}.get(str(node), str(node))


def typed(line: list[str], said: Said, alternative: str) -> list[str] | None:
    """`line` with `alternative` in the place of what was wrong; None for prose."""
    if match := re.fullmatch(r"leave (\S+) out", alternative):
        key = said.where if match[1] == "it" else match[1]
        return [word for word in line if not _is_of(word, key)]
    try:
        replacement = shlex.split(alternative)
    except ValueError:
        return None
    pairs = [_PAIR.fullmatch(word) for word in replacement]
    wrong = _words_named(line, said.what)
    is_word = wrong is not None and replacement[0] in (*VERBS, *TOOLS)
    if not all(pairs) and not alternative.startswith("-") and not is_word:
        return None
    if wrong is not None:
        start, stop = wrong
        line, place = line[:start] + line[stop:], start
    else:
        place = next((i for i, word in enumerate(line) for pair in pairs if pair and _is_of(word, pair[1])), len(line))
    kept = [word for word in line[:place]]
    rest = [word for word in line[place:]]
    keys = [pair[1] for pair in pairs if pair]
    free = lambda words: [word for word in words if not any(_is_of(word, key) for key in keys)]  # noqa: E731
    filled = [f"{pair[1]}={default_of(pair[1])}" if pair and pair[2] == "..." and pair[1] not in GROUPS else word
              for pair, word in zip(pairs, replacement)]  # fmt: skip
    return [*free(kept), *filled, *free(rest)]


def _is_of(word: str, key: str) -> bool:
    match = re.fullmatch(r"(?:~|\+\+|\+|)([A-Za-z_][\w./]*)(?:@[^=]*)?(?:=.*)?", word, re.DOTALL)
    return match is not None and match[1] in (key, f"{key}.name", *(["path"] if key == "dataset.path" else []))


def _words_named(line: list[str], what: str) -> tuple[int, int] | None:
    """Where the words stand that the message begins with (`tp = 2: no spaces around =`)."""
    for start in range(len(line)):
        for stop in range(len(line), start, -1):
            if what.startswith(" ".join(line[start:stop]) + ": "):
                return start, stop
    return None


def commands(line: list[str], said: Said) -> list[str] | None:
    """The words of `try: parallelrun ...`, its dots replaced by the rest of the line; None for other programs."""
    words = shlex.split(said.command.split(", ")[0].split(" (")[0])
    if not words or words[0] != "parallelrun":
        return None
    if "..." in words:
        verb = [] if len(words) > 1 and words[1] in (*VERBS, *TOOLS) else [word for word in line[:1] if word in VERBS]
        rest = [word for word in line if word not in words and word not in VERBS]
        place = words.index("...")
        words = [words[0], *verb, *words[1:place], *rest, *words[place + 1 :]]
    return words[1:]


def _is_number_of(text: str, values: set[str]) -> bool:
    """Whether `text` is a user's own number, written otherwise."""
    try:
        return any(float(value) == float(text) for value in values)
    except ValueError:
        return False


def refused(shell: Shell, line: str, said: Said) -> list[str]:
    """What is wrong with the suggestions of one error."""
    words, found = shlex.split(line), []
    several = alternatives(said.suggestion)
    tried = (*several[:1], *several[-1:])  # those between are made in the same way
    for alternative in dict.fromkeys(tried if FULL else tried[len(line) % 2 :][:1]):  # one of both: other lines differ
        changed = typed(words, said, alternative)
        if changed is None:
            if not any(re.fullmatch(pattern, alternative) for pattern in PROSE):
                found.append(f"{line!r}: {alternative!r} cannot be typed ({said})")
            continue
        found += _judge(shell, line, said, changed, alternative)
    command = commands(words, said) if said.command else None
    if command is not None:
        found += _judge(shell, line, said, command, said.command)
    return found


def _judge(shell: Shell, line: str, said: Said, changed: list[str], suggestion: str) -> list[str]:
    code, after = shell(changed)
    shown = f"{line!r} -> {suggestion!r}, typed as {changed}"
    if code == 0:
        return []
    if code not in (2, 3, 4):
        return [f"{shown}: exit {code}, {after}"]
    before = shlex.split(line)
    already = {one.what for one in shell(before)[1]}
    values = {match[2] for word in before if (match := _PAIR.fullmatch(word))}
    for other in after:
        if other.what == said.what:
            return [f"{shown}: the same error again: {other.what}"]
        match = _PAIR.fullmatch(suggestion)
        if other.what in already:
            continue
        is_ours = (
            match is not None and match[2] not in ("...", *values, *before) and not _is_number_of(match[2], values)
        )
        if match and is_ours and (other.what.startswith(suggestion) or other.where == match[1]):
            return [f"{shown}: refused: {other.what}"]
        if match is None and suggestion.startswith("parallelrun") and "key=value" in other.what:
            return [f"{shown}: refused: {other.what}"]
    return []


def test_the_catalogue_is_wide():
    assert len(CATALOGUE) == len(set(CATALOGUE)) >= 150


@pytest.mark.parametrize("line", [line for line in CATALOGUE if SAID[line] != [""]])
def test_a_mistake_ends_with_2_and_one_readable_message(line, shell):
    words = shlex.split(line)
    code, _ = shell(words)
    stdout, stderr = shell.screens[tuple(words)]
    assert (code, stdout) == (2, "") and stderr.startswith("error: ") and "Traceback" not in stderr, stderr
    assert [text for text in SAID[line] if text not in stderr] == [], stderr


# Every line, or every eighth one.
PARTS = {f"{part} of 8": CATALOGUE[part::8] for part in range(0, 8, 1 if FULL else 8)}


@pytest.mark.parametrize("lines", [*PARTS.values(), OWN_MODULES], ids=[*PARTS, "a module of the user's own"])
def test_what_is_suggested_is_not_refused(lines, shell):
    wrong = []
    for line in lines:
        code, said = shell(shlex.split(line))
        if code != 2 or not said or any("unexpected" in one.what for one in said):
            wrong.append(f"{line!r} ended with {code}: {said}")
            continue
        wrong += [text for one in said for text in refused(shell, line, one)]
    assert not wrong, "\n".join(wrong)
