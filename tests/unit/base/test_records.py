"""JSON files of a run: strict JSON, complete or absent."""

from __future__ import annotations

import json
import os
import resource
import stat
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from parallelrun.base.records import append_jsonl, document, write_json, write_text


def strict(text: str):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_every_document_has_a_schema_and_keeps_its_fields(tmp_path):
    write_json(tmp_path / "a.json", {"loss": 1.5, "path": Path("x/y"), "names": ("a", "b")})
    assert strict((tmp_path / "a.json").read_text()) == {
        "schema": 1,
        "loss": 1.5,
        "path": "x/y",
        "names": ["a", "b"],
    }


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), np.float32("nan")])
def test_a_number_that_json_cannot_hold_is_null_and_said(bad):
    assert document({"rows": [{"loss": bad}]}) == {"schema": 1, "rows": [{"loss": None}], "nonfinite": True}


def test_scalars_of_numpy_and_dataclasses_are_plain():
    @dataclass
    class Row:
        count: int

    assert document({"n": np.int64(3), "row": Row(2)}) == {"schema": 1, "n": 3, "row": {"count": 2}}


def test_what_json_cannot_hold_is_refused_and_the_old_file_stays(tmp_path):
    write_json(tmp_path / "a.json", {"ok": True})
    with pytest.raises(TypeError, match="object"):
        write_json(tmp_path / "a.json", {"bad": object()})
    assert strict((tmp_path / "a.json").read_text())["ok"] is True


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    write_text(tmp_path / "a.json", "old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_text(tmp_path / "a.json", "new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.json", "old")]


def test_files_are_private(tmp_path):
    write_json(tmp_path / "a.json", {})
    append_jsonl(tmp_path / "b.jsonl", {})
    assert {stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()} == {0o600}


def test_lines_are_appended_whole(tmp_path):
    for step in (1, 2):
        append_jsonl(tmp_path / "m.jsonl", {"step": step, "loss": float("nan")})
    rows = [strict(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert rows == [{"schema": 1, "step": s, "loss": None, "nonfinite": True} for s in (1, 2)]


def test_a_line_for_which_there_is_no_room_leaves_nothing_behind(tmp_path):
    path = tmp_path / "m.jsonl"
    append_jsonl(path, {"step": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, before[1]))
    try:
        with pytest.raises(OSError, match="No space left"):
            append_jsonl(path, {"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    append_jsonl(path, {"step": 3})
    assert [strict(line)["step"] for line in path.read_text().splitlines()] == [1, 3]
