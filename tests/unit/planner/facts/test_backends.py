"""`plan` says what would carry the collectives of each axis."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from parallelrun.planner.facts.document import backends
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.report.plans.plan import show
from tests.plans import tiny_config

CELL = {"dp": 2, "tp": 2, "pp": 2, "strategy.pipeline.kind": "gpipe"}
HOSTS_OF_4, HOSTS_OF_2 = {"cluster.gpus_per_node": 4}, {"cluster.gpus_per_node": 2}
HSDP = {"dp": 4, "strategy.data.kind": "fsdp", "strategy.data.shard": 2}
CASES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "one host": (CELL, {"pp": "shm", "dp": "shm", "tp": "shm"}),
    "a stage on each host": ({**CELL, **HOSTS_OF_4}, {"pp": "gloo", "dp": "shm", "tp": "shm"}),
    "a copy on each host": ({**CELL, **HOSTS_OF_2}, {"pp": "gloo", "dp": "gloo", "tp": "shm"}),
    "two ranks on each host": ({"dp": 4, **HOSTS_OF_2}, {"dp": "gloo"}),
    "two hosts": ({"dp": 4, "cluster.nodes": 2}, {"dp": "gloo"}),
    "hsdp": ({**HSDP, **HOSTS_OF_2}, {"dp_replicate": "gloo", "dp_shard": "shm", "dp": "gloo"}),
    "gloo asked for": ({**CELL, "backend": "gloo"}, {"pp": "gloo", "dp": "gloo", "tp": "gloo"}),
    "gpus": ({**CELL, "device": "cuda"}, {"pp": "nccl", "dp": "nccl", "tp": "nccl"}),
    "one worker, one server": ({"dp": 1, "servers": 1, "strategy.data.kind": "ps"}, {"world": "shm"}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_backend_of_each_axis(case: str) -> None:
    overrides, expected = CASES[case]
    config = tiny_config(overrides)
    assert backends(resolve(config), config) == expected


@pytest.mark.parametrize(
    ("overrides", "device"),
    [
        ({**HOSTS_OF_4, "verb": "plan"}, "cuda"),
        ({**HOSTS_OF_4, "verb": "explain"}, "cuda"),
        ({**HOSTS_OF_4, "verb": "run"}, "cpu"),
        ({**HOSTS_OF_4, "verb": "plan", "device": "cpu"}, "cpu"),
        ({**HOSTS_OF_4, "verb": "plan", "cluster.cores": 4}, "cpu"),
        ({"verb": "plan"}, "cpu"),
    ],
)
def test_what_starts_nothing_is_planned_for_the_gpus_of_the_cluster(overrides: dict[str, Any], device: str) -> None:
    assert resolve(tiny_config({**CELL, **overrides})).device == device


def shown(overrides: dict[str, Any]) -> str:
    config, text = tiny_config(overrides), io.StringIO()
    show(resolve(config), config, Console(file=text, width=120))
    return next(line.rstrip() for line in text.getvalue().splitlines() if line.startswith("backend"))


def test_plan_says_so_in_one_line() -> None:
    assert shown(CELL).split(maxsplit=1)[1] == "shared memory"
    assert shown({**CELL, **HOSTS_OF_4}).split(maxsplit=1)[1] == "pp: gloo; dp, tp: shared memory"
    assert shown({"dp": 4, **HOSTS_OF_2}).split(maxsplit=1)[1] == "gloo"
