"""The memory without which `verify` is refused is never more than the bytes that are alive while it runs."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from parallelrun.training.loop.build import build
from parallelrun.training.verify.checked import checked_config, checked_plan, compared_bytes
from parallelrun.training.verify.run import judge, plan_trace, reference_trace
from tests import vision
from tests.matrix import FULL, sparing
from tests.peak_bytes import PeakBytes, tensors_in
from tests.plans import tiny_config, tiny_plan
from tests.pool import run_ranks

GPT: dict[str, Any] = {"model.hidden": 128, "model.ffn": 512, "model.vocab": 512, "dataset.vocab": 512}
PLANS: dict[str, dict[str, Any]] = {
    "gpt, one step": GPT | {"verify.steps": 1},
    "gpt, four steps in fp32": GPT | {"verify.steps": 4, "verify.precision": "fp32"},
    "gpt, adamw": GPT | {"verify.optimizer": "same", "optimizer.name": "adamw"},
    "large activations": {"model.hidden": 16, "model.seq": 256, "global_batch": 8},
    "vgg": vision.VGG | {"model.hidden": 256},
    **({"gpt": GPT} if FULL else {}),
}


REPLAYED = {"dp": 2, "global_batch": 8}
PLANS_OF_RANKS: dict[str, dict[str, Any]] = {
    "fsdp": GPT | REPLAYED | {"strategy.data.kind": "fsdp"},
    "tp": GPT | {"tp": 2, "verify.steps": 1},
    "pp": GPT | {"pp": 2, "verify.steps": 1},
    "local sgd": GPT | REPLAYED | {"strategy.data.kind": "local_sgd"},
    "powersgd": GPT | REPLAYED | {"strategy.data.compression": "powersgd"},
    **({"ddp": GPT | REPLAYED} if FULL else {}),
}


# More steps, or another model.
SLOW = {"gpt, four steps in fp32", "gpt, adamw", "vgg", "pp", "tp", "local sgd"}


def _ratio(overrides: dict[str, Any]) -> float | None:
    """Measured over predicted bytes that rank 0 needs besides its own training; None on other ranks."""
    config = checked_config(tiny_config({**overrides, "verb": "verify"}))
    plan, device = checked_plan(config, tiny_plan(overrides)), torch.device("cpu")
    gc.collect()
    with PeakBytes() as bytes_alive:
        training = build(config, plan, device)
        trace = plan_trace(config, plan, training)
        if training.mesh.rank != 0:
            return None
        own = bytes_alive.now - sum(
            tensor.nbytes for tensor in tensors_in([trace.initial, trace.gradients, trace.final])
        )
        bytes_alive.restart()  # the reference, while the plan's training stays
        assert judge(trace, reference_trace(config, plan, device, trace), config, plan)["passed"]
    return (bytes_alive.peak - own) / compared_bytes(config, plan)


@pytest.mark.parametrize("name", sparing(PLANS, SLOW))
def test_verify_is_refused_only_if_it_cannot_fit(name: str) -> None:
    assert _ratio(PLANS[name]) >= 0.98


@pytest.mark.parametrize("name", sparing(PLANS_OF_RANKS, SLOW))
def test_rank_0_needs_as_much_under_any_plan(name: str) -> None:
    ratio, other = run_ranks(2, _ratio, PLANS_OF_RANKS[name])
    assert other is None and ratio >= 0.98
