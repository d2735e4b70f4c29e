"""Multi-token prediction, z-losses, gates of shared experts and soft caps in chunks train on several ranks as on one
device, and send what is predicted."""

from __future__ import annotations

from typing import Any

import pytest

from tests.matrix import FULL
from tests.parity import assert_equal, parity
from tests.plans import llama

AHEAD: dict[str, Any] = {**llama(), "model.mtp_depth": 1}
TIED: dict[str, Any] = {"model.mtp_depth": 2}
Z_LOSS, CAP = {"model.z_loss": 0.3}, {"model.logit_softcap": 0.05}
EXPERTS: dict[str, Any] = {
    **llama(), "model.experts": 4, "model.expert_period": 1, "model.expert_ffn": 16, "model.own_router": True,
    "model.router.capacity_factor": 1.0, "model.router.bias_rate": 0.01, "model.router.z_coefficient": 0.1,
}  # fmt: skip
GATED: dict[str, Any] = {**EXPERTS, "model.shared_experts": 2, "model.shared_gate": True}
SEQUENCE = {"strategy.tensor.sequence_parallel": True}
ZERO1, FSDP = ({"dp": 2, "strategy.data.kind": kind} for kind in ("zero1", "fsdp"))
SHORT = {"global_batch": 16}
CELLS: dict[str, dict[str, Any]] = {
    "ahead, tied, tp sequence, capped chunks": {**TIED, "tp": 2, **SEQUENCE, "loss_chunks": 3, **CAP},
    "ahead, gated experts, packed, cp, z-loss": {
        **GATED,
        **Z_LOSS,
        "model.mtp_depth": 1,
        "cp": 2,
        "dataset.pack": True,
        "model.seq": 16,
    },
    "ahead, packed, cp": {**AHEAD, "cp": 2, "dataset.pack": True, "model.seq": 16},
    "ahead, pp, fsdp": {**AHEAD, "pp": 2, **FSDP},
    "ahead, gated experts, ep, tp, z-loss": {**GATED, **Z_LOSS, "model.mtp_depth": 1, "dp": 2, "ep": 2, "tp": 2},
    "ahead, tied, ddp": {**TIED, "dp": 2},
    "ahead, zero1, recompute": {**AHEAD, **ZERO1, "recompute": "full"},
    "ahead, tied, fsdp": {**TIED, **FSDP},
    "ahead, tied, pp, fsdp": {**TIED, **FSDP, "pp": 2},
    "ahead, hsdp": {**AHEAD, **FSDP, "dp": 4, "strategy.data.shard": 2},
    "ahead, cp, ulysses, tp": {**AHEAD, "cp": 2, "tp": 2, "strategy.context.kind": "ulysses"},
    "ahead, tied, pp": {**TIED, "pp": 2},
    "ahead, interleaved": {**AHEAD, "pp": 2, "strategy.pipeline.kind": "interleaved", "model.layers": 4},
    "ahead, zero bubble, recompute": {**AHEAD, "pp": 2, "strategy.pipeline.kind": "zero_bubble", "recompute": "full"},
    "ahead, zbv, fsdp": {**AHEAD, **FSDP, "pp": 2, "strategy.pipeline.kind": "zbv", "model.layers": 4},
    "ahead, experts, ep, fsdp": {**EXPERTS, **FSDP, "model.mtp_depth": 1, "dp": 4, "ep": 2},
    "ahead, experts, ep, pp, dropout": {**EXPERTS, "model.mtp_depth": 1, "dp": 2, "ep": 2, "pp": 2, "dropout": 0.2},
    "ahead, 2d, tied, pp": {**TIED, "tp": 4, "layout": "2d", "pp": 2},
    "ahead, 2.5d": {**AHEAD, "tp": 8, "layout": "2.5d"},
    "ahead, 3d": {**AHEAD, "tp": 8, "layout": "3d"},
    "ahead, muon, tp": {**AHEAD, "tp": 2, "dp": 2, "optimizer.name": "muon", "verify.optimizer": "same"},
    "ahead, compiled": {**AHEAD, "tp": 2, "compile": True},
    "z-loss, tp, smoothing": {**llama(), **Z_LOSS, "tp": 2, "model.label_smoothing": 0.1},
    "z-loss, cp, pp, chunks": {**llama(), **Z_LOSS, "cp": 2, "pp": 2, "loss_chunks": 3},
    "z-loss, 2d": {**llama(), **Z_LOSS, "tp": 4, "layout": "2d"},
    "z-loss, bert, tp": {**Z_LOSS, "model.name": "bert", "tp": 2},
    "gated experts, cp": {**GATED, "cp": 2},
    "gated experts, zero bubble": {**GATED, "pp": 2, "strategy.pipeline.kind": "zero_bubble"},
    "gated experts, ep over tp": {**GATED, "tp": 2, "ep": 2, "strategy.expert.tp": 1},
    "gated experts, fsdp, recompute": {**GATED, **FSDP, "recompute": "full"},
}
BY_DEFAULT = [*CELLS][:2]


@pytest.mark.parametrize("cell", CELLS if FULL else BY_DEFAULT)
def test_objectives_under_a_plan_equal_one_device(cell: str) -> None:
    assert_equal(parity({**SHORT, **CELLS[cell]}, timeout=240.0))
