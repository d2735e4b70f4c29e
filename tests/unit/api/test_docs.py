"""The Python of docs/python.md does what the page says; the runs that it starts are written for the test."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import parallelrun as pr
from parallelrun.api import launching
from tests.run_files import write_run

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "python.md").read_text()


def test_the_code_of_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    started = []

    def carry_out(composed, words, run_root, show):
        started.append((words, show))
        return write_run(tmp_path / "runs" / "gpt" / f"20260101T00000{len(started)}Z-aaa{len(started)}")

    loaded = pr.load
    monkeypatch.setattr(launching, "carry_out", carry_out)
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        if "torch" in block:  # the model of a run that was not trained
            monkeypatch.setattr(pr, "load", lambda run, device: SimpleNamespace(model=lambda tokens: tokens))
        exec(compile(block, "docs/python.md", "exec"), {"pr": pr, "__name__": "docs"})
    monkeypatch.setattr(pr, "load", loaded)
    said = capsys.readouterr().out.splitlines()
    assert len(started) == 4 and started[1] == (("run", "model=gpt", "strategy=single", "steps=20"), True)
    assert "[]" in said[2] and "skipped" in said[3] and "strategy.data.kind=fsdp" in said[4]
    assert said[-1].count("'") == 6  # three violations


def test_the_page_names_only_what_exists():
    for name in re.findall(r"pr\.(\w+)", PAGE):
        assert name in pr.__all__
