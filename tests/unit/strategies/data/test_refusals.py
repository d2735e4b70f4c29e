"""What data strategies refuse: each message says what is wrong, and each suggestion says what to type instead."""

from __future__ import annotations

from typing import Any

import pytest

from parallelrun.base.errors import ConfigError
from parallelrun.planner.resolve.resolve_config import resolve
from tests.plans import tiny_config, tiny_plan

KIND = "strategy.data.kind"


def data(kind: str, **settings: Any) -> dict[str, Any]:
    """Overrides; those that are no keys of `strategy.data` are given with `|`."""
    return {KIND: kind, **{f"strategy.data.{key}": value for key, value in settings.items()}}


def problems(overrides: dict[str, Any], requested: frozenset[str] = frozenset()) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(tiny_config(overrides), given=requested)
    return [f"{p.kind}: {p.what} -> {p.suggestion} ({p.where})" for p in caught.value.problems]


EXPERTS = {"dp": 4, "ep": 2, "model.experts": 4, "model.expert_period": 2, "model.layers": 2}
ZERO_BUBBLE = {"dp": 2, "pp": 2, "model.layers": 4, "strategy.pipeline.kind": "zero_bubble"}
NO_ROWS = {"dp": 2, "tp": 4, "model.vocab": 5, "dataset.vocab": 5}
GROUPS = data("ring", algorithm="hierarchical")
PS = {"strategy.name": "ps", "strategy.demo": {"dp": 3}, "global_batch": 12, "dp": 3}
DILOCO, POWERSGD = {"dp": 2} | data("diloco"), {"dp": 2} | data("ddp", compression="powersgd")

# overrides, then parts of one message with its kind, suggestion and key
REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"dp": 4} | data("fsdp", shard=3), ("does not divide dp=4", "-> strategy.data.shard=2")),
    ({"dp": 4} | data("fsdp", shard=8), ("does not divide dp=4", "-> strategy.data.shard=4")),
    ({"dp": 4} | data("fsdp", shard=1), ("splits nothing", "-> strategy.data.kind=ddp")),
    (
        ZERO_BUBBLE | data("fsdp", reshard_after_forward=True),
        ("reshard_after_forward=true under schedule=zero_bubble", "reshard_after_forward=false"),
    ),
    (
        ZERO_BUBBLE | {"strategy.pipeline.kind": "zbv"} | data("fsdp", reshard_after_forward=True),
        ("reshard_after_forward=true under schedule=zbv", "schedule=1f1b"),
    ),
    (NO_ROWS | data("fsdp"), ("not_built", "leaves a rank without rows", "strategy.data.kind=zero1")),
    # compression
    ({"dp": 2, "strategy.data.compression": "zip"}, ("is unknown",)),
    ({"dp": 2, "strategy.data.powersgd_rank": 2}, ("powersgd_rank=2 is read by compression=powersgd only",)),
    (POWERSGD | {"strategy.data.powersgd_rank": 0}, ("at least 1",)),
    # independent replicas
    (DILOCO | {"strategy.data.sync_every": 0}, ("(strategy.data.sync_every)",)),
    (DILOCO | {"strategy.data.outer_lr": 0.0}, ("(strategy.data.outer_lr)",)),
    (DILOCO | {"strategy.data.outer_momentum": 1.0}, ("(strategy.data.outer_momentum)",)),
    (DILOCO | {"strategy.data.outer_momentum": 0.0}, ("-> strategy.data.outer_nesterov=false",)),
    # ring
    ({"dp": 2} | data("ring", algorithm="rnig"), ("algorithm=rnig is unknown",)),
    ({"dp": 6} | GROUPS | {"strategy.data.group_size": 4}, ("arithmetic: inner groups of 4", "dp=6", "group_size=3")),
    ({"dp": 6} | GROUPS | {"cluster.gpus_per_node": 4}, ("(cluster.gpus_per_node / tp=1)",)),
    ({"dp": 4} | GROUPS | {"strategy.data.group_size": 0}, ("not a whole number",)),
    ({"dp": 4} | data("ring", group_size=2), ("unread", "read by algorithm=hierarchical only")),
    # horovod
    ({"dp": 3} | data("horovod", reduction="adasum"), ("3 is no power of two", "dp=2")),
    ({"dp": 4} | data("horovod", reduction="adasum", compression="powersgd"), ("compresses sums", "fp16")),
    ({"dp": 4} | data("horovod", reduction="adasum", algorithm="ring"), ("its own exchange", "leave it out")),
    ({"dp": 4} | data("horovod", reduction="median"), ("unknown", "average")),
    ({"dp": 4} | data("horovod", process_sets=((0, 1), (1, 2))), ("worker 1 is in several sets", "[[0,1],[2]]")),
    ({"dp": 4} | data("horovod", process_sets=((0, 0, 1),)), ("worker 0 is in several sets", "[[0,1]]")),
    ({"dp": 4} | data("horovod", process_sets=((0, 4), (2, -1))), ("no worker -1: the 4 workers", "[[0],[2]]")),
    ({"dp": 4} | data("horovod", process_sets=((0, 1), ())), ("a set has no workers", "[[0,1]]")),
    (
        {"dp": 4} | data("horovod", process_sets=((0, 1, 3),), reduction="adasum"),
        ("3 is no power of two", "reduction=average"),
    ),
    ({"dp": 2} | data("horovod", worker_batches=(3,)), ("for each of the 2 workers", "[3,3]")),
    ({"dp": 2} | data("horovod", worker_batches=(2, 1)), ("nobody has a batch for step 3 of 3", "steps=2")),
    (
        {"dp": 2} | data("horovod", worker_batches=(3, 1), reduction="adasum"),
        ("join is not defined with adasum", "leave"),
    ),
    (
        {"dp": 2} | data("horovod", worker_batches=(3, 1), process_sets=((0,), (1,))),
        ("join is not defined with process sets", "leave"),
    ),
    # parameter servers
    (PS | data("ps") | {"consistency": "asinc"}, ("consistency=asinc is unknown; it is one of sync, async, ssp",)),
    (PS | data("ps") | {"consistency": "async", "staleness": 2}, ("contradiction: ", "no bound -> consistency=ssp")),
    (PS | data("ps") | {"consistency": "sync", "staleness": 2}, ("contradiction: ", "so no gradient is stale")),
    (PS | data("ps") | {"consistency": "ssp", "staleness": -1}, ("staleness=-1 is not a whole number",)),
    (PS | data("ps") | {"backup_workers": 3}, ("arithmetic: ", "of dp=3: an update needs", "backup_workers=2")),
    (PS | data("ps") | {"backup_workers": 1, "consistency": "async"}, ("so none is spare -> consistency=sync",)),
    (PS | data("ps", delays=[0, 0, 0, 1.0]), ("has 4 entries, but there are 3 workers",)),
    (PS | data("ps", delays=[0, -1.0]), ("each delay is a number of seconds, at least 0",)),
    (
        PS | data("ps") | {"model.experts": 4, "model.router.bias_rate": 0.1, "consistency": "async"},
        ("not_built: ", "which workers of ps exchange only if", "consistency=sync without backup_workers"),
    ),
    (PS | data("ps") | {"servers": 500}, ("servers=500: the model has only",)),
    (PS | data("ps") | {"world": 1, "dp": None}, ("arithmetic: world 1, 1 server: no rank is left", "-> world=2")),
    (PS | data("ps") | {"world": 3, "servers": 3, "dp": None}, ("to be a worker -> world=4 or servers=2",)),
    (PS | data("ps") | {"world": 6}, ("dp 3 x tp 1 = 3 ranks, but world 6, 1 server", "-> world=4 or servers=3")),
    (PS | data("ps") | {"servers": 0}, ("servers=0 is not a whole number of at least 1",)),
    # experts
    (
        EXPERTS | data("ps", backup_workers=2) | {"world": 9, "dp": None, "tp": 2},
        ("arithmetic: ", "backup_workers=2 of dp=4, 2 for a worker (ep=2)", "world=13 or backup_workers=1"),
    ),
    (EXPERTS | data("ps", delays=[0, 0, 1.0]), ("has 3 entries, but there are 2 workers", "dp=6")),
    (
        EXPERTS | {"dp": 6} | data("horovod", reduction="adasum"),
        ("arithmetic: ", "in pairs: 3 is no power of two -> dp=4"),
    ),
    (
        EXPERTS | data("horovod", process_sets=[[0, 2], [3]]),
        ("undefined: ep=2: workers 0 to 1 hold the experts of", "-> strategy.data.process_sets=[[0,1,2,3]] or ep=1"),
    ),
    (
        EXPERTS | data("horovod", worker_batches=[3, 3, 3, 2]),
        ("undefined: ep=2: workers 2 to 3", "-> strategy.data.worker_batches=[3,3,3,3] or ep=1"),
    ),
    (
        EXPERTS | {"ep": 4} | data("fsdp", shard=2),
        ("ep=4 does not divide strategy.data.shard=2", "strategy.data.shard=4"),
    ),
    (EXPERTS | {"dp": 12} | GROUPS | {"strategy.data.group_size": 3}, ("strategy.data.group_size=4",)),
]


