"""Going on with a run, as a user does: what is taken, what is said, and what is left when it is through."""

from __future__ import annotations

import json

from tests.cli.launcher import run_program

TINY = ["model=gpt", "model.layers=1", "model.hidden=16", "model.heads=2", "model.seq=8", "dataset=synthetic"]
DDP = [*TINY, "strategy=ddp", "dp=2", "global_batch=4", "eval.every=0", "steps=4", "checkpoint.every=3"]


def program(folder, name, *words):
    done = run_program(folder / name, list(words), {}, 2)
    return done.wait(), done


def runs_of(folder):
    return sorted(path.parent for path in (folder / "runs").glob("*/*/config.yaml"))


def test_a_finished_run_says_so_and_is_trained_on_with_its_own_configuration_but_not_its_own_code(tmp_path):
    code, first = program(tmp_path, "first", *DDP, "resume=auto")
    assert code == 0, first.stderr
    assert "no checkpoint of this training under" in first.stderr and "starting fresh" in first.stderr
    [run] = runs_of(tmp_path)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_3", "step_4"]  # the last by default

    for name, words in (("latest", [*DDP, "resume=latest"]), ("auto", [*DDP, "resume=auto"])):
        code, again = program(tmp_path, name, *words)
        assert code == 0, again.stderr
        assert f"finished: {run}/checkpoints/step_4 is step 4 of 4, nothing is left to do" in again.stdout
        assert runs_of(tmp_path) == [run]

    code, more = program(tmp_path, "more", "resume=latest", "steps=5", "checkpoint.last=false")
    assert code == 0, more.stderr
    said = " ".join(more.stderr.split())
    assert "resume=latest: step 4 of " in said and "the newest checkpoint of 1 run under" in said
    assert "(checkpoint.every=3, changed: checkpoint.last, steps)" in said
    assert "resharding" not in more.stdout
    [new] = set(runs_of(tmp_path)) - {run}
    assert new.parent == run.parent  # the same model, strategy and degrees
    assert sorted(path.name for path in (new / "checkpoints").iterdir()) == ["step_4", "step_5"]
    assert json.loads((new / "manifest.json").read_text())["resumed"]["checkpoint"] == f"{run}/checkpoints/step_4"
    assert [json.loads(line)["step"] for line in (new / "metrics.jsonl").read_text().splitlines()] == [5]

    # Code of a saved run is named again by the user.
    config = (new / "config.yaml").read_text().replace("source: null", f"source: {tmp_path}/evil.py:build")
    (new / "config.yaml").write_text(config)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')")
    code, refused = program(tmp_path, "refused", "resume=latest", "steps=9")
    assert code == 2 and "code must be named on the command line" in refused.stderr
    assert not (tmp_path / "owned").exists() and {*runs_of(tmp_path)} == {run, new}
