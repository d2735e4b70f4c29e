"""horovodrun's words and strategy=horovod as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.launcher import run_to_end
from tests.cli.test_program import TINY


def test_a_run_with_everything_leaves_a_timeline_and_counts_what_it_sent(tmp_path):
    words = ["strategy=horovod", "dp=2", "strategy.data.timeline=true", "strategy.data.compression=fp16"]
    words += ["strategy.data.worker_batches=[3,2]", "optimizer.lr_scale=linear", *TINY, "steps=3"]
    words.remove("steps=1")
    done = run_to_end(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    directory = next(Path(tmp_path).glob("runs/*/*/timeline.json")).parent
    events = [event["name"] for event in json.loads((directory / "timeline.json").read_text().rstrip(",\n") + "]")]
    assert "JOIN: worker 1 has no batch after step 2" in events and "STEP 3" in events
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["communication_as_predicted"] and summary["equivalence"] == "replay"
    rates = [json.loads(line)["lr"] for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert len(rates) == 3 and max(rates) <= 2 * 3e-3 and max(rates) > 3e-3 * 0.5


def test_verify_holds_compressed_gradients_against_their_own_rule(tmp_path):
    words = ["verify", "strategy=horovod", "dp=2", "strategy.data.compression=powersgd", *TINY]
    done = run_to_end(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (verdict,) = Path(tmp_path).glob("runs/*/*/verify.json")
    document = json.loads(verdict.read_text())
    assert document["passed"] and "PowerSGD of rank 4" in document["equivalence_detail"]
