"""Weights of a checkpoint are read only if they are the bytes that were written; a full disk is named."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest

import parallelrun
from parallelrun.base.errors import CheckpointError
from parallelrun.checkpoint.exchange.export import write_checkpoint
from parallelrun.cli.main import main
from parallelrun.planner.resolve.freeze import freeze
from tests.checkpoints import written
from tests.exchange import make
from tests.plans import tiny_config, tiny_plan

MODEL = {"model.layers": 1, "model.hidden": 16, "model.heads": 4, "model.seq": 8, "model.vocab": 256,
         "dataset.name": "pystdlib", "dataset.vocab": None, "dataset.max_bytes": 200_000}  # fmt: skip
WORDS = [f"{key}={value}" for key, value in MODEL.items() if value is not None and key != "dataset.name"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose checkpoint has one wrong bit in a weight."""
    folder = tmp_path / "runs" / "gpt" / "a"
    plan = tiny_plan(MODEL)
    path = written(folder / "checkpoints" / "step_3", plan) / "rank_00000.safetensors"
    (folder / "config.yaml").write_text(freeze(tiny_config(MODEL), plan))
    (folder / "manifest.json").write_text("{}")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    return folder


TRAINING = ["model=gpt", "strategy=single", "dataset=pystdlib", "global_batch=8", "steps=9", *WORDS]
COMMANDS = {
    "init.from": [*TRAINING, "init.from={}"],
    "generate": ["generate", "{}", "text", "max_tokens=1"],
    "eval": ["eval", "{}", "samples=8"],
    "export": ["export", "{}", "out"],
    "resume": [*TRAINING, "resume={}"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_bit_of_a_weight_is_refused(command, run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([word.format(run) for word in COMMANDS[command]]) == 4
    assert "rank_00000.safetensors is damaged: its sha256 is" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_program_gets_no_such_weights_either(run):
    with pytest.raises(CheckpointError, match="is damaged: its sha256 is"):
        _ = parallelrun.load(run).model


def test_an_import_is_checked_as_well(tmp_path, capsys):
    write_checkpoint(make("LlamaForCausalLM"), tmp_path / "in")
    file = tmp_path / "in" / "rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert main(["generate", str(tmp_path / "in"), "tokens=[1,2]", "max_tokens=1"]) == 4
    assert "is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["hf", "safetensors", "torch"])
def test_a_full_disk_is_exit_3_in_every_format(form, tmp_path, capsys):
    write_checkpoint(make("LlamaForCausalLM"), tmp_path / "in")
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, unlimited[1]))
    try:
        code = main(["export", str(tmp_path / "in"), str(tmp_path / "out"), "--format", form])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        signal.signal(signal.SIGXFSZ, before)
    assert code == 3 and "File too large" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["in"]
