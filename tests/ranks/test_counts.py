"""What losses, auxiliary losses and statistics are divided by, where replicas have different numbers of targets."""

from __future__ import annotations

from typing import Any

import pytest

from parallelrun.training.loop.build import Training
from tests.matrix import FULL
from tests.parity import assert_equal, parity
from tests.vision import RESNET

BERT: dict[str, Any] = {"model.name": "bert", "model.preset": "bert", "model.layers": 2}
EXPERTS: dict[str, Any] = {
    "dataset.pack": True, "model.layers": 2, "model.seq": 16, "model.experts": 4,
    "model.router.aux_coefficient": 0.5, "model.router.z_coefficient": 0.1,
}  # fmt: skip


def data(kind: str, **settings: Any) -> dict[str, Any]:
    return {"strategy.data.kind": kind, **{f"strategy.data.{key}": value for key, value in settings.items()}}


STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"dp": 2, **data("ddp")},
    "ring of three": {"dp": 3, **data("ring")},
    "zero1": {"dp": 2, "microbatches": 2, **data("zero1")},
    "zero2": {"dp": 2, **data("zero2")},
    "fsdp": {"dp": 2, **data("fsdp")},
    "local sgd": {"dp": 2, **data("local_sgd")},
    "local sgd over cp": {"dp": 2, "cp": 2, **data("local_sgd")},
    "diloco": {"dp": 2, **data("diloco")},
    "adasum": {"dp": 2, **data("horovod", reduction="adasum")},
    "process sets": {"dp": 3, **data("horovod", process_sets=((0, 2),))},
    "join, by all": {"dp": 3, **data("horovod", worker_batches=(5, 1, 2))},
    "cp": {"cp": 2, "dp": 2},
    "pipeline": {"pp": 2, "dp": 2, "microbatches": 2},
}


# Strategies divide by the number of targets, from wherever it comes; the experts' losses have further divisors.
FULL_MATRIX = ("ring of three", "local sgd over cp")
CELLS = [(EXPERTS, strategy) for strategy in STRATEGIES if FULL or strategy not in FULL_MATRIX]
CELLS += [(BERT, strategy) for strategy in (STRATEGIES if FULL else ("zero2", "pipeline"))]


@pytest.mark.parametrize(
    ("model", "strategy"), CELLS, ids=[f"{model.get('model.name', 'experts')}-{strategy}" for model, strategy in CELLS]
)
def test_replicas_have_different_numbers_of_targets(model: dict[str, Any], strategy: str) -> None:
    assert_equal(parity({"global_batch": 12, **model, **STRATEGIES[strategy]}))


JOIN: dict[str, Any] = {**RESNET, "dp": 3, "global_batch": 12, **data("horovod", worker_batches=(1, 5, 2))}


@pytest.mark.parametrize("samples", ["2", "4", "local"] if FULL else ["2", "local"])
def test_running_statistics_are_those_of_workers_with_samples(samples: str) -> None:
    assert_equal(parity({**JOIN, "model.norm_samples": samples}))


def statistics_by_all_workers(training: Training) -> None:
    right = training.statistics.finish_step
    training.statistics.finish_step = lambda applied, num_active: right(applied)


def test_statistics_divided_by_all_workers_are_seen() -> None:
    assert not parity({**JOIN, "model.norm_samples": "2"}, fault=statistics_by_all_workers)["passed"]
