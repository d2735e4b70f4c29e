"""Packed documents train under every kind of plan as on one device, and bugs that would mix documents are seen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from parallelrun.base.context import WorkerContext
from parallelrun.data import open_dataset
from parallelrun.data.order import make_sampler
from parallelrun.models.blockwise.product import AttentionCall
from parallelrun.models.documents import DocumentBounds
from parallelrun.planner.predict import prediction
from parallelrun.training.loop import training_loop
from parallelrun.training.loop.build import Training, build
from parallelrun.training.loop.reader import Batch
from parallelrun.training.metrics.recorder import Recorder
from tests.matrix import FULL, shared
from tests.parity import assert_equal, parity
from tests.plans import tiny_config, tiny_plan

PACKED: dict[str, Any] = {"dataset.pack": True, "model.seq": 16}
LEARNED = {"model.position": "learned"}
SEQUENCE = {"strategy.tensor.sequence_parallel": True}
ORDER = "strategy.context.order"
EXPERTS = {"model.experts": 4, "model.router.capacity_factor": 1.0, "model.router.group_samples": 2}
CELLS: list[dict[str, Any]] = [
    {"dp": 2, "strategy.data.kind": "fsdp", "model.kv_heads": 2},
    {"tp": 2, "dropout": 0.1, "model.attention_dropout": 0.1, **SEQUENCE},
    {"tp": 2, **SEQUENCE, **LEARNED},
    {"pp": 3, "microbatches": 4, "model.layers": 3, "recompute": "full"},
    {"pp": 2, "schedule": "zero_bubble", "virtual_stages": 1, "microbatches": 2, "recompute": "full"},
    {"tp": 4, "layout": "2d", "dropout": 0.1, **LEARNED},
    {"tp": 8, "layout": "3d", "model.hidden": 32, "model.layers": 1},
    {"tp": 2, "cp": 2, "layout": "2d", "grid": "2x1", "precision.name": "bf16"},
    {"dp": 2, "ep": 2, "model.experts": 4, "model.router.top_k": 2},
    {"cp": 2, "ep": 2, "strategy.expert.kind": "capacity", **EXPERTS},
    {"cp": 2, "pp": 2, "microbatches": 2, **LEARNED},
    {"cp": 2, ORDER: "striped", "model.kv_heads": 2},
    {
        "cp": 2,
        "strategy.context.kind": "allgather",
        ORDER: "contiguous",
        "dropout": 0.1,
        "model.attention_dropout": 0.1,
    },
    {"cp": 2, "strategy.context.kind": "ulysses", "tp": 2, **SEQUENCE},
    {"cp": 2, "model.name": "bert", "model.preset": "bert", "model.layers": 2},
    {"pp": 2, "dp": 2, "model.name": "bert", "model.preset": "bert", "model.layers": 2},
]
if FULL:
    CELLS += [
        {"tp": 4, "cp": 2, "layout": "2.5d", "depth": 1, "precision.name": "bf16"},
        {"cp": 4, ORDER: "striped", "model.kv_heads": 2},
        {"cp": 4, "strategy.context.kind": "usp", "strategy.context.ulysses": 2},
    ]


def title(cell: dict[str, Any]) -> str:
    return " ".join(f"{key.split('.')[-1]}={value}" for key, value in cell.items())


@pytest.mark.parametrize("cell", shared(CELLS), ids=title)
def test_packed_documents_equal_one_device(cell: dict[str, Any]) -> None:
    assert_equal(parity({**PACKED, **cell}))


def lose_bounds(training: Training) -> None:
    """The rank of the last stage reads no boundaries."""
    if training.mesh.coordinate.get("pp", 0) == training.plan.last_stage_pp_rank:
        read = training.reader.batch
        training.reader.batch = lambda step: without(read(step))  # type: ignore[method-assign]


def without(batch: Batch) -> Batch:
    return Batch(batch.inputs, batch.targets, batch.sample_ids)


def count_padding(training: Training) -> None:
    """One replica divides by every token, padding included."""
    if training.mesh.coordinate.get("dp", 0) == 1:
        read = training.reader.batch

        def wrong(step: int) -> Batch:
            batch = read(step)
            assert batch.targets is not None
            return Batch(batch.inputs, batch.targets.clamp(min=0), batch.sample_ids, batch.documents)

        training.reader.batch = wrong  # type: ignore[method-assign]


def in_one_step(training: Training, holder: type, name: str, wrong: Any) -> None:
    """Replace an attribute of a class until the first step is over: these ranks run other tests later."""
    right, take = getattr(holder, name), training.runner.train
    setattr(holder, name, wrong(right))

    def once(batch: Batch, scale: float) -> Any:
        try:
            return take(batch, scale)
        finally:
            setattr(holder, name, right)

    training.runner.train = once  # type: ignore[method-assign]


def first_part(training: Training) -> None:
    """Every rank of a grid takes the boundaries of the first part of the samples."""
    in_one_step(training, DocumentBounds, "part", lambda right: lambda self, index, count: right(self, 0, count))


def whole_tiles(training: Training) -> None:
    """Queries see the keys of other ranks whatever documents they are in."""

    def wrong(right: Any) -> Any:
        def tiles(self: AttentionCall, source: int) -> Any:
            mine = self.transport.group.index == source
            return right(self if mine else replace(self, documents=None), source)

        return tiles

    in_one_step(training, AttentionCall, "tiles", wrong)


BUGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "boundaries lost behind a pipeline": (lose_bounds, {"pp": 2, "microbatches": 2}),
    "padding counted as tokens": (count_padding, {"dp": 2}),
    "keys of another document over cp": (whole_tiles, {"cp": 2}),
    "another rank's samples": (first_part, {"tp": 2, "grid": "2x1", "layout": "2d"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_seen(bug: str) -> None:
    fault, cell = BUGS[bug]
    found = parity({**PACKED, **cell}, fault=fault)
    assert not found["passed"], found["max_error"]


def test_valid_targets_are_counted_before_backward_as_predicted() -> None:
    rows = [row for row in prediction.collectives(tiny_plan({**PACKED, "dp": 2}), 0) if row.purpose == "control"]
    assert {row.axis for row in rows} == {"world", "dp"}


def run_to(folder: Any, steps: int, resume: str | None) -> int:
    changes = {**PACKED, "model.seq": 64, "steps": steps, "resume": resume, "optimizer.schedule": "constant"}
    training = build(tiny_config(changes), tiny_plan(changes), torch.device("cpu"))
    context = WorkerContext(
        0, 1, 0, torch.device("cpu"), folder, lambda *_: None, lambda: False, lambda step: None, console_owner=False
    )
    return training_loop.train(training, context, Recorder(training, context))


def test_a_run_counts_tokens_without_padding_also_after_a_resume(tmp_path: Path, run_ranks: Any) -> None:
    (tmp_path / "rest").mkdir()
    assert run_ranks(1, run_to, tmp_path, 2, None)[0] == 0
    assert run_ranks(1, run_to, tmp_path / "rest", 4, str(tmp_path / "checkpoints" / "step_2"))[0] == 0
    files = [path / "metrics.jsonl" for path in (tmp_path, tmp_path / "rest")]
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    config = tiny_config({**PACKED, "model.seq": 64})
    dataset = open_dataset(config, tiny_plan({**PACKED, "model.seq": 64}).spec)
    sampler = make_sampler(len(dataset.train), 8, config.seed, ())
    read = [sampler.indices(step, 0, 8)[0] for step in (1, 2, 3, 4)]
    valid = [sum(int((dataset.train.sample(int(one))[1] >= 0).sum()) for one in each) for each in read]
    assert min(valid) < 8 * 64 and [row["tokens"] for row in rows] == np.cumsum(valid).tolist()
    summary = json.loads((tmp_path / "summary.json").read_text())
    found = dataset.train.packing()
    assert summary["packing"]["padding"] == pytest.approx(1 - found.tokens / 64)
