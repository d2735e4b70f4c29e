"""fp16 under a parameter server: an overflowing step changes no weights and lowers the worker's loss scale."""

from __future__ import annotations

import pytest

from tests.ranks.ps_body import document, run, updates

FP16 = {"precision.name": "fp16", "precision.loss_scale": 2.0**24, "global_batch": 12, "steps": 14}


@pytest.mark.parametrize(
    "overrides", [{"strategy.data.servers": 2}, {"strategy.data.consistency": "async"}], ids=["sync", "async"]
)
def test_what_overflows_is_skipped_until_the_scale_fits(tmp_path, overrides):
    run(tmp_path, {**FP16, **overrides})
    rows = [row for row in updates(tmp_path) if row.server == 0]
    for worker in range(3):
        mine = [row.applied for row in rows if worker in {push.worker for push in row.pushes}]
        assert len(mine) == 14 and not any(mine[:3]) and sum(mine) >= 2
    assert document(tmp_path, "summary.json")["state"] == "done"
