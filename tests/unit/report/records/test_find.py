"""Which directories a user's words mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallelrun.base.errors import ConfigError
from parallelrun.report.records import find
from tests.run_files import write_run


@pytest.fixture
def runs(tmp_path):
    write_run(tmp_path / "gpt-ddp-dp2" / "20260101T000000Z-aaaaaa")
    write_run(tmp_path / "gpt-ddp-dp2" / "20260301T000000Z-bbbbbb")
    write_run(tmp_path / "gpt-tp-tp2" / "20260201T000000Z-cccccc")
    sweep = tmp_path / "sweep-20260401T000000Z-dddddd"
    write_run(sweep / "000-ddp-dp2")
    write_run(sweep / "001-tp-tp2")
    (sweep / "results.jsonl").write_text("")
    (tmp_path / "latest").symlink_to("gpt-tp-tp2/20260201T000000Z-cccccc")
    return tmp_path


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("latest", ["20260201T000000Z-cccccc"]),
        ("gpt-ddp-dp2", ["20260301T000000Z-bbbbbb"]),
        ("aaaaaa", ["20260101T000000Z-aaaaaa"]),
        ("20260101T000000Z-aaaaaa", ["20260101T000000Z-aaaaaa"]),
        ("gpt-ddp-dp2/20260101T000000Z-aaaaaa", ["20260101T000000Z-aaaaaa"]),
        ("sweep-20260401T000000Z-dddddd", ["000-ddp-dp2", "001-tp-tp2"]),
        ("sweep-20260401T000000Z-dddddd/001-tp-tp2", ["001-tp-tp2"]),
        ("001-tp-tp2", ["001-tp-tp2"]),
    ],
)
def test_a_word_means_runs(runs, word, names):
    assert [path.name for path in find.resolve([word], runs)] == names


def test_a_path_is_found_from_anywhere(runs, tmp_path_factory):
    path = runs / "gpt-tp-tp2" / "20260201T000000Z-cccccc"
    assert find.resolve([str(path)], tmp_path_factory.mktemp("other")) == [path]


def test_weights_are_found_by_the_name_of_their_run_and_other_directories_by_their_path(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt-tp-tp2x").mkdir()
    assert find.directory_of("gpt-tp-tp2x", runs) == Path("gpt-tp-tp2x")
    assert find.directory_of("aaaaaa", runs) == runs / "gpt-ddp-dp2" / "20260101T000000Z-aaaaaa"
    assert find.directory_of("latest", tmp_path / "nowhere") == Path("latest")
    for word in ("nowhere", "sweep-20260401T000000Z-dddddd/nowhere"):  # the caller says what it lacks
        assert find.directory_of(word, runs) == Path(word)


@pytest.mark.parametrize(
    ("word", "told"),
    [("gpt-ddp-dp3", "no run gpt-ddp-dp3"), ("", "no run"), ("empty", "not a run"), ("none-swept", "no point")],
)
def test_a_word_that_means_no_run_is_refused(runs, word, told):
    (runs / "empty" / "folder").mkdir(parents=True)
    (runs / "none-swept").mkdir()
    (runs / "none-swept" / "results.jsonl").write_text("")
    with pytest.raises(ConfigError, match=told) as caught:
        find.resolve([word or str(runs)], runs)
    assert caught.value.exit_code == 2
    if word == "gpt-ddp-dp3":
        assert "gpt-ddp-dp2" in caught.value.problems[0].suggestion


def test_a_word_that_means_several_runs_is_refused(runs):
    write_run(runs / "other" / "20260101T000000Z-aaaaaa")
    with pytest.raises(ConfigError, match="several runs"):
        find.resolve(["aaaaaa"], runs)


def test_all_runs_are_the_newest_first_with_the_points_of_sweeps(runs):
    (runs / "gpt-ddp-dp2" / "notes").mkdir()
    names = [path.name for path in find.all_runs(runs)]
    assert names == ["001-tp-tp2", "000-ddp-dp2", *(f"2026{time}" for time in (
        "0301T000000Z-bbbbbb", "0201T000000Z-cccccc", "0101T000000Z-aaaaaa"))]  # fmt: skip
    assert find.all_runs(runs / "missing") == []
