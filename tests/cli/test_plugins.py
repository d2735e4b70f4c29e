"""A model and a dataset in a package of somebody else: found by entry points, planned, verified and trained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FILES = {
    "theirs-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n",
    "theirs-1.0.dist-info/entry_points.txt": """
[parallelrun.models]
bigram = theirs.bigram

[parallelrun.datasets]
counting = theirs.counting
""",
    "theirs/__init__.py": "",
    "theirs/counting.py": '''
"""Samples that count modulo ten."""

import numpy as np

from parallelrun.definitions import Dataset, DatasetDefinition, Split


class CountingSplit(Split):
    def __init__(self, size, seq):
        self.size, self.seq = size, seq

    def __len__(self):
        return self.size

    def sample(self, index):
        tokens = (index + np.arange(self.seq + 1, dtype=np.int64)) % 10
        return tokens[:-1], tokens[1:]


class Counting(DatasetDefinition):
    def vocab_size(self, config):
        return 10

    def open(self, config, spec):
        return Dataset("counting", 10, "counting/1", CountingSplit(96, spec.seq), CountingSplit(8, spec.seq))


DATASET = Counting()
''',
    "theirs/bigram/__init__.py": '"""Predicts the next token from the last one alone."""\n',
    "theirs/bigram/spec.py": """
from parallelrun.definitions import ModelDefinition
from parallelrun.errors import ConfigError
from parallelrun.model_spec import BlockSpec, Initialiser, LayerSpec, ModelSpec, ParameterSpec, too_small


class Bigram(ModelDefinition):
    sizes = {"hidden": 1, "seq": 1}

    def make(self, config, vocab):
        model, normal = config.model, Initialiser("normal", 0.5)
        problems = too_small({"hidden": model.hidden})
        if problems:
            raise ConfigError(*problems)
        table = ParameterSpec("embedding.tokens.weight", (vocab, model.hidden), normal, "embedding")
        head = ParameterSpec("head.logits.weight", (vocab, model.hidden), normal, "head")
        blocks = (
            BlockSpec("embedding", "embedding",
                      (LayerSpec("embedding.tokens", "embedding", vocab, model.hidden, (table,)),), 0.0, 0.0),
            BlockSpec("head", "head", (LayerSpec("head.logits", "head", model.hidden, vocab, (head,)),),
                      2.0 * model.hidden * vocab * model.seq, float(model.seq * (model.hidden + 2 * vocab))),
        )
        return ModelSpec(
            name="bigram", kind="tokens", blocks=blocks, sample_shape=(model.seq,),
            boundary_shape=(model.seq, model.hidden), targets_per_sample=model.seq, vocab=vocab,
            hidden=model.hidden, seq=model.seq, num_layers=1,
        )


MODEL = Bigram()
""",
    "theirs/bigram/network.py": """
import torch
from torch import nn

from parallelrun.models import layers
from parallelrun.models.network import Network, store


class BigramNetwork(Network):
    def __init__(self, config, spec, dtype):
        super().__init__(spec, layers.TokenLoss())
        self.embedding = nn.Sequential()
        self.embedding.add_module("tokens", layers.TokenEmbedding(spec.vocab, spec.hidden, dtype))
        self.head = nn.Sequential()
        self.head.add_module("logits", layers.VocabHead(spec.hidden, spec.vocab, dtype))


def build(config, spec, precision):
    return store(BigramNetwork(config, spec, getattr(torch, precision.compute)), precision.stored)
""",
}
OVERRIDES = ("model.name=bigram", "dataset.name=counting", "model.hidden=16", "model.seq=8", "global_batch=8", "tp=2")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("theirs")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def output(theirs: Path, verb: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "parallelrun", verb, *OVERRIDES, f"runs={theirs / 'runs'}", *arguments]
    paths = os.pathsep.join([str(theirs), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, cwd=theirs, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_is_listed_and_planned(theirs: Path) -> None:
    document: dict[str, Any] = json.loads(output(theirs, "plan", "dp=2", "--json"))
    assert document["model"]["parameters"] == 2 * 10 * 16


def test_it_is_verified_under_data_and_tensor_parallelism(theirs: Path) -> None:
    assert "verified: exact, 2 parameters" in output(theirs, "verify", "dp=2")


def test_it_learns_to_count(theirs: Path) -> None:
    output(theirs, "run", "steps=60", "optimizer.lr=0.1", "optimizer.warmup=0", "name=counting")
    (metrics,) = theirs.glob("runs/*/*/metrics.jsonl")
    losses = [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]
    assert losses[-1] < 0.1 < 2.0 < losses[0]
