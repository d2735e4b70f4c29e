"""A part of a logical tensor is read without the rest, wherever it is stored."""

from __future__ import annotations

from math import prod

import pytest
import torch

from parallelrun.cli.main import main
from parallelrun.exchange.export import export
from parallelrun.exchange.imported import write_checkpoint
from parallelrun.exchange.source import open_source
from parallelrun.exchange.weights import Weights
from tests.exchange import make

PARTS = [
    ("GPT2LMHeadModel", "layers.1.attention.qkv.v.weight", ((4, 12), (0, 16))),  # rows of a transposed, fused tensor
    ("GPT2LMHeadModel", "layers.0.attention.qkv.k.bias", ((8, 16),)),
    ("GPT2LMHeadModel", "layers.0.mlp.down.weight", ((0, 16), (16, 32))),
    ("LlamaForCausalLM", "embedding.tokens.weight", ((5, 21), (3, 4))),
    ("MixtralForCausalLM", "layers.1.moe.experts.down", ((1, 3), (0, 16), (12, 24))),  # of the experts 1 and 2
    ("MixtralForCausalLM", "layers.1.moe.experts.up", ((2, 2), (0, 24), (0, 16))),  # of none
]


@pytest.mark.parametrize("form", ["hf", "safetensors", "checkpoint"])
@pytest.mark.parametrize("case, name, ranges", PARTS)
def test_only_the_part_is_read(form, case, name, ranges, tmp_path, monkeypatch):
    source = make(case)
    if form == "checkpoint":
        write_checkpoint(source, tmp_path / "out")
    else:
        export(source, tmp_path / "out", form, None, 5000)
    weights = open_source(tmp_path / "out", "run").weights
    read: list[int] = []
    slices = Weights._slice

    def counted(*arguments):
        part = slices(*arguments)
        read.append(part.numel())
        return part

    monkeypatch.setattr(Weights, "_slice", counted)
    assert torch.equal(weights.read(name, ranges), source.weights.read(name, ranges))
    assert sum(read) == prod(stop - start for start, stop in ranges)


def test_a_run_that_cannot_start_from_the_weights_starts_no_rank(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    export(make("LlamaForCausalLM", vocab=256), tmp_path / "out", "hf", None, 10**9)
    words = ["model.from_hf=out", "init.from=out", "strategy=tp", "tp=2", "steps=1"]
    assert main([*words, "model.hidden=32"]) == 4
    error = capsys.readouterr().err
    assert "model.embed_tokens.weight (embedding.tokens.weight) is [256, 16] there, [256, 32] in the model" in error
    assert main([*words[1:], "model=gpt"]) == 2
    assert "did you mean: model.from_hf=" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
