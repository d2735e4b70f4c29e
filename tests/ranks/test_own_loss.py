"""A loss of the user's own, and samples by name from a dataset of the user's, train as on one device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.matrix import shared
from tests.parity import assert_equal, parity
from tests.ranks import ps_body

NETS = Path(__file__).parents[1] / "unit" / "other_nets.py"


def cell(net: str, loss: str | None, data: str | None, **more: Any) -> dict[str, Any]:
    source = {"dataset.name": "custom", "dataset.source": f"{NETS}:{data}"} if data else {"dataset.name": "digits"}
    return {
        "model.name": "module", "model.preset": "module", "model.source": f"{NETS}:{net}", "dataset.vocab": None,
        "model.vocab": None, "model.loss": loss and f"{NETS}:{loss}", "global_batch": 16, **source, **more,
    }  # fmt: skip


def data(kind: str, **more: Any) -> dict[str, Any]:
    return {"dp": 2, "strategy.data.kind": kind, **more}


ROUNDS = {"strategy.data.sync_every": 2}
CELLS = {
    "noise keyed by sample, ddp": cell("diffusion", "noise_loss", None, **data("ddp")),
    "noise keyed by sample, fsdp": cell("diffusion", "noise_loss", None, **data("fsdp")),
    "contrastive, zero2": cell("towers", "contrastive_loss", "items", **data("zero2")),
    "counts that differ, ddp": cell("towers", "two_tasks_loss", "items", **data("ddp")),
    "counts that differ by rank, microbatches": cell(
        "towers", "two_tasks_loss", "items", **data("zero1", microbatches=2)
    ),
    "counts that differ, ring": cell("towers", "two_tasks_loss", "divided_items", **data("ring")),
    "counts that differ, horovod": cell("towers", "two_tasks_loss", "items", **data("horovod")),
    "counts that differ, local_sgd": cell("towers", "two_tasks_loss", "items", **data("local_sgd", **ROUNDS)),
    "counts that differ, diloco": cell("towers", "two_tasks_loss", "items", **data("diloco", **ROUNDS)),
    "counts that differ, hsdp": cell(
        "towers", "two_tasks_loss", "items", **{**data("fsdp"), "dp": 4, "strategy.data.shard": 2}
    ),
    "inputs by name": cell("towers", None, "items", **data("fsdp")),
    "inputs by name, of an iterable": cell("towers", None, "stream", **data("ddp")),
}


@pytest.mark.parametrize("name", shared(CELLS))
def test_own_losses_and_own_data_are_exact(name: str) -> None:
    assert_equal(parity(CELLS[name]))


@pytest.mark.parametrize("consistency", ["sync", "async"])
def test_workers_of_a_parameter_server_count_by_the_own_loss(tmp_path: Path, consistency: str) -> None:
    overrides = cell("towers", "two_tasks_loss", "items", dp=2, **{"strategy.data.consistency": consistency})
    ps_body.run(tmp_path, overrides, "verify")
    document = json.loads((tmp_path / "verify.json").read_text())
    assert document["passed"], document["max_error"]


SENTENCES = {"dataset.name": "custom", "dataset.source": f"{NETS}:sentences", "model.seq": 16, "global_batch": 8,
             "model.vocab": None}  # fmt: skip


@pytest.mark.parametrize("plan", [{"dp": 2, "tp": 2}, {"pp": 2, "strategy.pipeline.kind": "1f1b"}], ids=str)
def test_tokens_of_an_own_dataset_with_ignored_targets_are_exact_under_any_plan(plan: dict[str, Any]) -> None:
    assert_equal(parity({**SENTENCES, **plan}))
