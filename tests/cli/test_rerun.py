"""`runs rerun` repeats a run of two ranks: the same bits; a run that was changed is told apart."""

from __future__ import annotations

import json

from tests.cli.launcher import run_to_end as run
from tests.cli.test_program import TINY


def test_a_rerun_has_the_same_losses(tmp_path):
    words = [*TINY[:5], "steps=4", "global_batch=4", "strategy=tp", "tp=2", "dropout=0.1", "checkpoint.last=false"]
    assert run(*words, cwd=tmp_path).returncode == 0
    again = run("runs", "rerun", "latest", "--check", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "bitwise equal in 4 common steps" in again.stdout
    (first, second) = sorted((tmp_path / "runs").glob("gpt-*/*/metrics.jsonl"))
    rows = [[json.loads(line) for line in path.read_text().splitlines()] for path in (first, second)]
    assert [row["loss"] for row in rows[0]] == [row["loss"] for row in rows[1]] and len(rows[0]) == 4

    text = first.read_text().replace(f'"loss": {rows[0][2]["loss"]!r}', '"loss": 1.0')
    first.write_text(text)
    changed = run("runs", "rerun", str(first.parent), "--check", cwd=tmp_path)
    assert changed.returncode == 4 and "part at step 3" in changed.stdout
