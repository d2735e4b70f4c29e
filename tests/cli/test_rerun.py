"""A run is repeated from its config.yaml: the same bits; one that was changed is told apart."""

from __future__ import annotations

import json

from tests.cli.launcher import run_to_end as run
from tests.cli.test_program import TINY

FAIL_ON = ("--fail-on", "loss_difference>0")


def test_a_repeated_run_has_the_same_losses(tmp_path):
    words = [*TINY[:5], "steps=4", "global_batch=4", "strategy=tp", "tp=2", "dropout=0.1", "checkpoint.last=false"]
    assert run(*words, cwd=tmp_path).returncode == 0
    (first,) = (tmp_path / "runs").glob("gpt-*/*/metrics.jsonl")
    again = run(f"recipe={first.parent}/config.yaml", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    same = run("compare", str(first.parent), "latest", *FAIL_ON, cwd=tmp_path)
    assert same.returncode == 0 and "bitwise equal in 4 common steps" in same.stdout, same.stderr
    loss = [json.loads(line)["loss"] for line in first.read_text().splitlines()][2]
    first.write_text(first.read_text().replace(f'"loss": {loss!r}', '"loss": 1.0'))
    changed = run("compare", str(first.parent), "latest", *FAIL_ON, cwd=tmp_path)
    assert changed.returncode == 4 and "part at step 3" in changed.stdout
