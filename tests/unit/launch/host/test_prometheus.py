"""status.prom: the text that Prometheus reads, held to its grammar, and replaced with status.json."""

from __future__ import annotations

import re

import pytest

from parallelrun.launch.host.directory import Status
from parallelrun.launch.host.prometheus import exposition

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*"'
SAMPLE = re.compile(rf"({NAME})(?:\{{({LABEL}(?:,{LABEL})*)\}})? ([-+]?(?:\d+(?:\.\d+)?(?:e[-+]?\d+)?|Inf|NaN))")


def parsed(text: str) -> dict[tuple[str, frozenset[str]], float]:
    """The samples of a text in the exposition format 0.0.4 (Prometheus' documentation, "Text-based format").

    Each line ends with a line feed; HELP and TYPE come once for each metric, before its samples, which are together.
    """
    assert text.endswith("\n")
    samples: dict[tuple[str, frozenset[str]], float] = {}
    types: dict[str, str] = {}
    current = ""
    for line in text.splitlines():
        if help_line := re.fullmatch(rf"# HELP ({NAME}) [^\n]*", line):
            current = help_line[1]
            assert current not in types, line
        elif type_line := re.fullmatch(rf"# TYPE ({NAME}) (counter|gauge|histogram|summary|untyped)", line):
            assert type_line[1] == current and current not in types, line
            types[current] = type_line[2]
        else:
            match = SAMPLE.fullmatch(line)
            assert match and match[1] == current in types, line
            key = (match[1].removeprefix("parallelrun_run_"), frozenset(re.findall(LABEL, match[2] or "")))
            assert key not in samples, line
            samples[key] = float(match[3])
    assert types.keys() == {f"parallelrun_run_{name}" for name, _ in samples}, "a metric without samples"
    return samples


STATUS = {"state": "running", "exit_code": None, "step": 12}


def test_a_status_is_a_valid_text():
    samples = parsed(exposition(STATUS, "gpt-dp2/now"))
    label = 'run="gpt-dp2/now"'
    assert samples["step", frozenset([label])] == 12
    states = {
        state: samples["state", frozenset([label, f'state="{state}"'])] for state in ("running", "done", "failed")
    }
    assert states == {"running": 1, "done": 0, "failed": 0}
    assert samples["updated_timestamp_seconds", frozenset([label])] > 1.7e9
    assert not any(name in ("exit_code", "failed_save_step") for name, _ in samples)


def test_the_end_and_a_failed_save_have_values():
    samples = parsed(exposition({**STATUS, "state": "failed", "exit_code": 3, "failed_save_step": 10}, "r"))
    assert (samples["exit_code", frozenset(['run="r"'])], samples["failed_save_step", frozenset(['run="r"'])]) == (
        3,
        10,
    )


@pytest.mark.parametrize("run", ['a"b', "a\\b", "a\nb", 'ü"\\n'])
def test_any_directory_is_a_legal_label(run):
    [label] = {label for name, labels in parsed(exposition(STATUS, run)) if name == "step" for label in labels}
    escapes = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}
    assert re.sub(r'\\[\\"n]', lambda found: escapes[found[0]], label.removeprefix('run="')[:-1]) == run


def test_the_text_is_replaced_with_status_json(tmp_path):
    status = Status(tmp_path)
    status.running(3)
    before = parsed((tmp_path / "status.prom").read_text())
    status.ended(0)
    after = parsed((tmp_path / "status.prom").read_text())
    done = next(key for key in after if 'state="done"' in key[1])
    assert (before[done], after[done]) == (0, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["status.json", "status.prom"]


def test_a_run_without_room_for_the_text_still_has_its_status(tmp_path):
    (tmp_path / "status.prom").mkdir()  # cannot be replaced by a file
    Status(tmp_path).running(3)
    assert '"step": 3' in (tmp_path / "status.json").read_text()
