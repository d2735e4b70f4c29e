"""A TensorFlow user's cluster on this host, and on others."""

from __future__ import annotations

import json

from tests.cli.launcher import run_program

TINY = "model=gpt dataset=synthetic model.layers=1 model.hidden=16 model.heads=4 model.seq=8 global_batch=4"


def test_other_hosts_are_refused_and_nothing_is_started(tmp_path):
    words = [*TINY.split(), "strategy=ps", "cluster.worker=[alpha:2222,beta:2222]", "cluster.ps=[gamma:2222]"]
    one = run_program(tmp_path / "here", words, {}, world=3)
    assert one.wait() == 3
    assert "-H alpha:1,beta:1,gamma:1" in one.stderr and not one.runs.exists()


def test_a_cluster_on_this_host_is_started_whole(tmp_path):
    words = [*TINY.split(), "strategy=ps", "cluster.worker=[localhost:1,localhost:2]", "cluster.ps=[localhost:3]"]
    one = run_program(tmp_path / "here", [*words, "steps=1", "eval.batches=1"], {}, world=3)
    assert one.wait() == 0, one.stderr
    assert json.loads((one.directory / "summary.json").read_text())["world"] == 3