def name_of(value: Any) -> str:
    return "-".join(map(str, value.values()))[:60] if isinstance(value, dict) else ""


@pytest.mark.parametrize(("overrides", "parts"), REFUSED, ids=name_of)
def test_it_is_refused_with_a_cause_and_a_suggestion(overrides: dict[str, Any], parts: tuple[str, ...]) -> None:
    texts = problems({"global_batch": 12, **overrides})
    assert any(all(part in text for part in parts) for text in texts), texts


@pytest.mark.parametrize(
    ("key", "value", "kind", "reader"),
    [
        ("strategy.data.sync_every", 4, "ddp", "local_sgd"),
        ("strategy.data.outer_lr", 0.5, "local_sgd", "diloco"),
        ("strategy.data.shard", 2, "local_sgd", "fsdp"),
        ("strategy.data.compression", "fp16", "fsdp", "ddp"),
        ("strategy.data.algorithm", "ring", "ddp", "ring"),
        ("staleness", 2, "ring", ""),
        ("servers", 2, "ddp", ""),
    ],
)
def test_keys_that_a_strategy_does_not_read_are_refused_with_one_that_does(key, value, kind, reader) -> None:
    (text,) = problems({"dp": 2, KIND: kind, key: value}, frozenset({key}))
    assert f"{value} is read by none" in text and f"({key})" in text and reader in text


def test_settings_next_to_a_refused_one_are_legal() -> None:
    assert tiny_plan({**NO_ROWS, KIND: "zero1"}) and tiny_plan({**NO_ROWS, **data("fsdp"), "model.vocab": 7})
    assert tiny_plan({**DILOCO, "strategy.data.outer_momentum": 0.0, "strategy.data.outer_nesterov": False})
    assert tiny_plan({**EXPERTS, "ep": 1, **data("ring", compression="fp16")})
    config = tiny_config({"dp": 2, "steps": 60, "verb": "verify", **data("horovod", worker_batches=(3, 1))})
    assert resolve(config).equivalence.kind == "replay", "verify has steps of its own"
