"""Local SGD and DiLoCo as a user runs them: what is sent, what is saved, what verify says of a wrong one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from parallelrun.base.context import WorkerContext
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.contract.plan import Plan
from parallelrun.training.verify import run as verify
from tests.cli.launcher import run_launcher

LOCAL_SGD = {"dp": 2, "strategy.data.kind": "local_sgd", "strategy.data.sync_every": 3, "model.layers": 1}
DILOCO = {"dp": 2, "strategy.data.kind": "diloco", "strategy.data.sync_every": 10, "model.layers": 1}
TRAIN = "parallelrun.launch.ranks.worker:run"


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def verify_with_momentum_forgotten(config: Config, plan: Plan, context: WorkerContext) -> int:
    """`verify` where DiLoCo begins every round without momentum."""
    from parallelrun.strategies.data.diloco.runtime import DiLoCoRuntime

    right = DiLoCoRuntime.synchronise

    def wrong(self: DiLoCoRuntime) -> None:
        for momentum in self._momentum:
            momentum.zero_()
        right(self)

    DiLoCoRuntime.synchronise = wrong
    return verify.run(config, plan, context)


def test_verify_passes_and_ends_with_4_on_a_planted_bug_whatever_the_rounds(tmp_path: Path) -> None:
    for worker, code in (("parallelrun.training.verify.run:run", 0), (f"{__name__}:verify_with_momentum_forgotten", 4)):
        folder = tmp_path / str(code)
        folder.mkdir()
        ended = run_launcher(folder, overrides={**DILOCO, "verb": "verify"}, worker=worker)
        assert ended.wait() == code, ended.stderr
        verdict = read(ended.directory / "verify.json")
        assert verdict["passed"] == (code == 0) and verdict["equivalence"] == "replay"
        assert verdict["equivalence_detail"] == "DiLoCo: an outer step every 2 steps"
        if code:
            assert verdict["max_error"]["params"] > 1e-3 and verdict["max_error"]["initial"] == 0


def test_the_summary_says_what_a_step_sends_on_average(tmp_path: Path) -> None:
    ended = run_launcher(tmp_path, overrides={**LOCAL_SGD, "steps": 8}, worker=TRAIN)
    assert ended.wait() == 0, ended.stderr
    summary, rows = read(ended.directory / "summary.json"), read(ended.directory / "comm.json")["rows"]
    (mine,) = [row for row in rows if row["purpose"] == "sync" and row["rank"] == 0]
    assert mine["every"] == 3 and mine["payload_bytes"] == 4 * summary["parameters"]
    control = sum(row["payload_bytes"] for row in rows if row["purpose"] == "control")
    assert summary["payload_bytes_per_step"] == round(2 * mine["payload_bytes"] / 3 + control)
    assert summary["communication_as_predicted"] and summary["equivalence"] == "replay"
    assert "sync (every 3 steps)" in ended.stdout


def test_a_run_too_short_for_a_round_meets_at_its_end_and_is_counted(tmp_path: Path) -> None:
    ended = run_launcher(tmp_path, overrides={**DILOCO, "steps": 3}, worker=TRAIN)
    assert ended.wait() == 0, ended.stderr
    rows = read(ended.directory / "comm.json")["rows"]
    assert sum(row["calls"] for row in rows if row["purpose"] == "sync") == 2
    metrics = [json.loads(line) for line in (ended.directory / "metrics.jsonl").open()]
    assert [row["sync"] for row in metrics] == [False, False, True]
