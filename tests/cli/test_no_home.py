"""A user without a home directory: a uid of a container that has no name, and HOME is not set."""

from __future__ import annotations

import pwd

import pytest

from parallelrun.cli import main

TINY = ("model=gpt", "model.layers=2", "model.hidden=16", "model.heads=2", "model.seq=8", "strategy=ddp", "dp=2")


@pytest.fixture(autouse=True)
def no_home(monkeypatch, tmp_path):
    def has_no_entry(uid: int):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", has_no_entry)
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "PARALLELRUN_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def test_commands_that_name_no_home_work(capsys, tmp_path):
    assert main.main(["plan", *TINY, "cluster=h100_dgx"]) == 0
    assert main.main(["ls", "clusters"]) == 0
    assert main.main(["recipes", "ls"]) == 0
    assert "~" not in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_token_cache_needs_a_folder(capsys, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n' * 500)
    words = (*TINY, "dataset=text", f"dataset.path={tmp_path / 'a.jsonl'}", "steps=1")
    assert main.main(words) == 3
    printed = capsys.readouterr().err
    assert "no folder for the cached tokens" in printed and "dataset.cache=FOLDER" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_calibration_needs_a_folder(capsys, tmp_path):
    assert main.main(["calibrate", "cluster=mine"]) == 3
    assert "--config-dir FOLDER" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_path_with_a_tilde_says_so(capsys):
    assert main.main(["plan", *TINY, "plot=~/x"]) == 2
    assert "a path begins with ~, and that user has no home directory" in capsys.readouterr().err
