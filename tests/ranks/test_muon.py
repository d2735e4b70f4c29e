"""Muon on sharded matrices equals Muon on one device, and sends what the plan says."""

from __future__ import annotations

from typing import Any

import pytest

from parallelrun.training.verify.measure import BOUNDS
from tests.matrix import FULL
from tests.parity import assert_equal, parity
from tests.plans import llama
from tests.ranks.test_frozen import MODULE as FROZEN
from tests.ranks.test_frozen import SCATTERED
from tests.ranks.test_latent_parity import LATENT
from tests.ranks.test_model_parity import Frozen
from tests.vision import RESNET

KIND = "strategy.data.kind"
ZERO1, ZERO2, FSDP, LOCAL, DILOCO = ({KIND: kind} for kind in ("zero1", "zero2", "fsdp", "local_sgd", "diloco"))
# Two steps: the momentum is kept. Without biases, of which a key's has a gradient of pure noise.
MUON: dict[str, Any] = {
    **llama(), "model.layers": 2, "model.vocab": 37, "dataset.vocab": 37, "global_batch": 16, "optimizer.clip": 0.3,
    "optimizer.name": "muon", "optimizer.momentum": 0.9, "verify.optimizer": "same", "verify.steps": 2,
}  # fmt: skip
OPTIMIZER = {key: value for key, value in MUON.items() if key.startswith(("optimizer.", "verify."))}
MOE = {**MUON, "model.experts": 4, "model.expert_period": 2}
FEW = {**MOE, "model.experts": 2, "model.ffn": 33, "dp": 4, "ep": 2}  # a copy gets nothing of an expert's odd matrix
CELLS: dict[str, dict[str, Any]] = {
    "zero1 x tp, offloaded": {**MUON, "dp": 2, "tp": 2, **ZERO1, "optimizer.offload": True},
    "2d": {**MUON, "tp": 4, "layout": "2d"},
    "fsdp, empty shards of experts": {**FEW, **FSDP},
    "zero1, frozen": {**FROZEN, **ZERO1, "dp": 2, **OPTIMIZER, "model.arguments": Frozen({"frozen": SCATTERED})},
}
MORE: dict[str, dict[str, Any]] = {
    "tp": {**MUON, "tp": 2, "optimizer.adjust_lr_fn": "original"},
    "tp, copied kv heads": {**MUON, "tp": 4},
    "ddp x pp": {**MUON, "dp": 2, "pp": 2},
    "zero2, chunks that differ": {**MUON, "dp": 3, "global_batch": 12, **ZERO2},
    "fsdp x tp x pp": {**MUON, "dp": 2, "tp": 2, "pp": 2, **FSDP},
    "fsdp under zbv": {**MUON, "dp": 2, "pp": 2, "model.layers": 4, "strategy.pipeline.kind": "zbv", **FSDP},
    "hsdp": {**MUON, "dp": 4, **FSDP, "strategy.data.shard": 2},
    "2.5d": {**MUON, "tp": 8, "layout": "2.5d", "model.kv_heads": 4},
    "3d": {**MUON, "tp": 8, "layout": "3d", "model.kv_heads": 4},
    "2d x zero1": {**MUON, "dp": 2, "tp": 4, "layout": "2d", **ZERO1},
    "cp x zero1": {**MUON, "dp": 2, "cp": 2, **ZERO1},
    "ep, no copies": {**MOE, "dp": 4, "ep": 4},
    "ep x tp": {**MOE, "dp": 2, "tp": 2, "ep": 2},
    "ep over tp": {**MOE, "tp": 2, "ep": 2, "strategy.expert.tp": 1},
    "zero1, empty chunks of experts": {**FEW, **ZERO1},
    "zero1, inside of every expert": {**MOE, "model.experts": 6, "dp": 4, "ep": 2, **ZERO1},
    "latent attention, tp": {**MUON, "model.kv_heads": None, **LATENT, "tp": 2},
    "convolutions, zero1 x tp": {**RESNET, "dp": 2, "tp": 2, **ZERO1, **OPTIMIZER},
    "local sgd x tp": {**MUON, "dp": 2, "tp": 2, **LOCAL, "strategy.data.sync_every": 2},
    "diloco": {**MUON, "dp": 2, **DILOCO, "strategy.data.sync_every": 2},
    "adasum": {**MUON, "dp": 2, KIND: "horovod", "strategy.data.reduction": "adasum"},
    "lion, zero1 x tp": {**MUON, "optimizer.name": "lion", "dp": 2, "tp": 2, **ZERO1},
}


@pytest.mark.parametrize("overrides", (CELLS | (MORE if FULL else {})).values(), ids=CELLS | (MORE if FULL else {}))
def test_updates_are_those_of_one_device(overrides: dict[str, Any]) -> None:
    document = parity(overrides)
    assert_equal(document)
    assert max(document["max_error"].values()) <= BOUNDS["fp64"]  # of another optimizer the verdict only reports
