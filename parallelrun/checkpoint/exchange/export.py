"""Writes the weights of a model: Hugging Face directories, plain safetensors, torch.save, and our own checkpoints.

A directory appears whole or not at all. One stored tensor is in memory at a time (torch.save: all of them).
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallelrun.base import registry
from parallelrun.base.errors import ConfigError, EnvironmentProblem, Problem
from parallelrun.base.precision import BYTES
from parallelrun.checkpoint.exchange import adapters, paths, tokenizer
from parallelrun.checkpoint.exchange.origin import NOT_KEPT, base_config, write_others
from parallelrun.checkpoint.exchange.source import StoredModel
from parallelrun.checkpoint.exchange.weights import stored_shapes
from parallelrun.checkpoint.files import Entry, sync, write_bytes, write_json, write_safetensors
from parallelrun.checkpoint.index import DTYPES, INDEX_FILE, Index, StoredPart, StoredTensor, weight_key
from parallelrun.checkpoint.resume import CONFIG_FILE
from parallelrun.checkpoint.schema import encode
from parallelrun.checkpoint.storage import dtype_name, file_of_rank, tensor_bytes
from parallelrun.config.from_hf import CONFIG_FILE as THEIR_CONFIG
from parallelrun.config.kept_model import GENERATION, keep
from parallelrun.config.stored_tensors import SHARD_INDEX, SINGLE_FILE
from parallelrun.models.hugging_face import Family, FixedTensor, Piece, family_for
from parallelrun.planner.model import definitions
from parallelrun.planner.resolve.freeze import freeze

TORCH_FILE = "model.pt"
CHAT_TEMPLATE = "chat_template.jinja"
_IMPORTED = "float32"  # in which weights are stored while they train
_LENGTH = "max_position_embeddings"
METADATA = {"format": "pt"}  # transformers refuses a file without it


@dataclass(frozen=True)
class Stored:
    """One tensor of an export: its key and shape, and how to make it."""

    key: str
    shape: tuple[int, ...]
    make: Callable[[], Tensor]


def export(source: StoredModel, out: Path, form: str, dtype: torch.dtype | None, shard_bytes: int) -> None:
    """Write the directory `out` in the format `form`, a key of `FORMATS`.

    dtype: of the weights; None: as stored. shard_bytes: size at which a safetensors file is closed. Raises ConfigError
    for a model that the format cannot hold, CheckpointError for damaged weights, EnvironmentProblem for `out`.
    """
    with written_aside(out) as aside:
        source.weights.verify()
        FORMATS[form](source, aside, dtype, shard_bytes)


def _hugging_face(source: StoredModel, out: Path, dtype: torch.dtype | None, shard_bytes: int) -> None:
    prefix = definitions.model(source.config).their_prefix
    if prefix is None:
        _by_family(source, out, dtype, shard_bytes)
    else:
        _by_transformers(source, prefix, out, dtype, shard_bytes)
    tokenizer.write(source, out)
    write_others(source, out, for_transformers=True)
    if template := definitions.dataset(source.config).chat_template(source.config):
        write_bytes(out / CHAT_TEMPLATE, template.encode())
    if not (out / GENERATION).exists():
        write_json(out / GENERATION, tokenizer.special_ids(source))  # null, as transformers has it


def _by_family(source: StoredModel, out: Path, dtype: torch.dtype | None, shard_bytes: int) -> None:
    """Write weights and config.json of a model of ours, as the class of transformers that corresponds."""
    family = family_for(source.config, source.spec)
    pieces = list(family.pieces(source.config, source.spec))
    constants = family.constants(source.config, source.spec)
    kind = _write_shards(out, list(_stored(source, pieces, constants)), dtype, shard_bytes)
    write_json(out / THEIR_CONFIG, their_config(source, family, kind))


def _by_transformers(source: StoredModel, prefix: str, out: Path, dtype: torch.dtype | None, shard_bytes: int) -> None:
    """Write what transformers' own `save_pretrained` writes of a module with these weights, all in memory."""
    builder = registry.load("models", source.config.model.name, "builder")
    with torch.device("cpu"), torch.no_grad():
        module = builder.make_module(source.config, source.spec.vocab)
        for name, parameter in module.named_parameters():
            layer = module.get_submodule(name.rpartition(".")[0])
            parameter.copy_(adapters.merged(source, prefix + name, parameter, layer))
    module.to(dtype or torch.float32).save_pretrained(out, max_shard_size=shard_bytes)
    (out / GENERATION).unlink(missing_ok=True)  # written from the model's origin, as for every model


