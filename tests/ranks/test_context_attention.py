"""cp: the same training as on one device under any composition, and what was predicted is sent, to the byte."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import Any

import pytest

from parallelrun.base.errors import ConfigError
from tests.matrix import FULL, TWO_STEPS, shared
from tests.parity import assert_equal, parity
from tests.plans import llama, tiny_plan

ORDER, KIND = "strategy.context.order", "strategy.context.kind"
ALLGATHER, ULYSSES, USP = ({KIND: kind} for kind in ("allgather", "ulysses", "usp"))
SEQUENCE = {"strategy.tensor.sequence_parallel": True}
GPIPE = {"strategy.pipeline.kind": "gpipe"}
DROPOUT = {"dropout": 0.1, "model.attention_dropout": 0.1}
BERT = {"model.name": "bert", "model.preset": "bert", "model.layers": 2}
# capacity and losses of balance count all tokens of a group
EXPERTS = {"model.experts": 4, "model.expert_period": 2, "model.router.capacity_factor": 1.25, "ep": 2}
CAPACITY, DROPLESS = ({**EXPERTS, "strategy.expert.kind": kind} for kind in ("capacity", "dropless"))
GSHARD = {"model.router.kind": "gshard", "model.router.second_expert": "random", "model.router.group_samples": 2}
CHOICE = {"model.router.kind": "expert_choice"}
CELLS: dict[str, dict[str, Any]] = {
    "ring of four, striped, llama": {"cp": 4, ORDER: "striped", **llama()},
    "ring, contiguous, dropout, recomputed": {
        **TWO_STEPS,
        "cp": 2,
        ORDER: "contiguous",
        **DROPOUT,
        "recompute": "full",
    },
    "ring, heads of two turned features": {"cp": 2, "model.position": "rope", "model.hidden": 16, "model.heads": 8},
    "allgather, dp, llama": {**TWO_STEPS, "cp": 2, "dp": 2, **ALLGATHER, **llama()},
    "allgather of three, contiguous": {"cp": 3, **ALLGATHER, ORDER: "contiguous", "model.seq": 12},
    "ulysses of four, kv heads copied": {**TWO_STEPS, "cp": 4, **ULYSSES, **llama(model__kv_heads=1), **DROPOUT},
    "usp, zigzag, dropout": {**TWO_STEPS, "cp": 4, "strategy.context.ulysses": 2, **USP, **llama(), **DROPOUT},
    "tp, sequence parallel, dropout": {"cp": 2, "tp": 2, **SEQUENCE, **DROPOUT},
    "zero bubble, recomputed": {"cp": 2, "pp": 2, "strategy.pipeline.kind": "zero_bubble", "recompute": "full"},
    "fsdp": {"cp": 2, "dp": 2, "strategy.data.kind": "fsdp"},
    "bf16": {"cp": 2, "precision.name": "bf16"},
    "2d, usp, llama": {"cp": 2, "tp": 2, "grid": "1x2", "layout": "2d", **USP, **llama(), "dropout": 0.1},
    "dropless experts over dp x cp": {"cp": 2, "dp": 2, **DROPLESS, "ep": 4},
    "capacity of experts over cp, jitter": {"cp": 2, **CAPACITY, **GSHARD, "model.router.jitter": 0.01},
}
MATRIX: dict[str, dict[str, Any]] = {
    "1f1b": {"cp": 2, "pp": 2, "microbatches": 4, **llama()},
    "2d of four, usp": {"cp": 2, "tp": 4, "layout": "2d", **USP, **llama(), "dropout": 0.1},
    "ring, zigzag": {"cp": 2},
    "allgather of four, striped": {"cp": 4, **ALLGATHER, ORDER: "striped"},
    "allgather, contiguous, recomputed": {"cp": 2, **ALLGATHER, ORDER: "contiguous", "recompute": "full"},
    "ulysses, recomputed": {"cp": 2, **ULYSSES, "recompute": "full", **llama()},
    "usp, striped": {"cp": 4, "strategy.context.ulysses": 2, **USP, ORDER: "striped", **llama()},
    "tp, ulysses, one kv head": {"cp": 2, "tp": 2, **ULYSSES, **llama(model__kv_heads=1)},
    "tp, pp, sequence parallel": {"cp": 2, "tp": 2, "pp": 2, **GPIPE, **SEQUENCE, **llama()},
    "interleaved": {"cp": 2, "pp": 2, "strategy.pipeline.kind": "interleaved", "virtual_stages": 2, **ALLGATHER},
    "zbv": {"cp": 2, "pp": 2, "strategy.pipeline.kind": "zbv"},
    "zero1": {"cp": 2, "dp": 2, "strategy.data.kind": "zero1"},
    "bert": {"cp": 2, "dp": 2, **BERT},
    "strategy=ring": {"cp": 2, "dp": 2, "strategy.data.kind": "ring"},
    "horovod": {"cp": 2, "dp": 2, "strategy.data.kind": "horovod"},
    "zero2": {"cp": 2, "dp": 2, "strategy.data.kind": "zero2"},
    "hsdp": {"cp": 2, "dp": 2, "strategy.data.kind": "fsdp", "strategy.data.shard": 2},
    "recompute=selective": {"cp": 2, "recompute": "selective", "dropout": 0.1},
    "bert, ulysses": {"cp": 2, **BERT, **ULYSSES},
    "dropless, expert choice, tp": {"cp": 2, "tp": 2, **DROPLESS, **CHOICE, **SEQUENCE},
    "capacity, expert choice, recomputed": {"cp": 2, **CAPACITY, **CHOICE, "recompute": "full"},
    "all experts on each rank": {"cp": 2, **EXPERTS, "ep": 1, "model.router.z_coefficient": 0.001},
    "fsdp, experts": {"cp": 2, "dp": 2, **DROPLESS, "strategy.data.kind": "fsdp"},
    "zero1, experts": {"cp": 2, "dp": 2, **DROPLESS, "strategy.data.kind": "zero1"},
    "experts, 1f1b": {"cp": 2, "pp": 2, **CAPACITY, "model.layers": 4},
    "2d, pipeline": {"cp": 2, "tp": 4, "pp": 2, "layout": "2d", "microbatches": 2, **ALLGATHER},
    "2d, recomputed, gathered again": {
        "cp": 2,
        "tp": 4,
        "layout": "2d",
        "recompute": "full",
        "strategy.tensor.save_gathered": False,
    },
    "2.5d": {"cp": 2, "tp": 8, "layout": "2.5d", "depth": 2, "model.hidden": 32, **DROPOUT},
    "3d, ulysses": {"cp": 2, "tp": 8, "layout": "3d", "model.hidden": 32, **ULYSSES},
    "2d, fsdp": {"cp": 2, "tp": 4, "dp": 2, "layout": "2d", "strategy.data.kind": "fsdp"},
    "compiled": {"cp": 2, "compile": True, "model.layers": 1},
}


AXES: list[list[dict[str, Any]]] = [
    [{"cp": 2}, {"cp": 2}, {"cp": 4}],
    [{}, ALLGATHER, ULYSSES, USP],
    [{}, {"tp": 2}, {"tp": 2, **SEQUENCE}, {"tp": 4, "layout": "2d"}],
    [{}, {"pp": 2, "microbatches": 2}, {"pp": 2, "microbatches": 2, "schedule": "zero_bubble"}],
    [{}, {"dp": 2}, *({"dp": 2, "strategy.data.kind": kind} for kind in ("fsdp", "zero1", "zero2", "ring"))],
    [{}, llama(), llama(model__kv_heads=2), DROPOUT, BERT, {**DROPLESS, "ep": 1}, CAPACITY],
    [{}, {"dataset.pack": True}, {"dataset.pack": True}],
    [{}, {"recompute": "full"}, {"recompute": "selective"}],
    [{}, {"precision.name": "bf16"}],
    [{}, {ORDER: "contiguous"}, {ORDER: "zigzag"}, {ORDER: "striped"}],
]


def drawn(count: int) -> list[dict[str, Any]]:
    """So many legal compositions of the axes, on at most 8 ranks, drawn by a fixed seed."""
    random, found = Random(15), []
    while len(found) < count:
        cell = {"model.seq": 16}
        for choices in AXES:
            cell |= random.choice(choices)
        with suppress(ConfigError):
            if tiny_plan(cell).world <= 8 and cell not in found:
                found.append(cell)
    return found


@pytest.mark.skipif(not FULL, reason="--matrix=full")
@pytest.mark.parametrize("cell", drawn(24) if FULL else [], ids=str)
def test_so_is_any_composition_that_is_drawn(cell):
    assert_equal(parity(cell))


@pytest.mark.parametrize("cell", shared([*CELLS, *(MATRIX if FULL else ())]))
def test_it_is_the_training_of_one_device_and_sends_what_was_foretold(cell):
    assert_equal(parity({**CELLS, **MATRIX}[cell]))
