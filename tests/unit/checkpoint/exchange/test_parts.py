"""A part of a logical tensor is read without the rest, wherever it is stored."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallelrun.checkpoint.exchange.export import export, write_checkpoint
from parallelrun.checkpoint.exchange.source import open_source
from parallelrun.checkpoint.exchange.weights import CheckpointWeights, Weights
from parallelrun.checkpoint.index import Index, StoredPart, StoredTensor
from parallelrun.cli.main import main
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


@pytest.mark.parametrize("shard_bytes", [1, 3000, 10**9])
def test_a_file_is_closed_before_it_would_be_too_large_and_the_index_counts_bytes(shard_bytes, tmp_path):
    export(make("LlamaForCausalLM"), tmp_path / "out", "hf", None, shard_bytes)
    shards = [load_file(path) for path in sorted((tmp_path / "out").glob("*.safetensors"))]
    sizes = [sum(one.nbytes for one in shard.values()) for shard in shards]
    assert all(size <= shard_bytes or len(shard) == 1 for size, shard in zip(sizes, shards))
    index = tmp_path / "out" / "model.safetensors.index.json"
    assert index.exists() == (len(shards) > 1)
    if index.exists():
        content = json.loads(index.read_text())
        assert content["metadata"]["total_size"] == sum(sizes)
        assert set(content["weight_map"]) == {key for shard in shards for key in shard}


def test_a_part_is_read_from_the_pieces_of_several_files(tmp_path):
    whole = torch.arange(24.0).reshape(6, 4)
    boxes = {"rank_00000.safetensors": ((0, 0), (4, 4)), "rank_00001.safetensors": ((4, 0), (2, 4))}
    for name, ((row, column), (rows, columns)) in boxes.items():
        save_file({"model/w": whole[row : row + rows, column : column + columns].clone()}, tmp_path / name)
    stored = StoredTensor("float32", (6, 4), tuple(StoredPart(*box, name) for name, box in boxes.items()))
    files = {name: ((tmp_path / name).stat().st_size, "0" * 64) for name in boxes}
    weights = CheckpointWeights(tmp_path, Index(1, "sgd", {}, {}, {"model/w": stored}, files))
    for ranges in (((0, 6), (0, 4)), ((3, 5), (1, 3)), ((4, 6), (0, 4)), ((5, 6), (3, 4)), ((0, 2), (2, 4))):
        assert torch.equal(weights.read("w", ranges), whole[tuple(slice(*pair) for pair in ranges)])


def test_an_import_records_the_vocabulary(tmp_path):
    source = make("LlamaForCausalLM")
    unnamed = replace(source, config=replace(source.config, model=replace(source.config.model, vocab=None)))
    write_checkpoint(unnamed, tmp_path / "out")
    assert open_source(tmp_path / "out", "run").config.model.vocab == source.spec.vocab