def their_config(source: StoredModel, family: Family, dtype: str) -> dict[str, Any]:
    """config.json for transformers: the fields of the one from which the model comes, with those that we know anew."""
    base = {key: value for key, value in base_config(source, family.model_type).items() if key not in NOT_KEPT}
    names = {"architectures": [family.architecture], "model_type": family.model_type}
    special = tokenizer.special_ids(source)
    fields = family.fields(source.config, source.spec)
    if source.config.model.position == "rope":  # a training on shorter samples does not shorten the context
        fields[_LENGTH] = max(fields[_LENGTH], base.get(_LENGTH) or 0)
    return {**base, **names, **fields, **special, "dtype": dtype, "torch_dtype": dtype}


def _safetensors(source: StoredModel, out: Path, dtype: torch.dtype | None, shard_bytes: int) -> None:
    _write_shards(out, list(_stored(source, _own_pieces(source), {})), dtype, shard_bytes)
    write_bytes(out / CONFIG_FILE, freeze(source.config).encode())
    keep(source.config, out)
    tokenizer.write(source, out)
    write_others(source, out, for_transformers=False)


def _torch(source: StoredModel, out: Path, dtype: torch.dtype | None, shard_bytes: int) -> None:
    state = {tensor.key: _converted(tensor.make(), dtype) for tensor in _stored(source, _own_pieces(source), {})}
    with (out / TORCH_FILE).open("xb") as stream:
        try:
            torch.save(state, stream)
        except RuntimeError as error:  # torch's words for a failed write
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None
    sync(out / TORCH_FILE)
    write_bytes(out / CONFIG_FILE, freeze(source.config).encode())
    keep(source.config, out)


FORMATS = {"hf": _hugging_face, "safetensors": _safetensors, "torch": _torch, "peft": adapters.write}


def _own_pieces(source: StoredModel) -> list[Piece]:
    """Adapters first: theirs may be the wider dtype, and the first tensor's is that of the files."""
    names = sorted(source.spec.parameters, key=lambda name: not source.spec.parameters[name].is_adapter)
    return [Piece(name, name) for name in names]


def _stored(source: StoredModel, pieces: Sequence[Piece], constants: Mapping[str, FixedTensor]) -> Iterator[Stored]:
    """Every tensor of the files, in the order of `pieces`."""
    shapes = {name: tuple(parameter.shape) for name, parameter in source.spec.parameters.items()}
    by_parameter: dict[str, list[Piece]] = {}
    by_key: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_parameter.setdefault(piece.parameter, []).append(piece)
        by_key.setdefault(piece.key, []).append(piece)
    if unstored := sorted(shapes.keys() - by_parameter.keys()):
        raise ConfigError(Problem(f"{unstored[0]} {list(shapes[unstored[0]])} has no place in this format", "--format"))
    sizes = stored_shapes(by_parameter, shapes, constants)
    for key, parts in by_key.items():
        yield Stored(key, sizes[key], partial(_assembled, source, parts, shapes, sizes[key]))
    for key, constant in constants.items():
        yield Stored(key, constant.shape, partial(torch.full, constant.shape, constant.value))


