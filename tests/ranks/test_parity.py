"""Every legal composition of data, tensor and pipeline schedules up to 8 ranks equals one device."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import pytest

from tests.matrix import FULL, TWO_STEPS, covering, pairs, shared
from tests.parity import assert_equal, parity
from tests.plans import llama

DATA = {
    "ddp": {"strategy.data.kind": "ddp"},
    "zero1": {"strategy.data.kind": "zero1"},
    "zero2": {"strategy.data.kind": "zero2"},
    "fsdp": {"strategy.data.kind": "fsdp"},
    "fsdp_reshard": {"strategy.data.kind": "fsdp", "strategy.data.reshard_after_forward": True},
    "hsdp": {"strategy.data.kind": "fsdp", "strategy.data.shard": 2},
}
SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")
DEGREES = [d for d in product((1, 2, 4), repeat=3) if 1 < d[0] * d[1] * d[2] <= 8]  # dp, tp, pp
CHOSEN_DEGREES = [d for d in DEGREES if prod(d) <= 4 or min(d) > 1]  # the others differ from these in sizes alone
CHUNKED = {"zero2", "fsdp_reshard", "hsdp", "1f1b", "zbv"}  # with `loss_chunks`
Cell = tuple[tuple[int, int, int], str, str]  # degrees, data strategy, schedule


def is_legal(degrees: tuple[int, int, int], data: str, schedule: str) -> bool:
    """hsdp needs two copies of two shards; a schedule that splits backward and fsdp_reshard is refused as undefined."""
    return (data != "hsdp" or degrees[0] == 4) and not (data == "fsdp_reshard" and schedule in ("zero_bubble", "zbv"))


def every_cell() -> list[Cell]:
    """Degrees x data strategy where dp > 1 x schedule where pp > 1: all that is legal."""
    return [
        (degrees, data, schedule)
        for degrees in DEGREES
        for data in (DATA if degrees[0] > 1 else ["ddp"])
        for schedule in (SCHEDULES if degrees[2] > 1 else ["none"])
        if is_legal(degrees, data, schedule)
    ]


def settings_of(cell: Cell) -> dict[str, object]:
    """What can interact in a cell: that an axis is split, not into how many. hsdp under a schedule is fsdp's code.

    Other axes meet classes of schedules: one chunk a rank or two, backward whole or split.
    """
    (dp, tp, pp), data, schedule = cell
    kind = "one chunk" if dp * tp > 1 and schedule in ("naive", "gpipe", "1f1b") else schedule
    return {"dp": dp > 1, "tp": tp > 1, "data": data, "schedule": pp > 1 if data == "hsdp" else kind}


def cost_of(cell: Cell) -> float:
    """About how long a cell takes: a layer for every stage of every rank, and FSDP's own Python."""
    degrees, data, schedule = cell
    return prod(degrees) * (2 if schedule in ("interleaved", "zbv") else 1) * (1.3 if "fsdp" in data else 1)


def chosen_cells() -> list[Cell]:
    """Every pair of settings and `CHOSEN_DEGREES`, in little time; `test_pipeline.py` has schedules of four stages."""
    cells = every_cell()
    chosen = covering(cells, settings_of, cost=cost_of)
    covered = {degrees for degrees, _, _ in chosen}
    chosen += [
        next(cell for cell in cells if cell[0] == degrees) for degrees in CHOSEN_DEGREES if degrees not in covered
    ]
    return [cell for cell in cells if cell in chosen]


