"""Makes a checkpoint of other weights: it has no optimizer state, so training starts from it (`init.from`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from parallelrun.checkpoint.exchange import tokenizer
from parallelrun.checkpoint.exchange.export import written_aside
from parallelrun.checkpoint.exchange.origin import write_others
from parallelrun.checkpoint.exchange.source import StoredModel
from parallelrun.checkpoint.files import Entry, write_bytes, write_safetensors
from parallelrun.checkpoint.index import DTYPES, INDEX_FILE, Index, StoredPart, StoredTensor, encode, weight_key
from parallelrun.checkpoint.resume import CONFIG_FILE
from parallelrun.checkpoint.storage import tensor_bytes
from parallelrun.planner.resolve.freeze import freeze

_DTYPE = "float32"  # in which weights are stored while they train
_FILE = "rank_00000.safetensors"


def write_checkpoint(source: StoredModel, out: Path) -> None:
    """Write the checkpoint `out`, with config.yaml and the tokenizer's files. It appears whole or not at all.

    Raises CheckpointError for damaged weights, EnvironmentProblem for `out`.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in source.spec.parameters.items()}
    code, size = DTYPES[_DTYPE]
    entries = [Entry(weight_key(name), code, shape, size * torch.Size(shape).numel()) for name, shape in shapes.items()]
    dtype = getattr(torch, _DTYPE)
    contents = (tensor_bytes(source.weights.whole(name, shape).to(dtype)) for name, shape in shapes.items())
    tensors = {
        weight_key(name): StoredTensor(_DTYPE, shape, (StoredPart((0,) * len(shape), shape, _FILE),))
        for name, shape in shapes.items()
    }
    model = replace(source.config.model, vocab=source.spec.vocab)
    with written_aside(out) as aside:
        written = write_safetensors(aside / _FILE, entries, contents)
        index = Index(0, source.config.optimizer.name, {}, {"imported": str(source.path)}, tensors, {_FILE: written})
        write_bytes(aside / INDEX_FILE, encode(index))
        write_bytes(aside / CONFIG_FILE, freeze(replace(source.config, model=model)).encode())
        tokenizer.write(source, aside)
        write_others(source, aside, for_transformers=False)
