"""Foreign weights under every kind of plan: each rank starts from its part of them, and what is saved is exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from parallelrun.base.errors import CheckpointError
from parallelrun.checkpoint.exchange.export import export
from parallelrun.checkpoint.exchange.source import open_source
from parallelrun.launch.host.directory import write_text
from parallelrun.planner.resolve.freeze import freeze
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.training.loop.build import build
from parallelrun.training.loop.checkpointing import save
from parallelrun.training.loop.schedules import LossScaler
from tests.exchange import CASES, VOCAB, make
from tests.plans import tiny_config
from tests.pool import run_ranks

GPT2, LLAMA, MIXTRAL, DEEPSEEK = "GPT2LMHeadModel", "LlamaForCausalLM", "MixtralForCausalLM", "Glm4MoeForCausalLM"
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "2D": (LLAMA, {"layout": "2d", "tp": 4}),
    "tp, kv heads on several ranks": (LLAMA, {"tp": 4}),
    "pp and tp, a weight tied over stages": (GPT2, {"pp": 2, "tp": 2}),
    "fsdp": (GPT2, {"dp": 2, "strategy.data.kind": "fsdp"}),
    "zero1": (GPT2, {"dp": 2, "strategy.data.kind": "zero1"}),
    "experts of Mixtral on several ranks": (MIXTRAL, {"dp": 2, "ep": 2, "pp": 2}),
    "experts of DeepSeek, cut": (DEEPSEEK, {"tp": 2, "dp": 2, "ep": 2}),
    "latent attention, tp and ep": ("DeepseekV3ForCausalLM", {"tp": 2, "dp": 2, "ep": 2}),
    "latent attention, fsdp and pp": ("DeepseekV3ForCausalLM", {"pp": 2, "dp": 2, "strategy.data.kind": "fsdp"}),
    "bert": ("BertForMaskedLM", {"tp": 2}),
}


def train_and_save(overrides: dict[str, Any], run: str) -> None:
    """Build the training, which starts from `init.weights`, and save it before its first step. Collective."""
    config = tiny_config(overrides)
    plan = resolve(config)
    training = build(config, plan, torch.device("cpu"))
    try:
        save(training, LossScaler(config.precision, False), 0, Path(run))
    finally:
        training.close()


@pytest.mark.parametrize("case, plan", PLANS.values(), ids=PLANS)
def test_weights_go_in_and_out_under_any_plan_bit_by_bit_and_damaged_ones_do_not(case, plan, tmp_path):
    there, run = tmp_path / "there", tmp_path / "run"
    export(make(case), there, "hf", None, 6000)
    given = {"model.layers": 2, **CASES[case], **plan, "init.weights": str(there), "model.vocab": VOCAB}
    config = tiny_config(given)
    resolved = resolve(config)
    run.mkdir()
    write_text(run / "config.yaml", freeze(config, resolved))
    run_ranks(resolved.world, train_and_save, given, str(run))
    export(open_source(run, "run"), tmp_path / "back", "hf", None, 10**9)
    wanted: dict[str, torch.Tensor] = {}
    for file in there.glob("*.safetensors"):
        wanted |= load_file(file)
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []
    file = max(run.rglob("checkpoints/*/*.safetensors"), key=lambda file: file.stat().st_size)
    stored = bytearray(file.read_bytes())
    stored[-1] ^= 1
    file.write_bytes(stored)
    with pytest.raises(CheckpointError, match=file.name):
        export(open_source(run, "run"), tmp_path / "damaged", "hf", None, 10**9)
    assert not (tmp_path / "damaged").exists()