def overrides_of(dp: int, tp: int, pp: int, data: str, schedule: str) -> dict[str, Any]:
    """A cell's overrides: uneven vocab where tp splits it, sequence parallel in half of the tensor cells, a loss in
    chunks of unequal size in some of all.

    Pipelines have one layer a stage and, by `parity`, two microbatches a rank: enough for every phase of a schedule.
    """
    stages = 2 * pp if schedule in ("interleaved", "zbv") or pp == 1 else pp
    overrides: dict[str, Any] = {**TWO_STEPS, "dp": dp, "tp": tp, "pp": pp, "model.layers": stages, **DATA[data]}
    if pp > 1:
        overrides["strategy.pipeline.kind"] = schedule
    else:
        overrides["microbatches"] = 2
    if tp > 1:
        overrides["strategy.tensor.sequence_parallel"] = (dp + pp) % 2 == 0
    overrides["loss_chunks"] = 3 if {data, schedule} & CHUNKED or tp > dp * pp else 1
    overrides.update({"model.vocab": 37, "dataset.vocab": 37, "global_batch": 16, "model.label_smoothing": 0.1})
    return overrides


def name_of(cell: Cell) -> str:
    (dp, tp, pp), data, schedule = cell
    return f"dp{dp}-tp{tp}-pp{pp}-{data}-{schedule}"


@pytest.mark.parametrize("cell", shared(every_cell() if FULL else chosen_cells()), ids=name_of)
def test_plan_equals_one_device_in_fp64(cell: Cell) -> None:
    (dp, tp, pp), data, schedule = cell
    assert_equal(parity(overrides_of(dp, tp, pp, data, schedule)))


def test_the_chosen_cells_cover_what_can_interact() -> None:
    """Every legal pair of (strategy, schedule), (split axis, ...), and all degrees that are chosen."""
    cells, everything = chosen_cells(), every_cell()
    assert len(set(cells)) == len(cells) and set(cells) <= set(everything)
    covered, legal = (set().union(*(pairs(settings_of(cell)) for cell in some)) for some in (cells, everything))
    assert covered == legal
    assert {degrees for degrees, _, _ in cells} >= set(CHOSEN_DEGREES)


@pytest.mark.parametrize(
    "overrides",
    [
        {"pp": 2, "schedule": "zbv", "model.layers": 6, "dropout": 0.1, "recompute": "offload"},
        {"dp": 2, **DATA["fsdp_reshard"], "recompute": "offload", "optimizer.offload": True, "verify.steps": 2},
    ],
    ids=str,
)
def test_what_waits_on_the_host_comes_back(overrides: dict[str, Any]) -> None:
    assert_equal(parity(overrides))


@pytest.mark.parametrize("dp, tp, pp", [one for one in DEGREES if FULL or sorted(one) == [1, 2, 2]], ids=str)
def test_plan_equals_one_device_in_fp32_over_gloo(dp: int, tp: int, pp: int) -> None:
    """All other parity tests run in shared memory."""
    data, schedule = ("zero1" if pp == 1 else "fsdp") if dp > 1 else "ddp", "interleaved" if pp > 1 else "none"
    assert_equal(parity({**overrides_of(dp, tp, pp, data, schedule), "verify.precision": "fp32"}, backend="gloo"))


IN_FP8 = [
    llama(tp=2, pp=2, schedule="zero_bubble", strategy__tensor__sequence_parallel=True),
    {"dp": 2, **DATA["fsdp"], "tp": 2, "recompute": "selective"},
    {"dp": 2, **DATA["zero2"], "ep": 2, "model.experts": 4, "model.expert_period": 1, "model.shared_experts": 1},
    {"cp": 2, "tp": 2, "strategy.tensor.overlap": False, "compile": True},
]


@pytest.mark.parametrize("overrides", IN_FP8 if FULL else IN_FP8[:1], ids=str)
def test_products_in_fp8_equal_those_of_one_device(overrides: dict[str, Any]) -> None:
    """The same significands, which need no scales in fp64."""
    document = parity({"precision.name": "fp8", "model.layers": 2, **overrides})
    assert_equal(document)
    assert document["precision"] == "fp8_fp64" and document["tolerance"] == 1e-10


@pytest.mark.parametrize("tp", [2, 4] if FULL else [4])
def test_gpt2s_vocabulary_need_not_divide(tp: int) -> None:
    assert_equal(parity({"tp": tp, "model.vocab": 50257, "dataset.vocab": 50257, "model.layers": 1}))