def _assembled(
    source: StoredModel, pieces: Sequence[Piece], shapes: Mapping[str, tuple[int, ...]], shape: tuple[int, ...]
) -> Tensor:
    """The stored tensor of that shape, of which each of the pieces is some rows."""
    assembled: Tensor | None = None
    for piece in pieces:
        ranges = [(0, size) for size in shapes[piece.parameter]]
        if piece.index is not None:
            ranges[0] = (piece.index, piece.index + 1)
        part = source.weights.read(piece.parameter, ranges)
        part = part if piece.index is None else part[0]
        part = part - piece.offset if piece.offset else part
        if assembled is None:
            assembled = part.new_empty(shape)
        target = assembled[piece.index] if piece.stacked and piece.index is not None else assembled
        (target.t() if piece.transposed else target)[piece.rows(part.size(0))] = part
    assert assembled is not None, "a stored tensor has pieces"
    return assembled


def _converted(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return (tensor if dtype is None else tensor.to(dtype)).contiguous()


def _write_shards(out: Path, stored: Sequence[Stored], dtype: torch.dtype | None, shard_bytes: int) -> str:
    """Write one safetensors file, or several and their index. Return the dtype."""
    kind = dtype_name(dtype or stored[0].make().dtype)
    shards: list[list[Stored]] = [[]]
    size_of_shard = total = 0
    for tensor in stored:
        size = torch.Size(tensor.shape).numel() * BYTES[kind]
        if shards[-1] and size_of_shard + size > shard_bytes:
            shards.append([])
            size_of_shard = 0
        shards[-1].append(tensor)
        size_of_shard, total = size_of_shard + size, total + size
    names = [SINGLE_FILE]
    if len(shards) > 1:
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards):
        entries = [Entry(s.key, DTYPES[kind][0], s.shape, torch.Size(s.shape).numel() * BYTES[kind]) for s in shard]
        contents = (tensor_bytes(_converted(s.make(), getattr(torch, kind))) for s in shard)
        write_safetensors(out / name, entries, contents, METADATA)
    if len(shards) > 1:
        weight_map = {tensor.key: name for name, shard in zip(names, shards) for tensor in shard}
        write_json(out / SHARD_INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return kind


def write_checkpoint(source: StoredModel, out: Path) -> None:
    """Make a checkpoint of weights, with config.yaml and the tokenizer's files. It has no optimizer state.

    Raises CheckpointError for damaged weights, EnvironmentProblem for `out`.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in source.spec.parameters.items()}
    file = file_of_rank(0)
    code, size = DTYPES[_IMPORTED]
    entries = [Entry(weight_key(name), code, shape, size * torch.Size(shape).numel()) for name, shape in shapes.items()]
    dtype = getattr(torch, _IMPORTED)
    contents = (tensor_bytes(source.weights.whole(name, shape).to(dtype)) for name, shape in shapes.items())
    tensors = {
        weight_key(name): StoredTensor(_IMPORTED, shape, (StoredPart((0,) * len(shape), shape, file),))
        for name, shape in shapes.items()
    }
    model = replace(source.config.model, vocab=source.spec.vocab)
    with written_aside(out) as aside:
        written = write_safetensors(aside / file, entries, contents)
        index = Index(0, source.config.optimizer.name, {}, {"imported": str(source.path)}, tensors, {file: written})
        write_bytes(aside / INDEX_FILE, encode(index))
        write_bytes(aside / CONFIG_FILE, freeze(replace(source.config, model=model)).encode())
        tokenizer.write(source, aside)
        write_others(source, aside, for_transformers=False)


@contextmanager
def written_aside(out: Path) -> Iterator[Path]:
    """Give a new directory beside `out`, which is renamed to it at the end and deleted after an error.

    Raises EnvironmentProblem if `out` exists already, unless it is an empty directory, or cannot be written.
    """
    out = paths.unused(out)
    aside = out.with_name(f".{out.name}.tmp-{secrets.token_hex(4)}")
    try:
        aside.mkdir(parents=True)
        yield aside
        sync(aside)
        os.rename(aside, out)
        sync(out.parent)
    except OSError as error:
        raise EnvironmentProblem(Problem(f"cannot write {out}: {error.strerror or error}", str(out))) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
